"""The lease of a load: made before the first file, renewed, given up; and not made in vain."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shalekv.core.manifest import PendingLoad, RecentLoad
from shalekv.core.sst_table import SstTable
from shalekv.engine.bulk.files import LoadFiles
from shalekv.engine.bulk.job import LoadJob
from shalekv.errors import LeaseLost
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from tests.kit.engine.collection import AGE_S, TTL_S, CollectedDatabase
from tests.kit.engine.loading_jobs import LOAD_ID, begin, load, look, process, rows_of, write
from tests.kit.engine.running_log import yielding_runtime
from tests.kit.store import FaultyStore, at_each_request, at_request

ROWS = rows_of([(b"a", b"1"), (b"b", b"2")])


async def test_work_without_a_lease_is_in_vain() -> None:
    """When the lease is found to be gone, the work is cancelled, and the error says why."""
    database = await CollectedDatabase.created()
    store = CasStore(database.store, yielding_runtime(), StoreSettings())
    job = await begin(store)
    await database.edit(lambda manifest: replace(manifest, leases=()))
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


async def test_an_end_that_the_store_refuses_is_no_error() -> None:
    """The lease expires by itself."""
    database = await CollectedDatabase.created()

    store = FaultyStore(database.another_store())
    runtime = yielding_runtime()  # whose retries take no time
    job = await begin(CasStore(store, runtime, StoreSettings()))
    for operation in ("list", "get", "create"):
        store.fail(operation, times=10_000)
    await job.end()
    assert (await database.manifest()).leases
    database.pass_time(TTL_S + AGE_S + 1)
    await database.collecting().collect()
    assert not (await database.manifest()).leases


async def test_a_load_that_was_committed_is_recognised() -> None:
    """In the log, and in the manifest when it is compacted: no lease is made, nothing is edited."""
    database = await CollectedDatabase.created()
    first = await load(process(database), ROWS)
    before = await database.manifest()
    assert (await begin(process(database))).committed_seq == first.seq
    assert await database.manifest() == before

    await database.edit(
        lambda manifest: replace(
            manifest, pending_loads=(), recent_loads=(RecentLoad(LOAD_ID, first.seq),)
        )
    )
    job: LoadJob = await begin(process(database))
    assert job.committed_seq == first.seq
    await job.end()


async def test_a_later_batch_of_a_stream_stands_for_those_before() -> None:
    """Also when it is in the log alone."""
    database = await CollectedDatabase.created()
    later = await load(process(database), ROWS, "stream-7")
    assert (await begin(process(database), "stream-6")).committed_seq == later.seq
    assert (await begin(process(database), "stream-7")).committed_seq == later.seq
    assert (await begin(process(database), "stream-8")).committed_seq is None
    assert (await begin(process(database), "other-6")).committed_seq is None
    assert (await begin(process(database), "stream")).committed_seq is None


async def test_a_load_that_only_was_registered_is_not_committed() -> None:
    """Its writer died before the record: it is written anew, and committed then."""
    database = await CollectedDatabase.created()
    store = process(database)
    job = await begin(store)
    files = LoadFiles(store, job.ticket)
    await files.add(rows_of([(b"a", b"lost")]))
    infos = SstTable.from_infos(await files.finish())
    await database.edit(
        lambda manifest: replace(manifest, pending_loads=(PendingLoad(LOAD_ID, infos),))
    )
    assert (await begin(process(database))).committed_seq is None
    loaded = await load(process(database), ROWS)
    assert not loaded.already_applied
    assert (await look(database)).state == {b"a": (b"1", loaded.seq), b"b": (b"2", loaded.seq)}


async def test_the_log_is_not_read_for_loads_that_nobody_registered() -> None:
    """However much is in it: only a load that is pending can have a record there."""
    database = await CollectedDatabase.created()
    await load(process(database), ROWS)
    await write(database, c=b"3")
    for load_id, is_pending in (("another", False), (LOAD_ID, True)):
        store = FaultyStore(database.another_store())
        committed = (await begin(process(database, store), load_id)).committed_seq
        assert (committed is not None) == is_pending
        assert bool(store.asked("get", "wal/")) == is_pending


async def test_load_that_is_compacted_during_the_look_is_found() -> None:
    """The log does not show it any more, because c has passed the record: the manifest does."""
    original = await CollectedDatabase.created()
    first = await load(process(original), ROWS)

    async def run(at: int) -> FaultyStore:
        database = original.copy()

        async def compact() -> None:
            wal = sorted(name for name in database.names() if name.startswith("wal/"))
            await database.edit(
                lambda manifest: replace(
                    manifest,
                    pending_loads=(),
                    recent_loads=(RecentLoad(LOAD_ID, first.seq),),
                    wal_id_last_compacted=len(wal) - 1,
                )
            )
            await database.store.delete(wal)

        store = FaultyStore(database.another_store(), before=at_request(at, compact))
        assert (await begin(process(database, store))).committed_seq == first.seq, at
        return store

    assert await at_each_request(run) > 5
