"""Loads: the lease under which files are written, and commits by opening, in order and once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shalekv.errors import Fenced, InvalidRequest, LeaseLost, LoadUnknown
from shalekv.jobs.bulk_load import LoadFiles, LoadJob, commit_by_opening
from shalekv.protocol.manifest import RecentLoad
from shalekv.protocol.sst_table import SstInfo
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.write.ingest import Loaded
from tests.kit.engine.collection import AGE_S, TTL_S, CollectedDatabase
from tests.kit.engine.loading_jobs import (
    LOAD_ID,
    WRITER,
    begin,
    collect,
    level_names,
    load,
    named_files,
    open_again,
    process,
    rows_of,
    write,
)
from tests.kit.engine.running_log import yielding_runtime
from tests.kit.store import (
    FOR_EVER,
    FaultyStore,
    MortalProcess,
    at_each_request,
    at_request,
    dying_at_each_request,
)

ROWS = rows_of([(b"a", b"1"), (b"b", b"2")])


async def test_work_is_cancelled_without_a_lease() -> None:
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
    """If the store fails at the end of a job, no error is raised: the lease expires by itself."""
    database = await CollectedDatabase.created()

    store = FaultyStore(database.another_store())
    runtime = yielding_runtime()  # its retries take no time
    job = await begin(CasStore(store, runtime, StoreSettings()))
    for operation in ("list", "get", "create"):
        store.fail(operation, times=FOR_EVER)
    await job.end()
    assert (await database.manifest()).leases
    database.pass_time(TTL_S + AGE_S + 1)
    await database.collecting().collect()
    assert not (await database.manifest()).leases


async def test_a_load_that_was_committed_is_recognised() -> None:
    """A committed load is found in the log, and in the manifest once compacted: no lease is made,
    and nothing is edited.
    """
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


async def test_a_later_batch_of_a_stream_implies_those_before() -> None:
    """A later batch of a stream shows that earlier ones are committed, even if it is only in the
    log.
    """
    database = await CollectedDatabase.created()
    later = await load(process(database), ROWS, "stream-7")
    assert (await begin(process(database), "stream-6")).committed_seq == later.seq
    assert (await begin(process(database), "stream-7")).committed_seq == later.seq
    assert (await begin(process(database), "stream-8")).committed_seq is None
    assert (await begin(process(database), "other-6")).committed_seq is None
    assert (await begin(process(database), "stream")).committed_seq is None


async def test_the_log_is_not_read_for_loads_that_are_not_registered() -> None:
    """Only a pending load can have a record in the log, so the log is not read for others, whatever
    its size.
    """
    database = await CollectedDatabase.created()
    await load(process(database), ROWS)
    await write(database, c=b"3")
    for load_id, is_pending in (("another", False), (LOAD_ID, True)):
        store = FaultyStore(database.another_store())
        committed = (await begin(process(database, store), load_id)).committed_seq
        assert (committed is not None) == is_pending
        assert bool(store.asked("get", "wal/")) == is_pending


async def test_load_that_is_compacted_during_the_check_is_found() -> None:
    """A load whose record c has passed during the check is found in the manifest."""
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


TWO_ROWS = rows_of([(b"a", b"1"), (b"b", b"2")])


async def files_of(
    database: CollectedDatabase, load_id: str = LOAD_ID
) -> tuple[LoadJob, list[SstInfo]]:
    store = process(database)
    job = await begin(store, load_id)
    files = LoadFiles(store, job.ticket)
    await files.add(TWO_ROWS)
    return job, await files.finish()


async def test_order_is_that_of_commits_and_not_of_files() -> None:
    """Files written before a put and committed after it hide the put; a later put hides them."""
    database = await CollectedDatabase.created()
    _, infos = await files_of(database)
    await write(database, a=b"before")
    loaded = await commit_by_opening(process(database), LOAD_ID, infos, WRITER)
    assert not loaded.already_applied
    assert loaded.wal_id is not None
    assert (await open_again(database)).state == {
        b"a": (b"1", loaded.seq),
        b"b": (b"2", loaded.seq),
    }
    later = await write(database, b=b"after")
    assert later > loaded.seq
    assert (await open_again(database)).state == {b"a": (b"1", loaded.seq), b"b": (b"after", later)}


async def test_a_load_that_was_committed_fences_nobody() -> None:
    """A committed load is found without opening: the manifest stays as it is."""
    database = await CollectedDatabase.created()
    first = await load(process(database), TWO_ROWS)
    before = await database.manifest()
    _, infos = await files_of(database, "another")
    again = await commit_by_opening(process(database), LOAD_ID, infos, WRITER)
    assert (again.already_applied, again.seq) == (True, first.seq)
    now = await database.manifest()
    assert now.writer_epoch == before.writer_epoch


async def test_two_that_commit_the_same_load_commit_it_once() -> None:
    """When two processes commit the same load, the later one, or the one that is fenced and tries
    again, finds it committed.
    """
    database = await CollectedDatabase.created()
    _, infos = await files_of(database)
    outcomes = []

    async def commit() -> None:
        while True:
            try:
                outcomes.append(await commit_by_opening(process(database), LOAD_ID, infos, WRITER))
            except Fenced:
                continue
            return

    await asyncio.gather(commit(), commit(), commit())
    assert len({each.seq for each in outcomes}) == 1
    assert [each.already_applied for each in outcomes].count(False) <= 1
    assert (await open_again(database)).loads == [LOAD_ID]


async def test_invalid_lists_are_refused_before_a_writer_is_fenced() -> None:
    """Invalid lists of files are refused by their entries alone."""
    database = await CollectedDatabase.created()
    before = database.names()
    with pytest.raises(InvalidRequest, match="at least one"):
        await commit_by_opening(process(database), LOAD_ID, [], WRITER)
    assert database.names() == before
    _, infos = await files_of(database)
    before = database.names()
    for wrong in ([infos[0], infos[0]], [replace(infos[0], level=1)]):
        with pytest.raises(InvalidRequest, match="ssts"):
            await commit_by_opening(process(database), LOAD_ID, wrong, WRITER)
    with pytest.raises(InvalidRequest, match="load_id"):
        await commit_by_opening(process(database), "", infos, WRITER)
    assert database.names() == before


async def test_files_of_one_load_are_not_those_of_another() -> None:
    """The same files under two ids would be one load twice, so the second is refused."""
    database = await CollectedDatabase.created()
    _, infos = await files_of(database)
    await commit_by_opening(process(database), LOAD_ID, infos, WRITER)
    with pytest.raises(LoadUnknown, match="belongs to load 'monday'"):
        await commit_by_opening(process(database), "tuesday", infos, WRITER)


VALUE = b"loaded" * 5
KEYS = [b"k%02d" % number for number in range(20)]
ALL_ROWS = rows_of([(key, VALUE) for key in KEYS], deletes=[b"gone"])


async def check_loaded(database: CollectedDatabase, loaded: Loaded) -> None:
    """Check that the load is there once, under one number, and that other keys are as before."""
    state, loads = await open_again(database)
    found = dict(state)
    assert found.pop(b"other")[0] == b"old"
    assert found == dict.fromkeys(KEYS, (VALUE, loaded.seq))
    assert loads.count(LOAD_ID) == 1


async def test_load_that_is_run_again_is_loaded_once() -> None:
    """After a crash at any request, all of the load or nothing is read; after another run, all of
    it, once. The collector deletes what no commit references, and nothing else.
    """
    original = await CollectedDatabase.created()
    await write(original, k03=b"old", gone=b"old", other=b"old")
    outcomes = set()

    async def run(dying: MortalProcess) -> None:
        database = original.copy()
        store = dying.store(database.another_store())
        await dying.run(load(process(database, store), ALL_ROWS))
        before = await open_again(database)
        was_committed = LOAD_ID in before.loads
        found = (before.state[b"k03"][0], len(before.state))
        assert found == ((VALUE, 21) if was_committed else (b"old", 3))
        if dying.dies_at % 2:
            await collect(database)
            assert level_names(database) == await named_files(database)
        again = await load(process(database), ALL_ROWS)
        assert again.already_applied == was_committed
        await collect(database)
        assert level_names(database) == await named_files(database)
        await check_loaded(database, again)
        assert (await load(process(database), ALL_ROWS)).already_applied
        outcomes.add(was_committed)

    assert await dying_at_each_request(run) > 20
    assert outcomes == {False, True}
