"""The disk that crashes is, as long as the power is on, a file system like any other."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from shalekv.store.local import LocalStore
from tests.contract.opening import OpenStore
from tests.contract.store_contract import StoreContract
from tests.kit.disks.crashing import BLOCK_BYTES, CrashingDisk
from tests.kit.inline_runtime import inline_runtime

FILE = Path("/file")


class TestLocalStoreOnCrashingDisk(StoreContract):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Stores on one disk."""
        disk = CrashingDisk()
        runtime = inline_runtime()
        return lambda: LocalStore(Path("/srv/db"), runtime, filesystem=disk)


def write(disk: CrashingDisk, data: bytes) -> int:
    """Write a new file, and leave it open and unsynced."""
    descriptor = disk.create(FILE)
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[disk.write(descriptor, unwritten) :]
    return descriptor


def left_by_cut(disk: CrashingDisk, seed: int) -> bytes | None:
    """What is in the file when the power is back; None if it is gone."""
    after = disk.after_cut(Random(seed))
    if not after.list_folder(Path("/")):
        return None
    return after.pread(after.open(FILE), 1 << 20, 0)


def test_what_is_not_synced_may_go() -> None:
    """Without syncs, a cut may leave all, nothing, an empty, a short or a torn file."""
    disk = CrashingDisk()
    data = b"x" * (4 * BLOCK_BYTES)
    write(disk, data)
    left = {left_by_cut(disk, seed) for seed in range(1_000)}
    assert {None, b"", data} <= left
    assert any(at and len(at) < len(data) for at in left)
    assert any(at and at[-1:] == b"x" and b"\0" in at for at in left)


def test_a_file_and_its_name_are_synced_apart() -> None:
    """A synced file in an unsynced folder may be gone, and is whole if it is not."""
    disk = CrashingDisk()
    data = b"x" * (4 * BLOCK_BYTES)
    disk.fsync(write(disk, data))
    assert {left_by_cut(disk, seed) for seed in range(100)} == {None, data}


def test_what_is_synced_stays() -> None:
    """A synced file in a synced folder survives every cut."""
    disk = CrashingDisk()
    disk.fsync(write(disk, b"x" * 1000))
    disk.fsync(disk.open_folder(Path("/")))
    assert {left_by_cut(disk, seed) for seed in range(100)} == {b"x" * 1000}
    disk.unlink(FILE)
    assert {left_by_cut(disk, seed) for seed in range(100)} == {None, b"x" * 1000}
