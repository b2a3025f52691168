"""Disk caches in a folder of the test, and the files in that folder."""

from __future__ import annotations

from contextlib import suppress
from hashlib import shake_128
from pathlib import Path

from shalekv.settings import MIB
from shalekv.store.disk_cache import DiskCache
from shalekv.store.disk_cache_folder import FOLDER, CachedPart, is_ours, size_on_disk
from shalekv.store.files import REAL_FILE_SYSTEM, FileSystem
from tests.kit.inline_runtime import InlineClock, inline_runtime

DATABASE_ID = bytes(range(16))
BYTES_MAX = 1 * MIB


def part(number: int, length: int = 8_000, *, database_id: bytes = DATABASE_ID) -> CachedPart:
    return CachedPart(database_id, number.to_bytes(16, "big"), 7 * number, length)


def data_of(wanted: CachedPart) -> bytes:
    return shake_128(repr(wanted).encode()).digest(wanted.length)


def open_cache(
    path: Path,
    *,
    bytes_max: int = BYTES_MAX,
    clock: InlineClock | None = None,
    filesystem: FileSystem = REAL_FILE_SYSTEM,
    seed: int = 0,
) -> DiskCache:
    """A cache that works in the thread of the test."""
    return DiskCache(path, bytes_max, inline_runtime(seed, clock), filesystem=filesystem)


async def kept(cache: DiskCache, *parts: CachedPart) -> None:
    for each in parts:
        cache.keep(each, data_of(each))
    await cache.flush()


async def finds(cache: DiskCache, wanted: CachedPart) -> bool:
    found = (await cache.find([wanted]))[0]
    assert found is None or found == data_of(wanted)
    return found is not None


def files(path: Path) -> list[Path]:
    """The files of parts, those that are being written included."""
    return [at for at in (path / FOLDER).glob("??/*") if is_ours(at.name)]


def taken_bytes(path: Path) -> int:
    taken = 0
    for at in files(path):
        with suppress(FileNotFoundError):
            taken += size_on_disk(at.stat().st_size)
    return taken
