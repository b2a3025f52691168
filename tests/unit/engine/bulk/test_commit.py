"""Commits by opening the database: in order with what others write, and once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shalekv.clock import LoopClock
from shalekv.core.entry import Kind
from shalekv.core.sst_table import SstInfo
from shalekv.core.transaction import Change
from shalekv.engine.bulk.commit import commit_by_opening
from shalekv.engine.bulk.files import LoadFiles
from shalekv.engine.bulk.job import LoadJob
from shalekv.engine.commit import changes_bytes
from shalekv.engine.recover import open_log
from shalekv.engine.writer_engine import WriterEngine
from shalekv.errors import Fenced, InvalidRequest, LeaseLost, LoadUnknown
from tests.kit.engine.collection import CollectedDatabase
from tests.kit.engine.loading_jobs import (
    LOAD_ID,
    NEVER_MS,
    WRITER,
    begin,
    collect,
    load,
    look,
    process,
    rows_of,
    write,
)
from tests.kit.engine.running_log import Told

ROWS = rows_of([(b"a", b"1"), (b"b", b"2")])


async def files_of(
    database: CollectedDatabase, load_id: str = LOAD_ID
) -> tuple[LoadJob, list[SstInfo]]:
    """A job whose files are written."""
    store = process(database)
    job = await begin(store, load_id)
    files = LoadFiles(store, job.ticket)
    await files.add(ROWS)
    return job, await files.finish()


async def test_order_is_that_of_commits_and_not_of_files() -> None:
    """Files that were written before a put hide it when they are committed after; and a put that
    comes then hides them.
    """
    database = await CollectedDatabase.created()
    _, infos = await files_of(database)
    await write(database, a=b"before")
    loaded = await commit_by_opening(process(database), LOAD_ID, infos, WRITER)
    assert not loaded.already_applied
    assert loaded.wal_id is not None
    assert (await look(database)).state == {b"a": (b"1", loaded.seq), b"b": (b"2", loaded.seq)}
    later = await write(database, b=b"after")
    assert later > loaded.seq
    assert (await look(database)).state == {b"a": (b"1", loaded.seq), b"b": (b"after", later)}


async def test_a_writer_that_serves_is_fenced() -> None:
    """What it has acknowledged stays; it can write no more."""
    database = await CollectedDatabase.created()
    _, infos = await files_of(database)
    opened = await open_log(process(database), WRITER, address="here:1")
    engine = WriterEngine(opened, WRITER, LoopClock())
    running = asyncio.create_task(engine.run(stop_grace_ms=NEVER_MS))

    async def put(key: bytes) -> Told:
        told, changes = Told(), [Change(key, Kind.PUT, b"live")]
        assert engine.admission.try_admit(changes_bytes(changes))
        engine.log.submit(changes, told.settle)
        return told

    acknowledged = await (await put(b"c")).receipt()
    loaded = await commit_by_opening(process(database), LOAD_ID, infos, WRITER)
    assert isinstance(await (await put(b"a")).outcome(), Fenced)
    with pytest.raises(Fenced):
        await running
    assert (await look(database)).state == {
        b"a": (b"1", loaded.seq),
        b"b": (b"2", loaded.seq),
        b"c": (b"live", acknowledged.seq),
    }


async def test_a_load_that_was_committed_fences_nobody() -> None:
    """It is found without opening: the manifest stays as it is."""
    database = await CollectedDatabase.created()
    first = await load(process(database), ROWS)
    before = await database.manifest()
    _, infos = await files_of(database, "another")
    again = await commit_by_opening(process(database), LOAD_ID, infos, WRITER)
    assert (again.already_applied, again.seq) == (True, first.seq)
    now = await database.manifest()
    assert now.writer_epoch == before.writer_epoch


async def test_two_that_commit_the_same_load_commit_it_once() -> None:
    """Whoever is later, or is fenced and tries again, finds it committed."""
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
    assert (await look(database)).loads == [LOAD_ID]


async def test_files_without_a_lease_that_may_be_collected_are_refused() -> None:
    """A collector has raised the cutoff above them: nothing is committed."""
    database = await CollectedDatabase.created()
    job, infos = await files_of(database)
    await job.end()
    await write(database, c=b"3")
    await collect(database)
    with pytest.raises((LeaseLost, InvalidRequest)):
        await commit_by_opening(process(database), LOAD_ID, infos, WRITER)
    assert [*(await look(database)).state] == [b"c"]


async def test_lists_that_cannot_be_a_load_are_refused_before_anybody_is_fenced() -> None:
    """By what they say alone."""
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
    """The same files under two ids would be one load twice."""
    database = await CollectedDatabase.created()
    _, infos = await files_of(database)
    await commit_by_opening(process(database), LOAD_ID, infos, WRITER)
    with pytest.raises(LoadUnknown, match="belongs to load 'monday'"):
        await commit_by_opening(process(database), "tuesday", infos, WRITER)
