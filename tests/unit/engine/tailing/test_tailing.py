"""A replica of a quorum database: what it sees, and when, by a tail and by the bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shalekv.engine.reader_engine import ReaderEngine
from tests.kit.engine.replica import (
    AskedStore,
    all_shown,
    in_virtual_time,
    pass_s,
    running,
)
from tests.unit.engine.tailing.ground import QuorumGround, shown, steps

MIB = 1 << 20


async def tailing(engine: ReaderEngine) -> None:
    """Wait until what is committed comes by itself."""
    await steps(lambda: engine.is_told)


@asynccontextmanager
async def tailed(**settings: int) -> AsyncIterator[tuple[QuorumGround, ReaderEngine]]:
    """A new database and a replica of it, to which what is committed comes by itself."""
    ground = await QuorumGround.opened()
    engine = await ground.replica(None, **settings)
    async with running(engine):
        await tailing(engine)
        yield ground, engine


def followed(ground: QuorumGround) -> int:
    """The number of the safekeeper whose tail is read."""
    (number,) = (at for at, keeper in enumerate(ground.keepers) if keeper.tails)
    return number


def test_commit_is_seen_at_once_without_a_request_to_the_bucket() -> None:
    """No time passes, and nothing is asked, until a commit is shown that is not archived."""

    async def main() -> None:
        ground = await QuorumGround.opened()
        store = AskedStore(ground)
        engine = await ground.replica(store)
        async with running(engine):
            await tailing(engine)
            await engine.catch_up()
            store.forget()
            for number in range(5):
                seq = await ground.put(a=b"%d" % number)
                await shown(engine, seq)
                assert await all_shown(engine) == {b"a": b"%d" % number}
            assert not store.gets
            assert not store.lists

    in_virtual_time(main)


def test_who_waits_for_a_commit_is_woken_by_the_tail() -> None:
    """`min_seq` does not wait for a look."""

    async def main() -> None:
        async with tailed() as (ground, engine):
            waiter = engine.prefix.cover(ground.seq + 1)
            seq = await ground.put(a=b"1")
            await steps(lambda: engine.prefix.seq == seq)
            await waiter

    in_virtual_time(main)


def test_tail_saves_the_polls_of_the_bucket() -> None:
    """While the tail works no WAL object is asked for; manifest and archive are, now and then."""

    async def main() -> None:
        ground = await QuorumGround.opened()
        store = AskedStore(ground)
        settings = {"poll_interval_ms": 250, "manifest_interval_ms": 10_000}
        engine = await ground.replica(store, **settings)
        async with running(engine):
            await tailing(engine)
            await engine.catch_up()
            store.forget()
            for number in range(60):
                seq = await ground.put(a=b"%d" % number)
                await shown(engine, seq)
                if number % 10 == 0:
                    ground.seal()
                    await steps(lambda: not engine.applying.position.is_open)
                    await ground.archive(trims=True)
                await pass_s(1)
            assert engine.prefix.seq == ground.seq
            assert not [name for name in store.gets if name.startswith("wal/")]
            assert len(store.lists) <= 6 * 4  # a manifest, the archive, and the own snapshot
            assert ground.links.asked >= 60 * 4 * 2  # safekeepers are asked instead

    in_virtual_time(main)


def test_replica_without_safekeepers_sees_what_is_archived() -> None:
    """It falls back to the bucket, and goes on with a tail when one answers again."""

    async def main() -> None:
        async with tailed(poll_interval_ms=100, poll_interval_idle_ms=100) as (ground, engine):
            archived = await ground.put(a=b"1")
            ground.seal()
            seen = await ground.put(b=b"1")
            await steps(lambda: engine.prefix.seq == seen)
            for keeper in ground.keepers:
                keeper.is_up = False
                keeper.wake()
            last = await ground.put(c=b"1")
            await ground.archive()
            await pass_s(5)
            assert engine.prefix.seq == seen > archived
            assert not engine.is_told
            ground.seal()
            await ground.archive()
            await pass_s(1)
            assert engine.prefix.seq == last
            assert await all_shown(engine) == {b"a": b"1", b"b": b"1", b"c": b"1"}
            for keeper in ground.keepers:
                keeper.is_up = True
            newest = await ground.put(d=b"1")
            await pass_s(1)
            assert engine.is_told
            assert engine.prefix.seq == newest

    in_virtual_time(main)


def test_tail_switched_off_asks_no_safekeeper() -> None:
    """`tail = off`: the archive is all that is seen."""

    async def main() -> None:
        ground = await QuorumGround.opened()
        engine = await ground.replica(tail="off", poll_interval_ms=100)
        async with running(engine):
            archived = await ground.put(a=b"1")
            ground.seal()
            await ground.archive()
            await ground.put(a=b"2")
            await pass_s(5)
            assert engine.prefix.seq == archived
            assert ground.links.asked == 0

    in_virtual_time(main)


def test_another_safekeeper_is_tailed_when_one_dies() -> None:
    """Nothing is seen later for it than it takes to connect to another one."""

    async def main() -> None:
        async with tailed() as (ground, engine):
            for _ in range(2):
                keeper = ground.keepers[followed(ground)]
                keeper.is_up = keeper.hears = False
                keeper.wake()
                seq = await ground.put(a=b"1")
                await shown(engine, seq)
                await steps(lambda: engine.is_told)
                keeper.is_up = keeper.hears = True
                ground.tell_commit()

    in_virtual_time(main)


def test_safekeeper_that_lags_is_left_for_a_fresher_one() -> None:
    """One that hears nothing of the writer is as good as none, however alive it is."""

    async def main() -> None:
        async with tailed(poll_interval_ms=250) as (ground, engine):
            first = followed(ground)
            ground.keepers[first].hears = False
            seq = await ground.put(a=b"1")
            await pass_s(1)
            assert engine.prefix.seq == seq
            assert followed(ground) != first

    in_virtual_time(main)


def test_silent_safekeepers_are_left() -> None:
    """Connections that bring nothing, and no answer, hold nobody up for long."""

    async def main() -> None:
        async with tailed(poll_interval_ms=250) as (ground, engine):
            keeper = ground.keepers[followed(ground)]
            keeper.is_silent, keeper.hears = True, False
            keeper.wake()
            seq = await ground.put(a=b"1")
            await pass_s(3)
            assert engine.prefix.seq == seq

    in_virtual_time(main)


@pytest.mark.parametrize("trims", [False, True])
def test_object_of_which_a_part_was_applied_is_applied_once(*, trims: bool) -> None:
    """Read from the bucket later, it adds what came after that part, and nothing else."""

    async def main() -> None:
        async with tailed(poll_interval_ms=100) as (ground, engine):
            seen = await ground.put(a=b"1", b=b"1")
            await steps(lambda: engine.prefix.seq == seen)
            whole = engine.prefix.wal_id
            for keeper in ground.keepers:
                keeper.is_up = False
                keeper.wake()
            await ground.put(a=b"2")
            ground.seal()
            last = await ground.put(c=b"1")
            ground.seal()
            await ground.archive(trims=trims)
            await pass_s(2)
            assert engine.prefix.seq == last
            assert engine.prefix.wal_id == ground.leader.log.last.wal_id != whole
            assert await all_shown(engine) == {b"a": b"2", b"b": b"1", b"c": b"1"}
            assert engine.memtable.key_count == 3

    in_virtual_time(main)


def test_part_of_an_object_is_shown_before_the_object_is_whole() -> None:
    """The number of the commit goes on; the object counts when it has ended."""

    async def main() -> None:
        async with tailed() as (ground, engine):
            before = engine.prefix.wal_id
            await ground.put(a=b"1")
            seq = await ground.put(a=b"2")
            await steps(lambda: engine.prefix.seq == seq)
            assert engine.prefix.wal_id == before
            ground.seal()
            await steps(lambda: engine.prefix.wal_id == ground.leader.log.last.wal_id)
            assert engine.prefix.seq == seq

    in_virtual_time(main)


def test_trimmed_records_are_read_from_the_bucket() -> None:
    """A replica that was away finds what the safekeepers have forgotten in the archive."""

    async def main() -> None:
        ground = await QuorumGround.opened()
        engine = await ground.replica(poll_interval_ms=100)
        for number in range(4):
            await ground.put(a=b"%d" % number)
            ground.seal()
        await ground.archive(trims=True)
        seq = await ground.put(b=b"1")
        async with running(engine):
            await pass_s(2)
            assert engine.prefix.seq == seq
            assert engine.is_told
            assert await all_shown(engine) == {b"a": b"3", b"b": b"1"}

    in_virtual_time(main)


def test_elections_change_nothing_that_is_shown() -> None:
    """Commits stay, those that were not committed never come, and the new writer's follow."""

    async def main() -> None:
        async with tailed() as (ground, engine):
            seq = await ground.put(a=b"1")
            await steps(lambda: engine.prefix.seq == seq)
            lost = ground.keepers[0]
            for keeper in ground.keepers[1:]:
                keeper.hears = False
            await ground.put(a=b"never")  # one of three
            for keeper in ground.keepers[1:]:
                keeper.hears = True
            lost.hears = False
            ground.seq += 10
            await ground.elect()
            lost.hears = True
            seq = await ground.put(b=b"1")
            await steps(lambda: engine.prefix.seq == seq)
            assert await all_shown(engine) == {b"a": b"1", b"b": b"1"}
            assert engine.epoch == ground.writer.epoch

    in_virtual_time(main)


def test_members_of_the_newest_manifest_are_tailed() -> None:
    """When all have been replaced, the new ones are found, and the old ones left."""

    async def main() -> None:
        async with tailed(poll_interval_ms=100, manifest_interval_ms=1_000) as (ground, engine):
            old = ground.keepers
            fresh = [type(old[0])(number) for number in (4, 5, 6)]
            await ground.set_members(fresh)
            seq = await ground.put(a=b"1")
            await pass_s(3)
            assert engine.prefix.seq == seq
            assert engine.is_told
            assert not any(keeper.tails for keeper in old)

    in_virtual_time(main)


def test_full_memory_stops_the_tail_until_there_is_room() -> None:
    """The bound holds, and what has no room is read when the levels hold what came before."""

    async def main() -> None:
        async with tailed(reader_memtable_bytes_max=MIB, poll_interval_ms=100) as (ground, engine):
            for number in range(8):
                await ground.put(**{f"k{number}": b"v" * (MIB // 4)})
                ground.seal()
                await ground.archive()
            await pass_s(1)
            assert engine.follower.is_full
            assert not engine.is_told
            assert engine.prefix.seq < ground.seq
            assert engine.memory_bytes < 2 * MIB
            await ground.compact()
            await pass_s(3)
            assert engine.prefix.seq == ground.seq
            assert engine.is_told
            assert len(await all_shown(engine)) == 8

    in_virtual_time(main)


def test_compaction_lets_go_of_what_came_by_a_tail() -> None:
    """What is in the levels leaves memory, also when the object that follows is open."""

    async def main() -> None:
        async with tailed(manifest_interval_ms=500) as (ground, engine):
            await ground.put(a=b"1")
            await ground.put(b=b"1")
            ground.seal()
            await ground.put(a=b"2")
            await ground.archive(trims=True)
            await ground.compact()
            await pass_s(2)
            assert engine.levels.current.tree.last_seq == ground.seq - 1
            assert await all_shown(engine) == {b"a": b"2", b"b": b"1"}
            assert engine.memtable.key_count <= 2
            assert engine.applying.unarchived.oldest_wal_id == ground.open_wal_id

    in_virtual_time(main)


def test_manifest_never_knows_of_objects_that_are_not_archived() -> None:
    """What a replica has seen in a tail alone is no object that somebody may look for."""

    async def main() -> None:
        async with tailed(manifest_interval_ms=500) as (ground, engine):
            await ground.put(a=b"1")
            ground.seal()
            await ground.archive()
            await ground.compact()
            for _ in range(3):
                await ground.put(a=b"2")
                ground.seal()
            await pass_s(30)
            assert engine.prefix.seq == ground.seq
            seen = (await ground.manifest()).wal_id_last_seen
            assert seen is not None
            assert seen <= max(await ground.wal())

    in_virtual_time(main)
