"""Reads of a reader: their state, its freshness, and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from shalekv.clock import Clock, LoopClock
from shalekv.errors import (
    CorruptObject,
    NotTheWriter,
    ObjectNotFound,
    SeqNotReached,
    SnapshotNotFound,
    TooStale,
)
from shalekv.format import names
from shalekv.server.reader import JOINS_MAX, Reader
from shalekv.server.service import Call
from shalekv.settings import CacheSettings, ReaderConfig, ReaderSettings, UrlSettings
from shalekv.store.api import ObjectStore
from shalekv.v1 import kv_pb2
from tests.kit.constants import set_constants
from tests.kit.engine.replica import BY_HAND, ReplicatedDatabase, pass_s
from tests.kit.inline_runtime import gathered
from tests.kit.serving.answers import answered, parsed, replied, scan_of
from tests.kit.store import FaultyStore, at_each
from tests.kit.virtual_time import virtual_time

NO_CACHE = CacheSettings().model_copy(update={"block_cache_bytes": 0, "metadata_cache_bytes": 0})


class SteppingClock(LoopClock):
    """The clock of the loop, on which a millisecond passes with each reading."""

    def __init__(self) -> None:
        self._read_count = 0

    def monotonic_ms(self) -> float:
        self._read_count += 1
        return super().monotonic_ms() + self._read_count


async def opened(
    database: ReplicatedDatabase,
    store: ObjectStore | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> Reader:
    read = ReaderConfig(
        database=UrlSettings(url="memory://replica"),
        cache=NO_CACHE,
        reader=ReaderSettings.model_validate(BY_HAND | settings),
    )
    runtime = database.local_runtime()
    if clock is not None:
        runtime = replace(runtime, clock=clock)
    return await Reader.open(store or database.another_store(), settings=read, runtime=runtime)


@asynccontextmanager
async def running(reader: Reader) -> AsyncIterator[Reader]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reader.run())
        try:
            yield reader
        finally:
            reader.close()


async def get(reader: Reader, key: bytes, call: Call | None = None, **header: Any) -> Any:
    request = kv_pb2.GetRequest(header=kv_pb2.RequestHeader(**header), key=key)
    answer = reader.kv.get(request, call or Call())
    return await answered(kv_pb2.GetReply, answer)


WRITES: list[tuple[str, Any]] = [
    ("put", kv_pb2.PutRequest(key=b"k", value=b"v")),
    ("delete", kv_pb2.DeleteRequest(key=b"k")),
    ("delete_range", kv_pb2.DeleteRangeRequest()),
    ("write", kv_pb2.WriteRequest()),
    ("txn", kv_pb2.TxnRequest()),
]


@pytest.mark.parametrize(("method", "request_"), WRITES)
@virtual_time(seed=1)
async def test_writes_are_refused_with_the_address_of_the_writer(
    method: str, request_: Any
) -> None:
    """Every write is refused with the address of the last writer that opened the database."""
    database = await ReplicatedDatabase.created()
    await database.edit(lambda m: replace(m, writer_address="there:1"))
    reader = await opened(database)
    with pytest.raises(NotTheWriter) as refused:
        getattr(reader.kv, method)(request_, Call())
    assert refused.value.writer_address == "there:1"


@pytest.mark.parametrize("level", [kv_pb2.READ_LEVEL_LINEARIZABLE, kv_pb2.READ_LEVEL_UNCOMMITTED])
@virtual_time(seed=1)
async def test_reads_that_only_the_writer_can_answer_are_refused(level: Any) -> None:
    """A reader refuses read levels whose promise it cannot keep."""
    reader = await opened(await ReplicatedDatabase.created())
    with pytest.raises(NotTheWriter):
        await get(reader, b"a", read_level=level)
    scan = kv_pb2.ScanRequest(header=kv_pb2.RequestHeader(read_level=level))
    with pytest.raises(NotTheWriter):
        await gathered(scan_of(reader.kv, scan, Call()))
    with pytest.raises(NotTheWriter):
        await _first_reply(reader, "count", scan.header)


@virtual_time(seed=1)
async def test_a_reader_counts_what_it_has_followed() -> None:
    """A count shows the state of a reader, or waits for a newer one, as other reads do."""
    database = await ReplicatedDatabase.created()
    await database.put(a=b"1", b=b"1")
    await database.compact()
    reader = await opened(database)
    async with running(reader):
        seq = await database.put(a=b"2", c=b"1")
        now = await _first_reply(reader, "count", kv_pb2.RequestHeader())
        assert (now.count, now.header.seq, now.header.role) == (2, 1, kv_pb2.ROLE_READER)
        new = await _first_reply(reader, "count", kv_pb2.RequestHeader(min_seq=seq))
        assert (new.count, new.header.seq) == (3, seq)
        with pytest.raises(SeqNotReached):
            await _first_reply(reader, "count", kv_pb2.RequestHeader(min_seq=seq + 1))


@virtual_time(seed=1)
async def test_a_read_whose_version_was_lost_begins_again() -> None:
    """A read that loses its version is repeated in one that exists; a scan is ended."""
    database = await ReplicatedDatabase.created()
    await database.put(a=b"1", b=b"1")
    await database.compact()
    reader = await opened(database, snapshot="none")
    scan = scan_of(reader.kv, kv_pb2.ScanRequest(), Call())
    await database.put(a=b"2")
    await database.compact()
    await database.collect()
    reply = await get(reader, b"a")
    assert (reply.value, reply.header.seq) == (b"2", 2)
    for value in (b"3", b"4"):
        await database.put(a=value)
        await database.compact()
    await database.collect()
    with pytest.raises(SnapshotNotFound):
        await gathered(scan_of(reader.kv, kv_pb2.ScanRequest(), Call()))
    assert (await get(reader, b"a")).value == b"4"
    assert [e.value for m in await gathered(scan) for e in m.entries] == [b"4", b"1"]


@virtual_time(seed=1)
async def test_joining_goes_on_where_what_it_read_was_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that is too late for the log joins again, a bounded number of times."""
    set_constants(monkeypatch, {"shalekv.replica.follow:PARALLEL_READS_MAX": 1})
    database = await ReplicatedDatabase.created()
    losses = 1

    async def lose_the_log() -> None:
        nonlocal losses
        if losses <= 0:
            return
        losses -= 1
        await database.compact()
        await database.collect()
        for number in range(3):
            await database.put(a=b"%d" % number)

    await lose_the_log()
    losing = at_each("get", names.WAL_FOLDER, lose_the_log)
    store = FaultyStore(database.another_store(), before=losing)
    losses = JOINS_MAX - 1  # or fewer: more than one request may meet a loss
    reader = await opened(database, store, snapshot="none")
    assert ((await get(reader, b"a")).value, losses) == (b"2", 0)
    losses = 100
    with pytest.raises(ObjectNotFound):
        await opened(database, store, snapshot="none")


@virtual_time(seed=1)
async def test_reader_that_cannot_begin_leaves_nothing() -> None:
    """A reader that fails to start again and again leaves no snapshots in the manifest."""
    database = await ReplicatedDatabase.created()
    await database.put(a=b"1")
    await database.overwrite(names.wal_name(0), b"damaged")
    for _ in range(3):
        with pytest.raises(CorruptObject):
            await opened(database)
    assert (await database.manifest()).snapshots == ()


@pytest.mark.parametrize("is_scan", [False, True])
@virtual_time(seed=1)
async def test_min_seq_makes_the_reader_poll(*, is_scan: bool) -> None:
    """A read with `min_seq` makes the reader poll at once."""
    database = await ReplicatedDatabase.created()
    reader = await opened(database)
    async with running(reader):
        seq = await database.put(a=b"1")
        header = kv_pb2.RequestHeader(min_seq=seq)
        if is_scan:
            scan = kv_pb2.ScanRequest(header=header)
            found = [
                e.value for m in await gathered(scan_of(reader.kv, scan, Call())) for e in m.entries
            ]
        else:
            found = [(await get(reader, b"a", min_seq=seq)).value]
        assert found == [b"1"]


@virtual_time(seed=1)
async def test_min_seq_that_is_not_reached_says_how_far_it_got_in_time() -> None:
    """The refusal reports the sequence number that was reached, and is sent before the deadline."""
    database = await ReplicatedDatabase.created()
    reader = await opened(database)
    async with running(reader):
        await database.put(a=b"1")
        began_s = asyncio.get_running_loop().time()
        call = Call(deadline_ms=reader.clock.monotonic_ms() + 500)
        with pytest.raises(SeqNotReached) as short:
            await get(reader, b"a", call, min_seq=7)
        assert short.value.seq == 1
        assert asyncio.get_running_loop().time() - began_s < 0.5
        assert reader.engine.watermark.waiting_count == 0


@virtual_time(seed=1)
async def test_max_staleness_makes_the_reader_poll_or_refuse() -> None:
    """A state that is new enough is answered at once, another after one poll, or refused."""
    database = await ReplicatedDatabase.created()
    store = FaultyStore(database.another_store())
    reader = await opened(database, store)
    async with running(reader):
        await reader.engine.catch_up()
        await pass_s(5)
        await database.put(a=b"1")
        store.requests.clear()
        assert not (await get(reader, b"a", max_staleness_ms=5_000)).found
        assert store.asked("get") == []
        reply = await get(reader, b"a", max_staleness_ms=4_999)
        assert (reply.value, reply.header.staleness_ms) == (b"1", 0)
        store.before = at_each("get", "", partial(pass_s, 2))
        await pass_s(2)
        with pytest.raises(TooStale) as stale:
            await get(reader, b"a", max_staleness_ms=1_000)
        assert stale.value.staleness_ms == 2_000


@pytest.mark.parametrize("method", ["get", "batch_get", "count", "scan"])
@virtual_time(seed=1)
async def test_no_reply_reports_more_staleness_than_allowed(method: str) -> None:
    """A reply reports the staleness that was checked, however the clock moves meanwhile."""
    database = await ReplicatedDatabase.created()
    await database.put(a=b"1")
    await database.compact()  # so that a read has more to do than to look into memory
    reader = await opened(database, clock=SteppingClock())
    told_ms = []
    async with running(reader):
        for more_ms in range(8):  # so one is judged when it is as old as it may be
            await reader.engine.catch_up()
            await pass_s(1)
            allowed_ms = reader.engine.staleness_ms + more_ms
            header = kv_pb2.RequestHeader(max_staleness_ms=allowed_ms)
            reply = await _first_reply(reader, method, header)
            assert reply.header.staleness_ms <= allowed_ms
            told_ms.append(reply.header.staleness_ms)
    assert min(told_ms) < 1_000 < max(told_ms)  # some had to look for news, others had not


async def _first_reply(reader: Reader, method: str, header: kv_pb2.RequestHeader) -> Any:
    requests: dict[str, Any] = {
        "get": kv_pb2.GetRequest(header=header, key=b"a"),
        "batch_get": kv_pb2.BatchGetRequest(header=header, keys=[b"a"]),
        "count": kv_pb2.CountRequest(header=header),
        "scan": kv_pb2.ScanRequest(header=header),
    }
    answer = getattr(reader.kv, method)(requests[method], Call())
    if method == "scan":
        return parsed(requests[method], (await gathered(answer))[0])
    return parsed(requests[method], await replied(answer))
