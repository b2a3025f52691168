"""The lease of a load: made before the first file, renewed, given up; and not made in vain."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from random import Random

import pytest

from shalekv.clock import LoopClock
from shalekv.core.loads import OWN_PREFIX
from shalekv.core.manifest import PendingLoad, RecentLoad
from shalekv.core.sst_table import SstTable
from shalekv.engine.bulk.commit import commit_by_opening
from shalekv.engine.bulk.files import LoadFiles
from shalekv.engine.bulk.job import LoadJob
from shalekv.errors import (
    DatabaseNotFound,
    InvalidRequest,
    LeaseLost,
    StoreUnavailable,
)
from shalekv.format.names import level_name
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import StoredObject
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from tests.kit.engine.collection import AGE_S, TTL_S, Ground
from tests.kit.engine.interrupted_store import InterruptedStore
from tests.kit.engine.loading_jobs import (
    LIMITS,
    LOAD_ID,
    WRITER,
    begin,
    collect,
    level_names,
    load,
    look,
    process,
    rows_of,
    write,
)
from tests.kit.inline_runtime import InlineWorkers

ROWS = rows_of([(b"a", b"1"), (b"b", b"2")])
RENEWALS = 20
STEPS = 5  # of a wait, with a collection after each


class PassingClock(LoopClock):
    """A clock whose waits are over at once, and have passed at the store, where the collector has
    run again and again meanwhile.
    """

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._sleeps = 0
        self._slept = asyncio.Condition()

    def monotonic_ms(self) -> float:
        """The time of the store."""
        return self._ground.now_ms

    async def sleep_ms(self, duration_ms: float) -> None:
        """Let the time pass."""
        await asyncio.sleep(0)
        for _ in range(STEPS):
            self._ground.now_ms += round(duration_ms / STEPS)
            await self._ground.collecting().collect()
        async with self._slept:
            self._sleeps += 1
            self._slept.notify_all()

    async def sleep_often(self, count: int) -> None:
        """Until somebody has slept so many times."""
        async with self._slept:
            await self._slept.wait_for(lambda: self._sleeps >= count)


def on(ground: Ground, clock: PassingClock) -> CasStore:
    """The store, for a process with this clock."""
    return CasStore(
        ground.another_store(), Runtime(clock, Random(1), InlineWorkers()), StoreSettings()
    )


async def test_the_ticket_travels() -> None:
    """It is the same in another process, where files are written under its lease."""
    ground = await Ground.created()
    job = await begin(process(ground))
    ticket = pickle.loads(pickle.dumps(job.ticket))  # noqa: S301 - our own
    assert ticket == job.ticket
    assert (ticket.load_id, ticket.database_id) == (LOAD_ID, ground.database_id)
    assert ticket.logical_time_ms == ground.now_ms
    assert ticket.value_bytes_max == LIMITS.value_bytes_max
    [lease] = (await ground.manifest()).leases
    assert (lease.id, lease.holder) == (ticket.lease_id, f"load {LOAD_ID}")
    files = LoadFiles(process(ground), ticket)
    await files.add(ROWS)
    [info] = await files.finish()
    assert ground.leased_names(lease) == {level_name(info.id)}


async def test_the_end_gives_the_lease_up() -> None:
    """Then what was written is collected; a second end does nothing."""
    ground = await Ground.created()
    job = await begin(process(ground))
    files = LoadFiles(process(ground), job.ticket)
    await files.add(ROWS)
    await files.finish()
    ground.pass_time(AGE_S + 1)
    await ground.collecting().collect()
    assert len(level_names(ground)) == 1
    await job.end()
    before = await ground.manifest()
    assert not before.leases
    await job.end()
    assert await ground.manifest() == before
    await ground.collecting().collect()
    assert not level_names(ground)


async def test_a_job_of_many_lives_of_its_lease_loses_nothing() -> None:
    """The lease is renewed while the work goes on, and the collector beside it takes nothing."""
    ground = await Ground.created()
    clock = PassingClock(ground)
    store = on(ground, clock)
    job = await begin(store)

    async def work() -> None:
        files = LoadFiles(store, job.ticket)
        await files.add(ROWS)
        infos = await files.finish()
        await clock.sleep_often(RENEWALS)
        await commit_by_opening(process(ground), LOAD_ID, infos, WRITER)

    began_ms = ground.now_ms
    await job.guard(work)
    assert ground.now_ms - began_ms > 5 * TTL_S * 1_000
    await job.end()
    await collect(ground)
    assert [*(await look(ground)).state] == [b"a", b"b"]


async def test_work_without_a_lease_is_in_vain() -> None:
    """When the lease is found to be gone, the work is cancelled, and the error says why."""
    ground = await Ground.created()
    store = on(ground, PassingClock(ground))
    job = await begin(store)
    await ground.edit(lambda manifest: replace(manifest, leases=()))
    is_cancelled = False

    async def work() -> None:
        nonlocal is_cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled = True
            raise

    with pytest.raises(LeaseLost, match="not in manifest"):
        await job.guard(work)
    assert is_cancelled
    await job.end()  # nothing is left to give up


@pytest.mark.parametrize("error", [ValueError("rows"), StoreUnavailable("x", "get", "y", "z")])
async def test_errors_of_the_work_are_raised_as_they_are(error: Exception) -> None:
    """Not in a group, whatever they are; the lease stays until the end."""
    ground = await Ground.created()
    job = await begin(process(ground))

    async def work() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await job.guard(work)
    assert caught.value is error
    assert (await ground.manifest()).leases
    await job.end()


async def test_an_end_that_the_store_refuses_is_no_error() -> None:
    """The lease expires by itself."""
    ground = await Ground.created()

    async def refuse(_number: int) -> None:
        if is_down:
            raise StoreUnavailable("memory://", "list", "manifest/", "refused")

    is_down = False
    store = process(ground, InterruptedStore(ground.another_store(), refuse))
    job = await begin(store)
    is_down = True
    await job.end()
    assert (await ground.manifest()).leases
    ground.pass_time(TTL_S + AGE_S + 1)
    await ground.collecting().collect()
    assert not (await ground.manifest()).leases


@pytest.mark.parametrize(
    ("load_id", "problem"),
    [("", "0 bytes"), ("x" * 257, "257 bytes"), (OWN_PREFIX + "x", "own"), ("\ud800", "UTF-8")],
)
async def test_ids_that_no_load_can_have(load_id: str, problem: str) -> None:
    """They are refused before anything is asked of the store."""
    ground = await Ground.created()
    store = ground.another_store()
    with pytest.raises(InvalidRequest, match=problem):
        await begin(process(ground, store), load_id)
    assert store.sent.total == 0


async def test_there_must_be_a_database() -> None:
    """Else nothing is made."""
    ground = Ground()
    with pytest.raises(DatabaseNotFound):
        await begin(process(ground))
    assert not ground.names()


async def test_a_load_that_was_committed_is_recognised() -> None:
    """In the log, and in the manifest when it is compacted: no lease is made, nothing is edited."""
    ground = await Ground.created()
    first = await load(process(ground), ROWS)
    before = await ground.manifest()
    assert (await begin(process(ground))).committed_seq == first.seq
    assert await ground.manifest() == before

    await ground.edit(
        lambda manifest: replace(
            manifest,
            pending_loads=(),
            recent_loads=(RecentLoad(LOAD_ID, first.seq),),
        )
    )
    job: LoadJob = await begin(process(ground))
    assert job.committed_seq == first.seq
    await job.end()


async def test_a_later_batch_of_a_stream_stands_for_those_before() -> None:
    """Also when it is in the log alone."""
    ground = await Ground.created()
    later = await load(process(ground), ROWS, "stream-7")
    assert (await begin(process(ground), "stream-6")).committed_seq == later.seq
    assert (await begin(process(ground), "stream-7")).committed_seq == later.seq
    assert (await begin(process(ground), "stream-8")).committed_seq is None
    assert (await begin(process(ground), "other-6")).committed_seq is None
    assert (await begin(process(ground), "stream")).committed_seq is None


async def test_a_load_that_only_was_registered_is_not_committed() -> None:
    """Its writer died before the record: it is written anew, and committed then."""
    ground = await Ground.created()
    store = process(ground)
    job = await begin(store)
    files = LoadFiles(store, job.ticket)
    await files.add(rows_of([(b"a", b"lost")]))
    infos = SstTable.from_infos(await files.finish())
    await ground.edit(
        lambda manifest: replace(manifest, pending_loads=(PendingLoad(LOAD_ID, infos),))
    )
    assert (await begin(process(ground))).committed_seq is None
    loaded = await load(process(ground), ROWS)
    assert not loaded.already_applied
    assert (await look(ground)).state == {b"a": (b"1", loaded.seq), b"b": (b"2", loaded.seq)}


async def test_the_log_is_not_read_for_loads_that_nobody_registered() -> None:
    """However much is in it: only a load that is pending can have a record there."""
    ground = await Ground.created()
    await load(process(ground), ROWS)
    await write(ground, c=b"3")
    read: list[str] = []

    class Watched(MemoryStore):
        async def get(self, name: str) -> StoredObject:
            read.append(name)
            return await super().get(name)

    store = Watched(lambda: ground.now_ms, objects=ground.objects)
    assert (await begin(process(ground, store), "another")).committed_seq is None
    assert not [name for name in read if name.startswith("wal/")]
    assert (await begin(process(ground, store))).committed_seq is not None
    assert [name for name in read if name.startswith("wal/")]


async def test_what_is_compacted_during_the_look_is_not_overlooked() -> None:
    """The log shows nothing any more, because c has passed the record: the manifest knows it."""
    ground = await Ground.created()
    first = await load(process(ground), ROWS)

    async def compact(number: int) -> None:
        wal = sorted(name for name in ground.names() if name.startswith("wal/"))
        if number == at:
            await ground.edit(
                lambda manifest: replace(
                    manifest,
                    pending_loads=(),
                    recent_loads=(RecentLoad(LOAD_ID, first.seq),),
                    wal_id_last_compacted=len(wal) - 1,
                )
            )
            await ground.store.delete(wal)

    for at in range(30):
        store = InterruptedStore(ground.another_store(), compact)
        assert (await begin(process(ground, store))).committed_seq == first.seq, at
        if store.requests <= at:
            break
        ground = await Ground.created()
        first = await load(process(ground), ROWS)
    assert at > 5
