"""How new a replica of a quorum database says that it is."""

from __future__ import annotations

import asyncio

from tests.kit.engine.replica import pass_s, running
from tests.kit.virtual_time import virtual_time
from tests.unit.engine.tailing.ground import QuorumGround, steps


def now_s() -> float:
    """Virtual time."""
    return asyncio.get_running_loop().time()


@virtual_time(seed=1)
async def test_one_safekeeper_says_nothing_of_what_came_after() -> None:
    """A replica that reaches but one, which is cut off from the writer, grows stale all the same.

    It goes on to show what that one sends.
    """
    ground = await QuorumGround.opened()
    engine = await ground.replica(poll_interval_ms=100, manifest_interval_ms=500)
    async with running(engine):
        await steps(lambda: engine.is_told)
        await engine.catch_up()
        last_s = now_s()
        cut_off, *others = ground.keepers
        for keeper in others:
            keeper.is_up = False
            keeper.wake()
        cut_off.hears = False
        await ground.put(a=b"never seen")
        for _ in range(30):
            await pass_s(1)
            await engine.catch_up()
            assert engine.staleness_ms >= 1_000 * (now_s() - last_s) - 1
        assert engine.is_told
        assert engine.prefix.seq == 0
        cut_off.hears = True
        ground.tell_commit()
        await steps(lambda: engine.prefix.seq == 1)
        assert engine.staleness_ms >= 30_000
        others[0].is_up = True
        await engine.catch_up()
        assert engine.staleness_ms == 0


@virtual_time(seed=1)
async def test_what_a_majority_has_must_be_applied_first() -> None:
    """A tail that is behind the logs of the majority makes nothing fresh until it catches up."""
    ground = await QuorumGround.opened()
    engine = await ground.replica(poll_interval_ms=60_000)
    async with running(engine):
        await steps(lambda: engine.is_told)
        await engine.catch_up()
        (followed,) = (keeper for keeper in ground.keepers if keeper.tails)
        followed.hears = False
        await ground.put(a=b"1")
        await pass_s(5)
        before_s = now_s()
        await engine.catch_up()
        assert engine.prefix.seq == 0
        assert engine.staleness_ms >= 5_000
        followed.hears = True
        ground.tell_commit()
        await steps(lambda: engine.prefix.seq == 1)
        assert engine.staleness_ms == 1_000 * (now_s() - before_s)


@virtual_time(seed=1)
async def test_members_that_were_replaced_make_nothing_fresh() -> None:
    """Until the manifest is read again, old members may all be alive, and know nothing."""
    ground = await QuorumGround.opened()
    engine = await ground.replica(poll_interval_ms=100, manifest_interval_ms=20_000)
    async with running(engine):
        await pass_s(5)
        await engine.catch_up()
        others = [type(each)(number + 4) for number, each in enumerate(ground.keepers)]
        await ground.set_members(others)
        changed_s = now_s()
        await ground.put(a=b"1")
        for _ in range(10):
            await pass_s(1)
            assert engine.prefix.seq == 0
            assert engine.staleness_ms >= 1_000 * (now_s() - changed_s)
        await engine.catch_up()  # reads the manifest
        await pass_s(1)
        await engine.catch_up()
        assert engine.prefix.seq == 1
        assert engine.staleness_ms == 0


@virtual_time(seed=1)
async def test_archive_alone_is_as_old_as_its_last_commit() -> None:
    """What is acknowledged and not archived may be missing: the bucket's end proves nothing."""
    ground = await QuorumGround.opened()
    engine = await ground.replica(tail="off", poll_interval_ms=100, poll_interval_idle_ms=100)
    async with running(engine):
        await pass_s(5)
        assert engine.staleness_ms >= 5_000  # since the last fence
        await ground.put(a=b"1")
        written_s = now_s()
        ground.seal()
        await ground.archive()
        await ground.put(a=b"not archived")
        for _ in range(5):
            await pass_s(1)
            since_ms = 1_000 * (now_s() - written_s)
            assert since_ms <= engine.staleness_ms <= since_ms + 2_500


@virtual_time(seed=1)
async def test_bucket_proves_nothing_when_the_log_has_moved_to_safekeepers() -> None:
    """A replica that has not seen that it moved claims nothing for the time behind the fence."""
    ground = await QuorumGround.opened(is_quorum=False)
    engine = await ground.replica(
        poll_interval_ms=100, poll_interval_idle_ms=100, manifest_interval_ms=60_000
    )
    async with running(engine):
        await pass_s(5)
        assert engine.staleness_ms <= 100
        fenced_s = now_s()
        await ground.switch()
        for keeper in ground.keepers:
            keeper.is_up = False
        await ground.put(a=b"1")
        for _ in range(20):
            await pass_s(0.1)
            assert engine.prefix.seq == 0
            assert engine.staleness_ms >= 1_000 * (now_s() - fenced_s)
        for keeper in ground.keepers:
            keeper.is_up = True
        await pass_s(5)
        assert engine.prefix.seq == 1
