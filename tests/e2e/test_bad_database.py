"""Databases that must not be opened as they are: each is refused with what is wrong, and kept."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pytest

from shalekv.cli.exit_codes import ExitCode
from shalekv.errors import CorruptObject
from shalekv.format import names
from shalekv.store.local import LocalStore
from shalekv.store.memory import MemoryObjects
from shalekv_client import Client
from tests.kit.processes.child import Line
from tests.kit.processes.in_process import (
    memory_store,
    open_writer,
    put_at,
    real_runtime,
    running,
    serve_settings,
    with_data,
)
from tests.kit.processes.processes import Processes
from tests.kit.processes.wal_contents import manifest_ids, manifest_path, wal_ids, wal_path

DEADLINE_S = 200
PUTS = 8

Damage = Callable[[bytes], bytes]


def flip(at: int) -> Damage:
    """Flips one bit of the byte `at`; from the end when it is negative."""

    def flipped(data: bytes) -> bytes:
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        return bytes(damaged)

    return flipped


def newer_manifest(data: bytes) -> bytes:
    """As a later version would write it: format version 2 under a sound checksum."""
    header = data[:8] + struct.pack("<H", 2) + data[10:16]
    checksum = google_crc32c.value(header + data[20:])
    return header + struct.pack("<I", checksum) + data[20:]


def newer_wal(data: bytes) -> bytes:
    """As above: the footer ends in its length, version, flags, checksum and magic."""
    (length,) = struct.unpack_from("<I", data, len(data) - 20)
    before = data[: len(data) - 16] + struct.pack("<H", 2) + data[-14:-12]
    checksum = google_crc32c.value(before[len(data) - 20 - length :])
    return before + struct.pack("<I", checksum) + data[-8:]


async def make_database(folder: Path) -> None:
    """A database with some WAL objects."""
    with real_runtime() as runtime:
        async with running(LocalStore(folder, runtime), serve_settings(), runtime) as writer:
            for number in range(PUTS):
                await put_at(writer, b"key/%d" % number, b"value")


async def refusal(processes: Processes, folder: Path, code: ExitCode) -> Line:
    """The last log line of a server that must refuse the database; it never serves."""
    server = processes.start_serve(f"file://{folder}", create=False)
    assert await server.exited() == code, server.report()
    assert not any("listen" in line for line in server.lines()), server.report()
    last = server.lines()[-1]
    assert (last["event"], last["exit_code"]) == ("ended by an error", code), server.report()
    return last


async def expect_all(folder: Path) -> None:
    """The database opens, and everything is there."""
    with real_runtime() as runtime:
        async with running(LocalStore(folder, runtime), serve_settings(), runtime) as writer:
            found = [writer.engine.committed(b"key/%d" % number) for number in range(PUTS)]
    assert [each.value for each in found if each is not None] == [b"value"] * PUTS


async def test_url_without_a_database(processes: Processes, tmp_path: Path) -> None:
    """Without --create it is refused, with what to do about it, and nothing is made there."""
    last = await refusal(processes, tmp_path / "nothing", ExitCode.DATABASE_NOT_FOUND)
    assert last["reason"] == "DATABASE_NOT_FOUND"
    assert "--create" in last["problem"]
    assert _is_empty(tmp_path)


async def test_create_keeps_what_is_there(processes: Processes, tmp_path: Path) -> None:
    """--create on a database opens it as it is."""
    folder = tmp_path / "db"
    await make_database(folder)
    server = await processes.serve(f"file://{folder}", create=True)
    async with Client(server.listen) as client:
        keys = [entry.key async for entry in client.scan()]
    assert keys == [b"key/%d" % number for number in range(PUTS)]
    assert await server.stop() == ExitCode.OK, server.report()


@pytest.mark.parametrize(
    ("damage", "reason", "says"),
    [
        pytest.param(flip(30), "BAD_CHECKSUM", "expected 0x", id="bit of a block"),
        pytest.param(flip(-100), "BAD_CHECKSUM", "expected 0x", id="bit of the footer"),
        pytest.param(flip(-1), "BAD_MAGIC", "expected", id="bit of the magic"),
        pytest.param(lambda data: data[:-1], "BAD_MAGIC", "expected", id="cut"),
        pytest.param(lambda _: b"", "TRUNCATED", "expected", id="empty"),
        pytest.param(newer_wal, "UNSUPPORTED_VERSION", "version 2, expected", id="newer"),
    ],
)
async def test_damaged_wal_object(
    processes: Processes, tmp_path: Path, damage: Damage, reason: str, says: str
) -> None:
    """A WAL object that is not as it was written is refused by name, offset and what was expected;
    once it is brought back, everything is there.
    """
    folder = tmp_path / "db"
    await make_database(folder)
    path = wal_path(folder, wal_ids(folder)[3])
    await _damage_and_restore(processes, folder, path, damage, reason=reason, says=says)


@pytest.mark.parametrize(
    ("damage", "reason", "says"),
    [
        pytest.param(flip(40), "BAD_CHECKSUM", "expected 0x", id="bit"),
        pytest.param(flip(0), "BAD_MAGIC", "expected", id="bit of the magic"),
        pytest.param(lambda data: data[:-5], "TRUNCATED", "expected", id="cut"),
        pytest.param(newer_manifest, "UNSUPPORTED_VERSION", "version 2, expected", id="newer"),
    ],
)
async def test_damaged_manifest(
    processes: Processes, tmp_path: Path, damage: Damage, reason: str, says: str
) -> None:
    """As above for the current manifest; an older one is not taken in its place."""
    folder = tmp_path / "db"
    await make_database(folder)
    path = manifest_path(folder, manifest_ids(folder)[-1])
    await _damage_and_restore(processes, folder, path, damage, reason=reason, says=says)


async def test_missing_wal_object(processes: Processes, tmp_path: Path) -> None:
    """An object that is missing in the middle of the log is named, and not passed over."""
    folder = tmp_path / "db"
    await make_database(folder)
    path = wal_path(folder, wal_ids(folder)[3])
    data = path.read_bytes()
    path.unlink()
    last = await refusal(processes, folder, ExitCode.DAMAGED)
    assert f"wal/{path.name} is missing" in last["problem"]
    path.write_bytes(data)
    await expect_all(folder)


async def test_every_damaged_byte_is_found() -> None:
    """Whichever byte of a WAL object or of the manifest is damaged, opening fails and names it."""
    objects = MemoryObjects()
    with real_runtime() as runtime:
        async with asyncio.timeout(DEADLINE_S):
            async with running(memory_store(objects), serve_settings(), runtime) as writer:
                await put_at(writer, b"key", b"value")
            wal_name = names.wal_name(1)
            manifest_name = max(info.name for info in objects.page(names.MANIFEST_FOLDER, ""))
            for name in (wal_name, manifest_name):
                stored = objects.find(name)
                assert stored is not None
                for at in range(len(stored.data)):
                    store = memory_store(with_data(objects, name, flip(at)(stored.data)))
                    with pytest.raises(CorruptObject) as found:
                        await open_writer(store, serve_settings(), runtime)
                    assert found.value.name == name, f"byte {at} of {name}"


async def _damage_and_restore(
    processes: Processes, folder: Path, path: Path, damage: Damage, *, reason: str, says: str
) -> None:
    data = _replace(path, damage)
    last = await refusal(processes, folder, ExitCode.DAMAGED)
    assert last["reason"] == reason, last
    assert f"{path.parent.name}/{path.name} at byte " in last["problem"]
    assert says in last["problem"]
    _replace(path, lambda _: data)
    await expect_all(folder)


def _replace(path: Path, change: Damage) -> bytes:
    """Change what a file holds; what it held before."""
    data = path.read_bytes()
    path.write_bytes(change(data))
    return data


def _is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())
