"""The engine as a whole: it runs, closes and stops, and leaves no task behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import Fenced, OutcomeUnknown, Stopping
from shalekv.settings import WriterSettings
from shalekv.write.commit import Commit, Receipt, changes_bytes
from shalekv.write.engine import WriterEngine
from tests.kit.engine.commits import put, read
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import Write, quiesce
from tests.kit.store import HeldStore
from tests.kit.virtual_time import virtual_time

GRACE_MS = 1_000


class Running:
    """An engine that runs on a held store."""

    def __init__(self, database: Database, store: HeldStore, engine: WriterEngine) -> None:
        self.database = database
        self.store = store
        self.engine = engine
        self.task = asyncio.create_task(engine.run(stop_grace_ms=GRACE_MS))

    @classmethod
    async def opened(cls, **settings: Any) -> Running:
        """An engine on a new database; creates are held from now on."""
        database = await Database.created()
        writer = WriterSettings.model_validate({"flush_interval_ms": 0} | settings)
        store = HeldStore(database.objects)
        store.is_holding = False
        opened = await database.open(store, k=writer.max_parallel_writes)
        store.is_holding = True
        return cls(database, store, WriterEngine(opened, writer, LoopClock()))

    def write(self, key: bytes) -> Write:
        write = Write(key, b"v")
        assert self.engine.admission.try_admit(changes_bytes(write.changes))
        self.engine.log.submit(Commit(write.changes, self.engine.log.next_seq, write.settle))
        return write

    async def take_over(self) -> None:
        await self.database.edit(lambda m: replace(m, writer_epoch=9, writer_nonce=b"r" * 16))


def now_ms() -> float:
    return asyncio.get_running_loop().time() * 1_000


async def check_no_tasks() -> None:
    await quiesce()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual_time(10)
async def test_close_gives_up_after_its_grace() -> None:
    """After the grace period, uploads end as unknown, queued writes as not applied, `run` fails."""
    running = await Running.opened()
    sent = running.write(b"a")
    await running.store.arrived(1)
    queued = running.write(b"b")
    began_ms = now_ms()
    running.engine.close()
    with pytest.raises(Stopping, match="stopped before"):
        await running.task
    assert now_ms() - began_ms == pytest.approx(GRACE_MS)
    assert isinstance(await sent.outcome(), OutcomeUnknown)
    assert isinstance(await queued.outcome(), Stopping)
    assert running.engine.admission.queued_bytes == 0
    await check_no_tasks()


@virtual_time(10)
async def test_take_over_is_noticed_by_an_idle_writer() -> None:
    """An idle writer notices within one poll that it was fenced, and `run` raises that."""
    running = await Running.opened(fence_poll_ms=5_000)
    await running.take_over()
    await LoopClock().sleep_ms(4_000)
    assert not running.task.done()
    await LoopClock().sleep_ms(1_100)
    with pytest.raises(Fenced):
        await running.task
    with pytest.raises(Fenced):
        running.engine.check_serving()
    await check_no_tasks()


@pytest.mark.parametrize("is_answered", [True, False])
@virtual_time(10)
async def test_uploads_get_their_grace_after_a_take_over(is_answered: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A write in flight is acknowledged if it lands within the grace period, else unknown."""
    running = await Running.opened(fence_poll_ms=100)
    sent = running.write(b"a")
    held = await running.store.arrived(1)
    queued = running.write(b"b")
    await running.take_over()
    assert isinstance(await queued.outcome(), Fenced)
    await LoopClock().sleep_ms(GRACE_MS / 2)
    if is_answered:
        held.release()
    with pytest.raises(Fenced):
        await running.task
    expected = Receipt if is_answered else OutcomeUnknown
    assert isinstance(await sent.outcome(), expected)
    await check_no_tasks()


@pytest.mark.parametrize("turns", range(1, 12))
@virtual_time(10)
async def test_cancelled_engine_leaves_nothing_behind(turns: int) -> None:
    """Cancelling the engine at any time settles everything and leaves no task."""
    running = await Running.opened(max_parallel_writes=2)
    writes = [running.write(b"%d" % number) for number in range(3)]
    confirming = asyncio.create_task(running.engine.ownership.confirm())
    for _ in range(turns):
        await asyncio.sleep(0)
    running.task.cancel()
    await asyncio.wait([running.task])
    if running.engine.log.stopped_by is None:
        return  # cancelled before its first step: nothing has run
    for write in writes:
        assert isinstance(await write.outcome(), OutcomeUnknown | Stopping)
    assert running.engine.admission.queued_bytes == 0
    await asyncio.wait([confirming])
    assert confirming.exception() is None or isinstance(confirming.exception(), Stopping)
    with pytest.raises(Stopping):
        running.engine.check_serving()
    await check_no_tasks()


async def test_views_are_of_one_moment() -> None:
    """A view of everything in memory holds exactly what was there when it was requested."""
    running = await Running.opened(max_parallel_writes=2)
    for key in (b"a", b"b", b"c"):
        running.write(key)
        await quiesce()
    running.store.held[1].release()  # b has landed ahead of a
    await quiesce()
    viewing = asyncio.create_task(running.engine.newest_view())
    await asyncio.sleep(0)
    running.write(b"d")
    running.store.release_all()
    view = await viewing
    assert [key for key, _ in read(view)] == [b"a", b"b", b"c"]
    assert view.seq == 3
    running.engine.close()
    await running.task


async def test_reads_of_the_newest_do_not_stall_others() -> None:
    """A view of a long queue is built in small steps."""
    running = await Running.opened()
    running.write(b"first")
    await running.store.arrived(1)
    changes = [put(b"%06d" % number) for number in range(10_000)]
    assert running.engine.admission.try_admit(changes_bytes(changes))
    running.engine.log.submit(Commit(changes, running.engine.log.next_seq, lambda _: None))
    steps = 0
    viewing = asyncio.create_task(running.engine.newest_view())
    while not viewing.done():
        steps += 1
        await asyncio.sleep(0)
    assert steps >= 5
    assert len(read(viewing.result())) == 10_001
    running.store.release_all()
    running.engine.close()
    await running.task
