"""The memtable: what is accounted, merged and dropped, and the cost of range deletes.

The results of reads are the subject of `test_memtable_model`.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable

import pytest

from shalekv.clock import LoopClock
from shalekv.protocol.entry import FRAGMENT_BYTES, Entry, Kind
from shalekv.read.memtable import Memtable
from shalekv.read.sorted_runs import MERGE_FAN_IN, SKIPS_MAX, MemoryRun
from tests.kit.engine.commits import drop, landed, merge, put, range_delete, read, run_of, slices_of
from tests.kit.inline_runtime import InlineClock, finish
from tests.kit.virtual_time import virtual_time

COUNT = 50_000
VALUE = bytes(1_000)
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True])


def key_of(number: int) -> bytes:
    """Return a key; keys are in the order of their numbers."""
    return b"%06d" % number


def many(seq: int, count: int = COUNT) -> MemoryRun:
    entries = {key_of(n): Entry(key_of(n), seq, Kind.PUT, b"v") for n in range(count)}
    return MemoryRun.from_newest(entries, max_seq=seq)


def filled(*seqs: int, key: bytes | None = None) -> Memtable:
    """Return a memtable with a run for each number, of a key of its own unless one is given."""
    return landed(*(run_of(seq, put(b"%d" % seq if key is None else key, VALUE)) for seq in seqs))


def test_bytes_are_counted_from_the_landing_on() -> None:
    """Memory is accounted once, from the landing of an object on, in or out of order.

    Each fragment of range tombstones counts with its bounds and its overhead.
    """
    memtable = Memtable()
    first, second = run_of(1, put(b"a", b"12345")), run_of(2, put(b"b"))
    memtable.land(second)
    assert memtable.size_bytes == second.size_bytes
    memtable.land(first)
    memtable.extend_prefix(first)
    memtable.extend_prefix(second)
    assert memtable.size_bytes == first.size_bytes + second.size_bytes
    memtable = Memtable()
    for seq in (2, 3):
        memtable.land(range_delete(seq, *[(b"a", b"c"), (b"x", b"")][: 4 - seq]))
        assert memtable.size_bytes == 2 * FRAGMENT_BYTES + 3
    assert memtable.range_tombstone_count == 2


def test_accounted_memory_is_not_too_little() -> None:
    """Python allocates no more for small entries than is accounted."""
    commits, count = 400, 50
    tracemalloc.start()
    try:
        memtable = Memtable()
        for seq in range(1, commits + 1):
            changes = [put(b"key/%08d" % (seq * count + n), b"") for n in range(count)]
            landed(run_of(seq, *changes), into=memtable)
            merge(memtable)
        allocated_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert allocated_bytes <= memtable.size_bytes


def test_merges_drop_what_is_hidden_and_memory_falls() -> None:
    """Deleted entries leave the runs and the dictionary, and the accounted bytes fall."""
    puts = [run_of(seq, *(put(b"%d/%d" % (seq, n)) for n in range(50))) for seq in range(1, 8)]
    memtable = landed(*puts)
    full_bytes = memtable.size_bytes
    landed(range_delete(8, (b"1", b"7")), into=memtable)
    assert memtable.key_count == 350
    held = memtable.view(8, 1)
    landed(run_of(9, *(put(b"7/%d" % n, b"new") for n in range(50))), into=memtable)
    merge(memtable)
    assert (memtable.run_count, memtable.key_count) == (1, 50)
    assert memtable.size_bytes < full_bytes / 6
    assert len(read(memtable.view(9, 2))) == len(read(held)) == 50


def test_merged_runs_count_while_views_from_before_and_after_have_them() -> None:
    """The inputs of a merge count while a view has them, even after the result is dropped.

    Inputs and result have the same entries, which count once.
    """
    memtable = filled(1, 2)
    size_bytes = memtable.size_bytes
    before = memtable.view(2, 0)
    memtable.close_segment()
    merge(memtable)
    assert memtable.held_bytes == 0  # the result has the same entries
    after = memtable.view(2, 0)
    drop(memtable, 2)
    assert memtable.held_bytes == size_bytes
    del after
    assert memtable.held_bytes == size_bytes
    del before
    assert memtable.held_bytes == 0


def test_versions_that_only_a_view_has_count_before_anything_is_dropped() -> None:
    """Overwritten versions that a merge leaves out count while a view has them."""
    memtable = filled(1, 2, key=b"k")
    one_bytes = memtable.size_bytes // 2
    view = memtable.view(2, 0)
    memtable.close_segment()
    merge(memtable)
    assert (memtable.size_bytes, memtable.held_bytes) == (one_bytes, one_bytes)
    drop(memtable, 2)
    assert memtable.held_bytes == 2 * one_bytes
    del view
    assert memtable.held_bytes == 0


def test_runs_that_were_set_aside_count_too() -> None:
    """Runs that were set aside below a load count after they are dropped."""
    memtable = filled(1, 2)
    size_bytes = memtable.size_bytes
    memtable.set_aside(3)
    view = memtable.view_below_load(3)
    landed(run_of(4, put(b"4", VALUE)), into=memtable)
    kept_bytes = memtable.size_bytes - size_bytes
    drop(memtable, 3)
    assert (memtable.size_bytes, memtable.held_bytes) == (kept_bytes, size_bytes)
    del view
    assert memtable.held_bytes == 0


async def test_many_small_objects_leave_few_runs() -> None:
    """Merging keeps up with an object that lands in every iteration of the loop."""
    memtable = Memtable()
    async with asyncio.TaskGroup() as tasks:
        merging = tasks.create_task(memtable.merge_when_due(LoopClock()))
        for seq in range(3_000):
            landed(run_of(seq, put(b"%04d" % (seq * 7919 % 10_000))), into=memtable)
            assert memtable.run_count <= 60
            await asyncio.sleep(0)
        merging.cancel()


@virtual_time(5)
async def test_concurrent_merges_drop_nothing() -> None:
    """Entries that land during two concurrent merges are in every scan afterwards."""
    memtable = Memtable()
    seqs = iter(range(1, 1_000))

    def land(count: int) -> list[bytes]:
        """Land a run of so many keys of its own."""
        seq = next(seqs)
        keys = [b"%d-%d" % (seq, number) for number in range(count)]
        landed(run_of(seq, *(put(key) for key in keys)), into=memtable)
        return keys

    expected = [key for _ in range(MERGE_FAN_IN) for key in land(1_000)]
    clock = LoopClock()
    async with asyncio.TaskGroup() as tasks:
        merging = [tasks.create_task(memtable.merge_runs(clock)) for _ in range(2)]
        while not all(task.done() for task in merging):
            expected += land(1) if memtable.key_count < MERGE_FAN_IN * 1_010 else []
            await clock.sleep_ms(0)
    assert [key for key, _ in read(memtable.view(1_000, None))] == sorted(expected)


class Watching(InlineClock):
    """A clock that calls a function whenever other tasks may run."""

    def __init__(self, poll: Callable[[], None]) -> None:
        super().__init__()
        self._poll = poll

    async def sleep_ms(self, duration_ms: float) -> None:
        del duration_ms
        self._poll()


def test_what_is_being_dropped_hides_nothing() -> None:
    """A range delete in a segment that is being dropped hides no put that came after it.

    The put may be gone already: then memory returns nothing for the key.
    """
    memtable = landed(range_delete(1, (b"a", b"z")), run_of(2, put(b"k", b"after")))
    memtable.close_segment()
    seen: list[Entry | None] = []
    finish(memtable.drop_through(2, Watching(lambda: seen.append(memtable.get(b"k")))))
    assert seen
    assert {entry and entry.seq for entry in seen} <= {2, None}
    assert memtable.get(b"k") is None


def test_segments_go_from_the_oldest_on_when_the_levels_hold_all_of_them() -> None:
    """A segment with a commit above the dropped ones stays whole, and so do newer ones."""
    memtable = Memtable()
    for seqs in ((1, 2), (3, 4), (5,)):
        landed(*(run_of(seq, put(b"%d" % seq)) for seq in seqs), into=memtable)
        memtable.close_segment()
    assert [drop(memtable, seq) for seq in (1, 3)] == [0, 1]
    assert [memtable.get(b"%d" % seq) is None for seq in range(1, 6)] == [True] * 2 + [False] * 3
    assert drop(memtable, 5) == 2
    assert memtable.key_count == 0


@pytest.mark.parametrize("is_ahead", [True, False])
def test_range_deletes_are_rebuilt_after_a_drop(*, is_ahead: bool) -> None:
    """Range deletes of dropped segments go; those of others and those that are ahead stay."""
    memtable = landed(range_delete(1, (b"a", b"c")))
    memtable.close_segment()
    landed(range_delete(2, (b"d", b"f")), run_of(3, put(b"z")), into=memtable)
    last = range_delete(4, (b"g", b""))
    memtable.land(last)
    if not is_ahead:
        memtable.extend_prefix(last)
    before_bytes = memtable.size_bytes
    assert memtable.range_tombstone_count == 3
    assert drop(memtable, 1) == 1
    assert memtable.range_tombstone_count == 2
    assert memtable.size_bytes < before_bytes
    found = {key: memtable.get(key) for key in (b"b", b"e", b"z")}
    seqs = {key: entry and entry.seq for key, entry in found.items()}
    assert seqs == {b"b": None, b"e": 2, b"z": 4}
    assert read(memtable.view(3, 0)) == ([(b"z", b"v")] if is_ahead else [])


@DIRECTIONS
def test_deleted_keys_are_stepped_over_at_once(*, reverse: bool) -> None:
    """A scan skips deleted keys of a run in a few slices, however many they are."""
    memtable = landed(many(1), range_delete(2, (key_of(10), key_of(COUNT - 10))))
    slices = slices_of(memtable.view(2, 1), reverse=reverse)
    assert len(slices) <= 2
    assert sum(map(len, slices)) == 20
    everything = landed(many(1), range_delete(2, (b"", b"")))
    assert len(slices_of(everything.view(2, 1), reverse=reverse)) <= 1


@DIRECTIONS
def test_what_was_put_again_is_found_among_the_deleted(*, reverse: bool) -> None:
    """A scan finds later puts among deleted keys without reading those."""
    again = [put(key_of(n), b"new") for n in range(0, COUNT, COUNT // 10)]
    memtable = landed(many(1), range_delete(2, (b"0", b"1")), run_of(3, *again))
    slices = slices_of(memtable.view(3, 2), reverse=reverse)
    found = [entry.key for entries in slices for entry in entries]
    assert found == sorted((change.key for change in again), reverse=reverse)
    assert len(slices) <= 2


@DIRECTIONS
def test_thousands_of_range_deletes_are_stepped_over_in_slices(*, reverse: bool) -> None:
    """Other tasks run while a scan skips thousands of range deletes of one key each."""
    count = 10 * SKIPS_MAX
    small = [range_delete(2 + n, (key_of(n), key_of(n + 1))) for n in range(count)]
    memtable = landed(many(1, count), *small)
    slices = slices_of(memtable.view(2 + count, 1), reverse=reverse)
    assert not any(slices)
    assert len(slices) >= 5
