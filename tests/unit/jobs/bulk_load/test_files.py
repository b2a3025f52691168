"""Files of a load: contents, sizes, refused rows, and bounded memory."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from shalekv.errors import InvalidRequest, StoreBroken
from shalekv.format.columns import NO_ROWS, Columns, columns_of
from shalekv.format.names import level_name
from shalekv.format.sst import open_sst
from shalekv.jobs.bulk_load import UPLOADS_AT_ONCE, LoadFiles
from shalekv.protocol.entry import KEY_BYTES_MAX, Entry, Kind
from shalekv.protocol.lease import protects
from shalekv.protocol.sst_table import SstInfo
from shalekv.write.ingest import check_files
from tests.kit.engine.collection import CollectedDatabase
from tests.kit.engine.loading_jobs import (
    begin,
    level_names,
    process,
    rows_of,
)
from tests.kit.store import FaultyStore, Gate

PUT, DELETE = bytes((Kind.PUT,)), bytes((Kind.TOMBSTONE,))


def row(key: bytes, value: bytes = b"", kind: bytes = PUT, expire_at_ms: int = 0) -> Columns:
    return Columns((key,), (0,), kind, (value,), (expire_at_ms,))


def entries_in(database: CollectedDatabase, infos: list[SstInfo]) -> list[Entry]:
    found: list[Entry] = []
    for info in infos:
        stored = database.objects.find(level_name(info.id))
        assert stored is not None
        sst = open_sst(level_name(info.id), stored.data, database_id=database.database_id)
        sst.audit()
        found += sst.entries()
    return found


async def add_all(files: LoadFiles, rows: list[Columns]) -> None:
    for each in rows:
        await files.add(each)


@pytest.mark.parametrize("rows_at_once", [1, 7, 1_000])
async def test_files_hold_the_rows_and_divide_the_keys(rows_at_once: int) -> None:
    """However rows are added, files hold them in order; a file is closed when it is full, and
    matches its entry in the list of the load.
    """
    database = await CollectedDatabase.created()
    entries = [
        Entry(b"%04d" % n, 0, Kind.PUT if n % 5 else Kind.TOMBSTONE, b"v" * 20 if n % 5 else b"")
        for n in range(200)
    ]
    entries[7] = entries[7]._replace(expire_at_ms=database.now_ms + 70)
    entries[8] = entries[8]._replace(expire_at_ms=database.now_ms + 60)
    store = process(database)
    job = await begin(store)
    files = LoadFiles(store, job.ticket)
    for at in range(0, 200, rows_at_once):
        await files.add(columns_of(entries[at : at + rows_at_once]))
    await files.add(NO_ROWS)
    infos = await files.finish()
    assert entries_in(database, infos) == entries
    assert len(infos) > 10
    assert all(before.last_key < info.first_key for before, info in pairwise(infos))
    assert files.row_count == len(entries)
    assert files.size_bytes == sum(info.size_bytes for info in infos)
    assert {level_name(info.id) for info in infos} == level_names(database)
    assert all(protects(job.ticket.lease_id, info.id) for info in infos)
    assert {info.first_expiry_ms for info in infos} == {0, database.now_ms + 60}
    await check_files(store, infos, database_id=database.database_id)


A_B = rows_of([(b"a", b"1"), (b"b", b"2")])


@pytest.mark.parametrize(
    ("rows", "field", "problem"),
    [
        (
            [rows_of([(b"b", b"")]), row(b"a")],
            "rows[1].key",
            "not sorted: key b'a' comes after b'b'",
        ),
        ([A_B, A_B], "rows[2].key", "not sorted"),
        ([A_B._replace(keys=(b"b", b"a"))], "rows[1].key", "not sorted"),
        ([A_B, row(b"b")], "rows[2].key", "key b'b' occurs twice"),
        ([A_B._replace(keys=(b"a", b"a"))], "rows[1].key", "key b'a' occurs twice"),
        ([row(b"")], "rows[0].key", "empty"),
        ([A_B._replace(keys=(b"", b"a"))], "rows[0].key", "empty"),
        ([row(b"a"), row(b"k" * (KEY_BYTES_MAX + 1))], "rows[1].key", "65,537 bytes"),
        ([row(b"a", b"v" * 1_001)], "rows[0].value", "key b'a': 1,001 bytes"),
        ([row(b"a", kind=bytes((Kind.RANGE_TOMBSTONE,)))], "rows[0].kind", "puts and deletes"),
        ([A_B._replace(seqs=(0, 3))], "rows[1].seq", "leave it 0"),
        ([row(b"a", expire_at_ms=-1)], "rows[0].expire_at_ms", "no time"),
        ([row(b"a", expire_at_ms=2**64)], "rows[0].expire_at_ms", "no time"),
        ([row(b"a", b"v", DELETE)], "rows[0].value", "a delete has no value"),
        ([row(b"a", b"", DELETE, 5)], "rows[0].value", "does not expire"),
    ],
)
async def test_invalid_rows_are_refused(rows: list[Columns], field: str, problem: str) -> None:
    """The error names the row, counted over all calls, and its key."""
    database = await CollectedDatabase.created()
    store = process(database)
    files = LoadFiles(store, (await begin(store)).ticket)
    with pytest.raises(InvalidRequest, match=problem) as caught:
        await add_all(files, rows)
    assert caught.value.field == field


class Uploading:
    """Files of a load whose uploads wait at a gate."""

    def __init__(self, database: CollectedDatabase) -> None:
        self.database = database
        self.gate = Gate("create", "levels/", is_open=False)
        self.store = FaultyStore(database.another_store(), before=self.gate)

    async def begin(self) -> LoadFiles:
        cas = process(self.database, self.store)
        return LoadFiles(cas, (await begin(cas)).ticket)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_encoding_goes_on_during_uploads_and_waits_when_they_are_many() -> None:
    """A slow store holds rows back, so the memory is bounded."""
    uploading = Uploading(await CollectedDatabase.created())
    files, gate = await uploading.begin(), uploading.gate
    first, second, *rest = (
        rows_of([(b"%s%d" % (letter, n), b"v" * 90) for n in range(3)])  # a file each
        for letter in (b"a", b"b", b"c", b"d")
    )
    await files.add(first)
    await turns(3)
    assert gate.waiting == 1
    await files.add(second)
    await turns(3)
    assert gate.waiting == UPLOADS_AT_ONCE
    third = asyncio.create_task(files.add(rest[0]))
    await turns(20)
    assert not third.done()
    assert gate.waiting == UPLOADS_AT_ONCE
    gate.open()
    await third
    await files.add(rest[1])
    assert len(await files.finish()) == 4


async def test_an_upload_that_fails_ends_all() -> None:
    """The next call raises the error of a failed upload, and no task is left."""
    uploading = Uploading(await CollectedDatabase.created())
    files = await uploading.begin()
    await files.add(rows_of([(b"a%d" % n, b"v" * 90) for n in range(8)]))
    broken = StoreBroken("memory://", "create", "levels/", "the disk is gone")
    uploading.store.fail("create", "levels/", broken, times=9)
    uploading.gate.open()
    with pytest.raises(StoreBroken):
        await files.finish()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_cancelled_load_leaves_no_upload_behind() -> None:
    """Running uploads end with a cancelled load."""
    uploading = Uploading(await CollectedDatabase.created())
    files = await uploading.begin()
    await files.add(rows_of([(b"a%d" % n, b"v" * 90) for n in range(3)]))  # one is full
    await files.add(row(b"b", b"1"))
    finishing = asyncio.create_task(files.finish())
    await turns(5)
    assert uploading.gate.waiting == UPLOADS_AT_ONCE
    finishing.cancel()
    await asyncio.wait([finishing])
    assert uploading.gate.waiting == 0
    assert not level_names(uploading.database)
