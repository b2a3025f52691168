"""How fast objects are uploaded to a local folder, beside dd with fsync. Nothing is asserted."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from shalekv.settings import GIB, MIB
from shalekv.store.local import LocalStore
from tests.bench.interleaved import Way, load, measured
from tests.bench.sizes import sized
from tests.kit.processes.in_process import real_runtime

pytestmark = pytest.mark.timeout(900)

ROUNDS = sized(5, 2)
TOTAL_BYTES = sized(GIB, 16 * MIB)


def uploading(store: LocalStore, pieces: int, data: bytes) -> Way:
    """Creates one object after the other."""

    async def upload() -> None:
        for number in range(pieces):
            await store.create(f"levels/{number}", data)

    return upload


def copying(source: Path, folder: Path, pieces: int) -> Way:
    """Runs dd for one file after the other. Blocks of 1 MiB are among its fastest.

    It reads the source from the page cache, which costs it a copy that the store has no need of;
    and the store links a name and syncs a folder for each object, which dd does not.
    """

    async def copy() -> None:
        for number in range(pieces):
            process = await asyncio.create_subprocess_exec(
                "dd",
                f"if={source}",
                f"of={folder / str(number)}",
                "bs=1M",
                "conv=fsync",
                "status=none",
            )
            assert await process.wait() == 0

    return copy


def emptying(folder: Path) -> Way:
    """Deletes what was written, and has the file system do so now."""

    async def empty() -> None:
        shutil.rmtree(folder)
        (folder / "levels").mkdir(parents=True)
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    return empty


@pytest.mark.parametrize("piece_mib", sized([1024, 64, 8], [16, 8]))
async def test_sequential_upload(tmp_path: Path, piece_mib: int) -> None:
    """Prints the speed of uploads in objects of this size through file:// in units of dd's."""
    folder, source, whole = tmp_path / "db", tmp_path / "piece", tmp_path / "whole"
    pieces = TOTAL_BYTES // (piece_mib * MIB)
    data = os.urandom(piece_mib * MIB)
    source.write_bytes(data)
    with whole.open("wb") as file:
        for _ in range(pieces):
            file.write(data)
    empty = emptying(folder)
    folder.mkdir()
    await empty()
    with real_runtime(threads=1) as runtime:
        ways = {
            "file://": uploading(LocalStore(folder, runtime), pieces, data),
            "dd, same pieces": copying(source, folder, pieces),
            "dd, one file": copying(whole, folder, 1),
        }
        costs = await measured(ways, ROUNDS, empty)
    print(f"\n{TOTAL_BYTES // MIB} MiB in objects of {piece_mib} MiB, {load()}")
    for way in ways:
        rate = TOTAL_BYTES / MIB / costs.wall_s(way)
        line = f"{way:16} {rate:7,.0f} MiB/s {costs.cpu_s(way):6.2f} s of CPU"
        print(line + ("" if way == "file://" else f"   file:// {costs.speed('file://', way)} x"))
    shutil.rmtree(tmp_path)
