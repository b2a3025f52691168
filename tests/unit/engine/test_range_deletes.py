"""Range deletes in memory: what they cost, what they leave behind, and what they spare."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from shalekv.clock import LoopClock
from shalekv.core.entry import Entry, Kind
from shalekv.core.key_range import KeyRange, prefix_end
from shalekv.core.range_tombstones import FRAGMENT_BYTES
from shalekv.core.transaction import Change, Operation, Put, Transaction
from shalekv.core.transaction import DeleteRange as Range
from shalekv.engine.commit import Commit
from shalekv.engine.memtable import Memtable
from shalekv.engine.sorted_runs import MERGE_FAN_IN, SKIPS_MAX, Run
from shalekv.engine.view import View
from tests.kit.engine.commits import NOW_MS, group_of, is_put, put, read, run_of, unsettled
from tests.kit.engine.commits import slices_of as scan_of
from tests.kit.inline_runtime import InlineClock, finish
from tests.kit.states import DictState
from tests.sim.run import simulate
from tests.sim.world import World

COUNT = 50_000
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True])


def key_of(number: int) -> bytes:
    """A key; keys are in the order of their numbers."""
    return b"%06d" % number


def deleted(seq: int, *ranges: tuple[bytes, bytes]) -> Run:
    """The run of a commit that deletes these ranges."""
    return transacted(seq, *(Range(KeyRange(*each)) for each in ranges))


def transacted(seq: int, *operations: Operation) -> Run:
    """The run of a commit that does these operations."""
    commit = Commit.of(Transaction(operations), seq, unsettled, size_bytes=0)
    commit.decide(DictState())
    return group_of(0, commit).run


def landed(*runs: Run) -> Memtable:
    """A memtable with these runs in its prefix."""
    memtable = Memtable()
    for run in runs:
        memtable.land(run)
        memtable.extend_prefix(run)
    return memtable


def many(seq: int, count: int = COUNT) -> Run:
    """One run of many keys."""
    entries = {key_of(n): Entry(key_of(n), seq, Kind.PUT, b"v") for n in range(count)}
    return Run.from_newest(entries, max_seq=seq)


def slices_of(view: View, *, reverse: bool) -> list[list[Entry]]:
    """A scan of everything."""
    return scan_of(view, reverse=reverse)


@DIRECTIONS
def test_deleted_keys_are_stepped_over_at_once(reverse: bool) -> None:  # noqa: FBT001 - a direction
    """However many keys of a run were deleted, a scan looks at a handful of slices."""
    memtable = landed(many(1), deleted(2, (key_of(10), key_of(COUNT - 10))))
    slices = slices_of(memtable.view(2, 1), reverse=reverse)
    assert len(slices) <= 2
    assert sum(map(len, slices)) == 20
    everything = landed(many(1), deleted(2, (b"", b"")))
    assert len(slices_of(everything.view(2, 1), reverse=reverse)) <= 1


@DIRECTIONS
def test_what_was_put_again_is_found_among_the_deleted(reverse: bool) -> None:  # noqa: FBT001 - a direction
    """Later puts, one here and one there, cost no more than they are."""
    again = [put(key_of(n), b"new") for n in range(0, COUNT, COUNT // 10)]
    memtable = landed(many(1), deleted(2, (b"0", b"1")), run_of(3, *again))
    slices = slices_of(memtable.view(3, 2), reverse=reverse)
    found = [entry.key for entries in slices for entry in entries]
    assert found == sorted((change.key for change in again), reverse=reverse)
    assert len(slices) <= 2


@DIRECTIONS
def test_thousands_of_range_deletes_are_stepped_over_in_slices(reverse: bool) -> None:  # noqa: FBT001 - a direction
    """Where each range delete hides one key, others get their turns between some of them."""
    count = 10 * SKIPS_MAX
    small = [deleted(2 + n, (key_of(n), key_of(n + 1))) for n in range(count)]
    memtable = landed(many(1, count), *small)
    slices = slices_of(memtable.view(2 + count, 1), reverse=reverse)
    assert not any(slices)
    assert len(slices) >= 5


def test_puts_after_a_range_delete_of_their_commit_stay() -> None:
    """One number for all of a commit: what stands after the range is not hidden by it."""
    run = transacted(2, Put(b"b", b"before"), Range(KeyRange(b"a", b"d")), Put(b"c", b"after"))
    memtable = landed(run_of(1, put(b"a"), put(b"b"), put(b"c"), put(b"d")), run)
    assert read(memtable.view(2, 1)) == [(b"c", b"after"), (b"d", b"v")]
    assert [not is_put(memtable.get(key)) for key in (b"a", b"b", b"c", b"d")] == [
        True,
        True,
        False,
        False,
    ]


def test_range_delete_ahead_of_its_turn_hides_from_gets_only() -> None:
    """As all that lands behind a gap: gets see it at once, scans when the gap is closed."""
    memtable = landed(run_of(1, put(b"a"), put(b"b")))
    ahead = deleted(3, (b"a", b"b"))
    memtable.land(ahead)
    assert not is_put(memtable.get(b"a"))
    assert read(memtable.view(1, 0)) == [(b"a", b"v"), (b"b", b"v")]
    late = run_of(2, put(b"a", b"late"))
    memtable.land(late)
    assert not is_put(memtable.get(b"a"))
    memtable.extend_prefix(late)
    assert read(memtable.view(2, 1)) == [(b"a", b"late"), (b"b", b"v")]
    memtable.extend_prefix(ahead)
    assert read(memtable.view(3, 2)) == [(b"b", b"v")]


def test_range_deletes_that_land_in_reverse_join_the_prefix_in_order() -> None:
    """Scans see each when its turn has come, and not before, whatever gets see already."""
    first, second = deleted(2, (b"a", b"b")), deleted(3, (b"b", b"c"))
    memtable = landed(run_of(1, put(b"a"), put(b"b"), put(b"c")))
    memtable.land(second)
    memtable.land(first)
    assert [not is_put(memtable.get(key)) for key in (b"a", b"b", b"c")] == [True, True, False]
    for seq, run, left in ((1, None, 3), (2, first, 2), (3, second, 1)):
        if run is not None:
            memtable.extend_prefix(run)
        assert len(read(memtable.view(seq, 0))) == left
    last = deleted(4, (b"c", b"d"))
    memtable.land(last)
    memtable.extend_prefix(last)
    assert read(memtable.view(4, 0)) == []


def test_merges_drop_what_is_hidden_and_memory_falls() -> None:
    """Deleted entries leave the runs and the newest of each key, and so do their bytes."""
    puts = [run_of(seq, *(put(b"%d/%d" % (seq, n)) for n in range(50))) for seq in range(1, 8)]
    memtable = landed(*puts)
    full_bytes = memtable.size_bytes
    last = deleted(8, (b"1", b"7"))
    memtable.land(last)
    memtable.extend_prefix(last)
    assert memtable.key_count == 350
    held = memtable.view(8, 1)
    final = run_of(9, *(put(b"7/%d" % n, b"new") for n in range(50)))
    memtable.land(final)
    memtable.extend_prefix(final)
    finish(memtable.merge_runs(InlineClock()))
    assert memtable.run_count == 1
    assert memtable.key_count == 50
    assert memtable.size_bytes < full_bytes / 6
    assert len(read(memtable.view(9, 2))) == len(read(held)) == 50
    assert MERGE_FAN_IN == 8  # as many runs as there are puts


def test_merge_keeps_what_is_newer_than_its_tombstone() -> None:
    """Of a key that was deleted and put again the put stays, in the run and for gets."""
    runs = [run_of(seq, put(b"a", b"%d" % seq), put(b"b", b"%d" % seq)) for seq in range(1, 8)]
    memtable = landed(*runs, deleted(8, (b"a", b"c")), run_of(9, put(b"a", b"9")))
    finish(memtable.merge_runs(InlineClock()))
    assert memtable.run_count == 1
    assert read(memtable.view(9, 8)) == [(b"a", b"9")]
    assert not is_put(memtable.get(b"b"))
    found = memtable.get(b"a")
    assert found is not None
    assert found.value == b"9"
    assert memtable.key_count == 1


def test_merge_drops_nothing_for_a_range_delete_behind_a_gap() -> None:
    """Scans of the prefix, which does not contain it yet, still read what it will hide."""
    runs = [run_of(seq, put(b"%d" % seq)) for seq in range(1, MERGE_FAN_IN + 1)]
    memtable = landed(*runs)
    ahead = deleted(30, (b"", b""))
    memtable.land(ahead)
    finish(memtable.merge_runs(InlineClock()))
    assert memtable.run_count == 1
    assert len(read(memtable.view(8, 8))) == MERGE_FAN_IN
    memtable.extend_prefix(ahead)
    assert read(memtable.view(30, 9)) == []


def test_merge_does_not_forget_what_has_landed_ahead() -> None:
    """A hidden version goes; the newer one of its key that landed behind a gap stays for gets."""
    runs = [run_of(seq, put(b"a", b"%d" % seq)) for seq in range(1, MERGE_FAN_IN + 1)]
    memtable = landed(*runs, deleted(20, (b"", b"")))
    ahead = run_of(30, put(b"a", b"ahead"))
    memtable.land(ahead)
    finish(memtable.merge_runs(InlineClock()))
    found = memtable.get(b"a")
    assert found is not None
    assert found.value == b"ahead"
    assert read(memtable.view(20, 8)) == []
    memtable.extend_prefix(ahead)
    assert read(memtable.view(30, 9)) == [(b"a", b"ahead")]


def test_range_tombstones_are_accounted_from_their_landing_on() -> None:
    """Each part of the key space costs its bounds and its overhead, and overlaps cost once."""
    memtable = Memtable()
    memtable.land(deleted(2, (b"a", b"c"), (b"x", b"")))
    assert memtable.size_bytes == 2 * FRAGMENT_BYTES + 3
    memtable.land(deleted(3, (b"a", b"c")))
    assert memtable.size_bytes == 2 * FRAGMENT_BYTES + 3
    assert memtable.range_tombstone_count == 2


def test_object_of_range_deletes_alone_adds_no_run() -> None:
    """A scan merges runs of entries: range deletes are not among them."""
    memtable = landed(run_of(1, put(b"a")), deleted(2, (b"a", b"b")))
    assert memtable.run_count == 1
    assert read(memtable.view(2, 1)) == []


def test_range_deletes_while_runs_are_merged() -> None:
    """Deletions that land in the middle of a merge hide what the merge has kept."""

    async def main(world: World) -> None:
        memtable, model, random = Memtable(), DictState(now_ms=NOW_MS), Random(world.seed)
        async with asyncio.TaskGroup() as tasks:
            merging = tasks.create_task(memtable.merge_when_due(LoopClock()))
            for seq in range(1, 300):
                operations: list[Operation] = [
                    Put(random.randbytes(2), b"%d" % seq) for _ in range(random.choice([1, 40]))
                ]
                if random.random() < 0.2:
                    prefix = random.randbytes(1)
                    operations.insert(
                        random.randrange(2), Range(KeyRange(prefix, prefix_end(prefix)))
                    )
                commit = Commit.of(Transaction(operations), seq, unsettled, size_bytes=0)
                commit.decide(model)
                assert commit.decision is not None
                model.apply(commit.decision, seq)
                run = group_of(seq, commit).run
                memtable.land(run)
                memtable.extend_prefix(run)
                await asyncio.sleep(0)
            await world.sleep_ms(1)
            expected = {key: value for key, (value, _) in model.values().items()}
            assert dict(read(memtable.view(299, 0))) == expected
            got = {key: memtable.get(key) for key in expected}
            assert {key: entry and entry.value for key, entry in got.items()} == expected
            merging.cancel()

    for seed in range(5):
        simulate(seed, main)


def test_changes_and_ranges_of_a_commit_are_moved_together() -> None:
    """A commit that is put behind others has one number again, on all that it does."""
    commit = Commit([Change(b"a", Kind.PUT, b"1")], 5, unsettled)
    commit.range_tombstones = [Entry(b"b", 5, Kind.RANGE_TOMBSTONE, b"c")]
    commit.resequence(9)
    assert {e.seq for e in (*commit.entries, *commit.range_tombstones)} == {9} == {commit.seq}
