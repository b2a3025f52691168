"""Parts on disk are found again, within the bound, and no damaged part is served."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from shalekv.settings import MIB
from shalekv.store.disk_cache import PENDING_BYTES_MAX
from shalekv.store.disk_cache_folder import FOLDER, HEADER_BYTES, TEMP_LIFE_MS, Ages
from tests.kit.disks.cache_folders import (
    BYTES_MAX,
    data_of,
    files,
    finds,
    kept,
    open_cache,
    part,
    taken_bytes,
)


def set_age(path: Path, seconds: int) -> None:
    status = path.stat()
    os.utime(path, (status.st_atime - seconds, status.st_mtime - seconds))


async def test_parts_survive_a_restart(tmp_path: Path) -> None:
    """The next process finds all parts of the one before, also those that were still queued: parts
    of any length, around a page and larger than a write, with the counters and the bytes held.
    """
    parts = [part(n, size) for n, size in enumerate((8_000, 1, 4_035, 4_036, 4_037, 1_100_000))]
    first = open_cache(tmp_path, bytes_max=64 * MIB)
    first.keep(parts[0], data_of(parts[0]))
    assert not files(tmp_path)
    assert await finds(first, parts[0])
    await kept(first, *parts)
    cache = open_cache(tmp_path, bytes_max=64 * MIB)
    assert await cache.find([*parts, part(11)]) == [*map(data_of, parts), None]
    counters, wanted_bytes = cache.counters, sum(each.length for each in parts)
    assert (counters.hits, counters.misses, counters.hit_bytes) == (6, 1, wanted_bytes)
    await kept(cache, part(12))
    assert cache.counters.held_bytes == taken_bytes(tmp_path) > wanted_bytes


async def test_another_range_sst_or_database_is_another_part(tmp_path: Path) -> None:
    """A part is found only by its database, SST, offset and length."""
    cache = open_cache(tmp_path)
    wanted = part(1)
    await kept(cache, wanted)
    assert await finds(cache, wanted)
    for other in (
        wanted._replace(database_id=bytes(16)),
        wanted._replace(sst_id=bytes(16)),
        wanted._replace(offset=wanted.offset + 1),
        wanted._replace(length=wanted.length - 1),
    ):
        assert await cache.find([other]) == [None]
    assert await finds(cache, wanted)  # no other read took its file for a damaged one


async def test_damaged_files_are_not_served(tmp_path: Path) -> None:
    """A file with any bit flipped, of another length, or under the name of another part is a miss;
    it is deleted and counted.
    """
    cache, wanted, other = open_cache(tmp_path), part(3, 40), part(4, 40)
    await kept(cache, wanted)
    (path,) = files(tmp_path)
    sound = path.read_bytes()
    assert len(sound) == HEADER_BYTES + 40
    await kept(cache, other)
    (swapped,) = {*files(tmp_path)} - {path}
    bits = range(8 * len(sound))
    wrong = [
        sound[: at // 8] + bytes([sound[at // 8] ^ 1 << at % 8]) + sound[at // 8 + 1 :]
        for at in bits
    ]
    wrong += [
        *(sound[:length] for length in range(len(sound))),
        sound + b"\0",
        swapped.read_bytes(),
    ]
    with capture_logs() as logs:
        for damaged in wrong:
            path.write_bytes(damaged)
            assert await cache.find([wanted]) == [None]
            assert not path.exists()
    assert cache.counters.damaged == len(logs) == len(wrong)
    path.write_bytes(sound)
    assert await finds(cache, wanted)


async def test_the_bound_holds_after_every_write(tmp_path: Path) -> None:
    """For parts of any size, the files of a single process never exceed the bound."""
    cache, random = open_cache(tmp_path), Random(5)
    await kept(cache)
    for number in range(500):
        await kept(cache, part(number, random.choice([100, 5_000, 30_000])))
        if number % 10 == 0:
            assert taken_bytes(tmp_path) <= BYTES_MAX
    assert taken_bytes(tmp_path) > BYTES_MAX * 3 // 4
    counters = cache.counters
    assert counters.written == 500
    assert counters.evicted == 500 - len(files(tmp_path))
    assert counters.dropped == counters.errors == 0


async def test_a_smaller_bound_frees_what_is_too_much(tmp_path: Path) -> None:
    """A process that starts with a smaller bound evicts until the folder is below it."""
    await kept(open_cache(tmp_path, bytes_max=4 * MIB), *(part(n) for n in range(300)))
    assert taken_bytes(tmp_path) > BYTES_MAX
    cache = open_cache(tmp_path)
    await kept(cache, part(1_000))
    assert taken_bytes(tmp_path) <= BYTES_MAX
    assert await finds(cache, part(1_000))


async def test_what_is_used_stays(tmp_path: Path) -> None:
    """Among equally old parts, those that were read since the last scan are not evicted."""
    cache = open_cache(tmp_path)
    hot = [part(number) for number in range(20)]
    await kept(cache, *hot)
    for number in range(100, 500):
        if number % 5 == 0:
            for path in files(tmp_path):
                set_age(path, 10)
            for each in hot:
                assert await finds(cache, each)
        await kept(cache, part(number))
    assert cache.counters.evicted > 200


async def test_a_use_is_noted_once_between_scans(tmp_path: Path) -> None:
    """Repeated reads of a file change it once, so that a hit does not write to the disk."""
    cache = open_cache(tmp_path)
    await kept(cache, part(1))
    (path,) = files(tmp_path)
    set_age(path, 100)
    old = path.stat().st_mtime_ns
    assert await finds(cache, part(1))
    assert path.stat().st_mtime_ns > old
    set_age(path, -50)
    noted = path.stat().st_mtime_ns
    assert await finds(cache, part(1))
    assert path.stat().st_mtime_ns == noted


async def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """Other files in the folder are neither deleted nor counted."""
    (tmp_path / "precious").write_bytes(bytes(2 * MIB))
    cache = open_cache(tmp_path)
    await kept(cache, part(1))
    (shard,) = {path.parent for path in files(tmp_path)}
    strange = [shard / "notes.txt", shard / f"{'0' * 32}.bak", shard / ("A" * 32)]
    for path in strange:
        path.write_bytes(bytes(MIB))
    (shard / ("0" * 32)).mkdir()
    await kept(cache, *(part(number) for number in range(2, 400)))
    assert cache.counters.evicted > 200
    assert cache.counters.errors == 0
    assert all(path.exists() for path in [*strange, tmp_path / "precious"])


async def test_files_of_a_dead_writer_are_deleted(tmp_path: Path) -> None:
    """A temporary file is deleted when it is old, and counts until then."""
    cache = open_cache(tmp_path)
    await kept(cache, part(1))
    (path,) = files(tmp_path)
    fresh, stale = (path.with_name(f"{path.name}.{n}-{n}.tmp") for n in "ab")
    for left in (fresh, stale):
        left.write_bytes(bytes(8_000))
    set_age(stale, TEMP_LIFE_MS // 1_000 + 10)
    again = open_cache(tmp_path)
    (tmp_path / FOLDER / "tally").unlink()
    await kept(again, part(2))
    assert fresh.exists()
    assert not stale.exists()
    assert again.counters.held_bytes == taken_bytes(tmp_path)


async def test_large_parts_are_not_kept(tmp_path: Path) -> None:
    """A part larger than a small share of the bound is not kept, since it would evict too many
    others.
    """
    cache = open_cache(tmp_path)
    await kept(cache, part(1, BYTES_MAX // 32 - HEADER_BYTES), part(2, BYTES_MAX // 32))
    assert await finds(cache, part(1, BYTES_MAX // 32 - HEADER_BYTES))
    assert cache.counters.dropped == 1


def test_waiting_parts_take_bounded_memory(tmp_path: Path) -> None:
    """While nothing is written, parts are queued up to a bound, and further ones are dropped."""
    cache = open_cache(tmp_path, bytes_max=64 * MIB)
    count = 2 * PENDING_BYTES_MAX // 8_000
    for number in range(count):
        cache.keep(part(number), bytes(8_000))
    assert PENDING_BYTES_MAX - 8_000 <= cache.pending_bytes <= PENDING_BYTES_MAX
    assert cache.counters.dropped == count - cache.pending_bytes // 8_000


FILES = st.lists(st.tuples(st.integers(0, 10**13), st.integers(1, 1_000)), max_size=200)


def aged(files: Sequence[tuple[int, int]], classes_max: int) -> Ages:
    """The ages of files, each given by time and size."""
    ages = Ages(classes_max)
    for used_ms, size_bytes in files:
        ages.add(used_ms, size_bytes)
    return ages


@given(FILES, st.integers(1, 300), st.integers(0, 100_000))
def test_a_cut_frees_enough_and_keeps_what_is_newer(
    files: list[tuple[int, int]], classes_max: int, wanted_bytes: int
) -> None:
    """An eviction frees the requested bytes if there are as many, at most one file more, and the
    oldest files first.
    """
    ages = aged(files, classes_max)
    eviction = ages.eviction(wanted_bytes)
    taken = [eviction.includes(*file) for file in files]
    total_bytes = sum(size for _, size in files)
    freed_bytes = sum(size for (_, size), gone in zip(files, taken, strict=True) if gone)
    assert ages.total_bytes == total_bytes
    assert freed_bytes >= min(wanted_bytes, total_bytes)
    largest_bytes = max((size for _, size in files), default=0)
    assert freed_bytes < wanted_bytes + largest_bytes + 1
    gone_ms = [used for (used, _), gone in zip(files, taken, strict=True) if gone]
    kept_ms = [used for (used, _), gone in zip(files, taken, strict=True) if not gone]
    if gone_ms and kept_ms:
        assert max(gone_ms) < min(kept_ms) + ages.class_ms


def test_memory_is_bounded() -> None:
    """For any number of distinct times, the number of classes is bounded, and their widths are
    equal.
    """
    ages = aged([(number * 1_000, 1) for number in range(100_000)], 1_000)
    assert 100_000 * 1_000 / ages.class_ms <= 1_000
    eviction = ages.eviction(50_000)
    assert abs(eviction.from_ms - 50_000_000) <= ages.class_ms
