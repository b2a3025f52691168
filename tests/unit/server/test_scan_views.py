"""Views of scans: kept for next pages, resumed, and dropped when they keep too much memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shalekv.errors import PageExpired
from shalekv.server import scans
from shalekv.server.writer import Writer
from shalekv.settings import KIB, MIB, DatabaseSettings, LimitSettings, WriterConfig
from shalekv.v1 import kv_pb2
from shalekv.write.pending_replies import PendingReply
from tests.kit.engine.databases import Database
from tests.kit.inline_runtime import gathered
from tests.kit.serving.answers import scan_of
from tests.kit.serving.roles import CALL, Serving, pairs, put, serving
from tests.kit.serving.sweeping import compact

Pairs = list[tuple[bytes, bytes]]


async def fill(writer: Serving, count: int = 10, value: bytes = b"1") -> Pairs:
    keys = [b"%03d" % number for number in range(count)]
    await writer.ask(kv_pb2.WriteRequest(changes=[put(key, value) for key in keys]))
    return [(key, value) for key in keys]


async def page(
    writer: Serving, token: bytes = b"", level: Any = 0, **fields: Any
) -> tuple[Pairs, bytes]:
    """Read one page, and return it with the token of the next; empty: it was the last."""
    replies = await writer.scan(level, page_token=token, **fields)
    assert [reply.more for reply in replies[:-1]] == [False] * (len(replies) - 1)
    assert {reply.page_token for reply in replies[:-1]} <= {b""}
    last = replies[-1]
    assert last.more == bool(last.page_token)
    return pairs(replies), last.page_token


async def test_scan_without_a_limit_keeps_no_view() -> None:
    """A view is kept only for a scan that has a next page."""
    async with serving() as writer:
        await fill(writer)
        await writer.scan()
        await writer.scan(limit=10)
        await writer.scan(limit_bytes=10_000)
        assert len(writer.kv.scans.views) == 0


async def test_writer_that_ends_drops_its_views() -> None:
    """A writer that has ended keeps no views and no timers."""
    database = await Database.created()
    settings = WriterConfig(database=DatabaseSettings(url="memory://test"))
    writer = await Writer.open(database.store, settings=settings, runtime=database.runtime())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run())
        for key in (b"a", b"b"):
            answer = writer.kv.put(kv_pb2.PutRequest(key=key), CALL)
            assert isinstance(answer, PendingReply)
            await answer
        await gathered(scan_of(writer.kv, kv_pb2.ScanRequest(limit=1), CALL))
        assert len(writer.kv.scans.views) == 1
        writer.close()
    assert len(writer.kv.scans.views) == 0


VALUE = bytes(2 * KIB)
COUNT = 100  # of puts, which are 200 KiB
LIMITS = LimitSettings(scan_message_bytes=KIB)  # each entry is a message
MEMORY_BYTES = MIB  # of which views may keep a quarter


def keys(name: bytes, count: int = COUNT) -> list[bytes]:
    return [b"%s%03d" % (name, number) for number in range(count)]


class Shedding:
    """A writer on a database whose log is compacted by hand."""

    def __init__(self, writer: Serving, database: Database) -> None:
        self.writer = writer
        self.engine = writer.engine
        self._database = database

    async def fill(self, name: bytes) -> None:
        await asyncio.gather(*(self.writer.put(key, VALUE) for key in keys(name)))

    async def compact(self) -> None:
        """Compact all that was written, and wait until memory has dropped it."""
        await compact(self._database)
        # No event reports this: poll it.
        while self.engine.levels.pruner.droppable_seq or self.engine.memtable.key_count:  # noqa: ASYNC110 - as said
            await asyncio.sleep(0)

    async def stalled(self) -> AsyncIterator[kv_pb2.ScanReply]:
        """A scan of everything, whose client has read one message."""
        scan = scan_of(self.writer.kv, kv_pb2.ScanRequest(), CALL)
        await anext(scan)
        return scan

    async def read_when_compacted(self, scan: AsyncIterator[kv_pb2.ScanReply]) -> int:
        """Count the messages that are read, one at a time, after the view keeps too much."""
        memtable = self.engine.memtable
        # No event reports this, either.
        while memtable.held_bytes <= self.engine.held_bytes_max:  # noqa: ASYNC110 - as said
            await asyncio.sleep(0)
        count = 0
        async for _ in scan:
            count += 1
            await asyncio.sleep(0)
        return count

    async def page(self, token: bytes = b"") -> kv_pb2.ScanReply:
        (reply,) = await self.writer.scan(limit=1, page_token=token)
        return reply


@asynccontextmanager
async def shedding() -> AsyncIterator[Shedding]:
    """A writer with 1 MiB of memory for uncompacted data."""
    database = await Database.created()
    async with serving(
        database, limits=LIMITS, memtable_bytes_max=MEMORY_BYTES, fence_poll_ms=10
    ) as writer:
        yield Shedding(writer, database)


async def test_a_stalled_scan_is_ended_when_it_keeps_too_much() -> None:
    """A stalled scan ends with PAGE_EXPIRED, never with what looks like an end."""
    async with shedding() as it:
        await it.fill(b"a")
        await it.fill(b"b")
        scan = await it.stalled()
        await it.compact()
        with pytest.raises(PageExpired):
            await gathered(scan)
        assert [key for key, _ in pairs(await it.writer.scan())] == keys(b"a") + keys(b"b")


async def test_a_scan_that_goes_on_comes_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads gets the whole scan, although its view keeps too much."""
    for name in ("UNREAD_MS", "SCAN_GRACE_MS"):  # this process may be held up for longer
        monkeypatch.setattr(scans, name, 60_000)
    async with shedding() as it:
        await it.fill(b"a")
        await it.fill(b"b")
        reading = asyncio.create_task(it.read_when_compacted(await it.stalled()))
        await it.compact()
        assert await reading == 2 * COUNT - 1
        assert it.engine.memtable.held_bytes == 0


async def test_a_scan_that_goes_on_for_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan that keeps too much is ended before writes have waited for too long."""
    monkeypatch.setattr(scans, "SCAN_GRACE_MS", 0)
    async with shedding() as it:
        await it.fill(b"a")
        await it.fill(b"b")
        reading = asyncio.create_task(it.read_when_compacted(await it.stalled()))
        await it.compact()
        with pytest.raises(PageExpired):
            await reading
        assert it.engine.memtable.held_bytes == 0


async def test_pages_go_before_scans() -> None:
    """Views that are kept for next pages are dropped first, and no more than needed."""
    async with shedding() as it:
        await it.fill(b"a")
        page = await it.page()
        await it.compact()
        await it.fill(b"b")
        scan = await it.stalled()
        await it.compact()
        with pytest.raises(PageExpired):
            await it.page(page.page_token)
        assert len(await gathered(scan)) == 2 * COUNT - 1
