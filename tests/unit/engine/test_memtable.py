"""The memtable: what gets and scans see while objects land and runs are merged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from shalekv.clock import LoopClock
from shalekv.core.entry import Entry, Kind
from shalekv.engine.memtable import Memtable
from shalekv.engine.sorted_runs import MERGE_FAN_IN, Run
from tests.kit.engine.commits import commit_of, group_of, put, read, run_of, tombstone
from tests.kit.inline_runtime import InlineClock, finish
from tests.sim.run import simulate
from tests.sim.world import World


def landed(*runs_in_order: tuple[int, bytes, bytes]) -> Memtable:
    """A memtable in whose prefix each (seq, key, value) is a run of its own."""
    memtable = Memtable()
    for seq, key, value in runs_in_order:
        run = run_of(seq, put(key, value))
        memtable.land(run)
        memtable.extend_prefix(run)
    return memtable


def test_get_sees_the_newest_that_landed() -> None:
    """Objects may land in any order: the greater sequence number wins, tombstones included."""
    memtable = Memtable()
    memtable.land(run_of(2, put(b"a", b"2"), put(b"b", b"2")))
    memtable.land(run_of(1, put(b"a", b"1"), put(b"c", b"1")))
    memtable.land(run_of(3, tombstone(b"b")))
    found = {key: memtable.get(key) for key in (b"a", b"b", b"c", b"d")}
    assert {key: entry and entry.seq for key, entry in found.items()} == {
        b"a": 2,
        b"b": 3,
        b"c": 1,
        b"d": None,
    }
    assert memtable.key_count == 3


def test_scans_see_the_prefix_only() -> None:
    """What has landed ahead of its turn is shown to gets and not to scans."""
    memtable = landed((1, b"a", b"1"))
    ahead = run_of(3, put(b"a", b"3"))
    memtable.land(ahead)
    assert read(memtable.view(1, 0)) == [(b"a", b"1")]
    memtable.extend_prefix(ahead)
    assert read(memtable.view(3, 1)) == [(b"a", b"3")]


def test_bytes_are_counted_from_the_landing_on() -> None:
    """Memory is accounted when an object lands, ahead of its turn or not, and once only."""
    memtable = Memtable()
    first, second = run_of(1, put(b"a", b"12345")), run_of(2, put(b"b"))
    memtable.land(second)
    assert memtable.size_bytes == second.size_bytes
    memtable.land(first)
    memtable.extend_prefix(first)
    memtable.extend_prefix(second)
    assert memtable.size_bytes == first.size_bytes + second.size_bytes


def test_merging_shrinks_what_is_accounted() -> None:
    """Versions that a newer one shadows are gone after a merge, and so are their bytes."""
    memtable = landed(*((seq, b"k", b"%03d" % seq) for seq in range(1, MERGE_FAN_IN + 1)))
    one_bytes = memtable.size_bytes // MERGE_FAN_IN
    finish(memtable.merge_runs(InlineClock()))
    assert (memtable.run_count, memtable.size_bytes) == (1, one_bytes)
    assert read(memtable.view(MERGE_FAN_IN, 0)) == [(b"k", b"%03d" % MERGE_FAN_IN)]


def test_fence_leaves_nothing() -> None:
    """An empty object adds neither runs nor bytes."""
    memtable = Memtable()
    empty = Run.from_newest({}, max_seq=1)
    memtable.land(empty)
    memtable.extend_prefix(empty)
    assert (memtable.run_count, memtable.size_bytes, memtable.key_count) == (0, 0, 0)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(b"abcdefgh"), st.sampled_from([b"1", b"2", None])), max_size=60
)


@given(
    operations=OPERATIONS,
    views_at=st.sets(st.integers(0, 60)),
    merges_at=st.sets(st.integers(0, 60)),
)
def test_views_do_not_change(
    operations: list[tuple[int, bytes | None]], views_at: set[int], merges_at: set[int]
) -> None:
    """A view reads the state of its moment for ever, whatever lands and is merged after it."""
    memtable, model = Memtable(), dict[bytes, bytes]()
    views = []
    for seq, (letter, value) in enumerate(operations, 1):
        key = bytes([letter])
        run = run_of(seq, tombstone(key) if value is None else put(key, value))
        memtable.land(run)
        memtable.extend_prefix(run)
        if value is None:
            model.pop(key, None)
        else:
            model[key] = value
        if seq in merges_at:
            finish(memtable.merge_runs(InlineClock()))
        if seq in views_at:
            views.append((memtable.view(seq, seq), sorted(model.items())))
    finish(memtable.merge_runs(InlineClock()))
    for view, expected in views:
        assert read(view) == expected
        assert read(view, reverse=True) == expected[::-1]


def test_runs_are_merged_while_writes_go_on() -> None:
    """Runs that land during a merge stay newer than its result, and are merged in their turn."""

    async def main(world: World) -> None:
        memtable, model, random = Memtable(), dict[bytes, bytes](), Random(world.seed)
        async with asyncio.TaskGroup() as tasks:
            merging = tasks.create_task(memtable.merge_when_due(LoopClock()))
            for seq in range(1, 400):
                batch = {random.randbytes(2): b"%d" % seq for _ in range(random.choice([1, 30]))}
                run = run_of(seq, *(put(key, value) for key, value in batch.items()))
                memtable.land(run)
                memtable.extend_prefix(run)
                model |= batch
                await asyncio.sleep(0)
            assert read(memtable.view(399, 0)) == sorted(model.items())
            await world.sleep_ms(1)
            assert memtable.run_count < 3 * MERGE_FAN_IN
            assert read(memtable.view(399, 0)) == sorted(model.items())
            merging.cancel()

    for seed in range(5):
        simulate(seed, main)


def test_runs_that_land_during_a_long_merge_are_kept() -> None:
    """A merge of many slices replaces what it has merged, and nothing that came meanwhile."""

    async def main(_: World) -> None:
        memtable, model = Memtable(), dict[bytes, bytes]()

        def land(seq: int, *keys: bytes) -> None:
            run = run_of(seq, *(put(key, b"%d" % seq) for key in keys))
            memtable.land(run)
            memtable.extend_prefix(run)
            model.update(dict.fromkeys(keys, b"%d" % seq))

        async with asyncio.TaskGroup() as tasks:
            merging = tasks.create_task(memtable.merge_when_due(LoopClock()))
            for seq in range(1, MERGE_FAN_IN + 1):
                land(seq, *(b"%04d" % (number * seq) for number in range(1_500)))
            for seq in range(20, 23):
                await asyncio.sleep(0)
                land(seq, b"%04d" % seq, b"new %d" % seq)
            await asyncio.wait([merging], timeout=1)
            assert memtable.run_count <= 4
            merging.cancel()
        assert read(memtable.view(22, 0)) == sorted(model.items())

    for seed in range(5):
        simulate(seed, main)


async def test_many_small_objects_leave_few_runs() -> None:
    """Where an object lands in every turn of the loop, merging keeps up with it."""
    memtable = Memtable()
    async with asyncio.TaskGroup() as tasks:
        merging = tasks.create_task(memtable.merge_when_due(LoopClock()))
        for seq in range(3_000):
            run = run_of(seq, put(b"%04d" % (seq * 7919 % 10_000)))
            memtable.land(run)
            memtable.extend_prefix(run)
            assert memtable.run_count <= 60
            await asyncio.sleep(0)
        merging.cancel()


def test_two_who_merge_at_the_same_time_drop_nothing() -> None:
    """What lands while two tasks merge the same runs is in every scan afterwards."""

    async def main(world: World) -> None:
        del world
        memtable = Memtable()
        seqs = iter(range(1, 1_000))

        def land(count: int) -> list[bytes]:
            """A run of so many keys of its own."""
            seq = next(seqs)
            keys = [b"%d-%d" % (seq, number) for number in range(count)]
            run = run_of(seq, *(put(key) for key in keys))
            memtable.land(run)
            memtable.extend_prefix(run)
            return keys

        expected = [key for _ in range(MERGE_FAN_IN) for key in land(1_000)]
        clock = LoopClock()
        async with asyncio.TaskGroup() as tasks:
            merging = [tasks.create_task(memtable.merge_runs(clock)) for _ in range(2)]
            while not all(task.done() for task in merging):
                expected += land(1) if memtable.key_count < MERGE_FAN_IN * 1_010 else []
                await clock.sleep_ms(0)
        assert [key for key, _ in read(memtable.view(1_000, None))] == sorted(expected)

    for seed in range(5):
        simulate(seed, main)


class Watching(InlineClock):
    """Looks whenever others have a chance to run."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    async def sleep_ms(self, duration_ms: float) -> None:
        """Look, and go on."""
        del duration_ms
        self._look()


def test_what_is_being_dropped_hides_nothing() -> None:
    """While segments are dropped, a range delete of one hides no put after it that is gone already:
    either memory shows the put, or it says nothing.
    """
    memtable = Memtable()
    commit = commit_of(1)
    commit.range_tombstones = [Entry(b"a", 1, Kind.RANGE_TOMBSTONE, b"z")]
    for run in (group_of(0, commit).run, run_of(2, put(b"k", b"after"))):
        memtable.land(run)
        memtable.extend_prefix(run)
    memtable.close_segment()
    seen: list[Entry | None] = []
    finish(memtable.drop_through(2, Watching(lambda: seen.append(memtable.get(b"k")))))
    assert seen
    assert {entry and entry.seq for entry in seen} <= {2, None}
    assert memtable.get(b"k") is None
