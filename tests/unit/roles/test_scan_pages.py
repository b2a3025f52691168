"""Scans in pages: one view for all of them, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shalekv.errors import PageExpired
from shalekv.roles.writer import Writer
from shalekv.settings import DatabaseSettings, LimitSettings, ServeSettings
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.inline_runtime import gathered
from tests.kit.serving.messages import put
from tests.kit.serving.roles import CALL, Serving, pairs, serving
from tests.sim.run import simulate
from tests.sim.world import World

Pairs = list[tuple[bytes, bytes]]


async def fill(writer: Serving, count: int = 10, value: bytes = b"1") -> Pairs:
    """So many keys in one commit."""
    keys = [b"%03d" % number for number in range(count)]
    await writer.ask(kv_pb2.WriteRequest(changes=[put(key, value) for key in keys]))
    return [(key, value) for key in keys]


async def page(
    writer: Serving, token: bytes = b"", level: Any = 0, **fields: Any
) -> tuple[Pairs, bytes]:
    """One page, and the token of the next; empty: it was the last."""
    replies = await writer.scan(level, page_token=token, **fields)
    assert [reply.more for reply in replies[:-1]] == [False] * (len(replies) - 1)
    assert {reply.page_token for reply in replies[:-1]} <= {b""}
    last = replies[-1]
    assert last.more == bool(last.page_token)
    return pairs(replies), last.page_token


async def pages(writer: Serving, token: bytes = b"", level: Any = 0, **fields: Any) -> list[Pairs]:
    """All pages from `token` on."""
    found = []
    while True:
        entries, token = await page(writer, token, level, **fields)
        found.append(entries)
        if not token:
            return found


async def test_pages_see_the_view_of_the_first() -> None:
    """Writes, deletes, range deletes and merges of runs change nothing in the pages that follow."""
    async with serving() as writer:
        whole = await fill(writer, 60)
        found, token = await page(writer, limit=7)
        seqs = set()
        while token:
            number = len(found)
            await writer.put(b"%03d" % (number + 1), b"changed")
            await writer.delete(b"%03d" % (number + 2))
            key_range = kv_pb2.KeyRange(start=b"%03d" % (number + 3), end=b"%03d" % (number + 9))
            await writer.ask(kv_pb2.DeleteRangeRequest(range=key_range))
            await writer.put(b"%03d x" % (number + 1), b"new")
            await quiesce()
            replies = await writer.scan(page_token=token, limit=7)
            seqs |= {reply.header.seq for reply in replies}
            found, token = found + pairs(replies), replies[-1].page_token
        assert found == whole
        assert seqs == {1}
        assert writer.engine.log.objects_written > 20
        assert writer.engine.memtable.run_count < 10  # so runs were merged
        await writer.ask(kv_pb2.DeleteRangeRequest(all=True))
        assert pairs(await writer.scan()) == []


def test_token_expires_after_its_last_page() -> None:
    """The view lives for `scan_view_ttl_ms` after each page that used it, then PAGE_EXPIRED."""

    async def main(world: World) -> None:
        limits = LimitSettings(scan_view_ttl_ms=1_000)
        async with serving(limits=limits) as writer:
            await fill(writer)
            _, token = await page(writer, limit=1)
            for _ in range(3):
                await world.sleep_ms(999)
                _, token = await page(writer, token, limit=1)
            await world.sleep_ms(1_000)
            with pytest.raises(PageExpired):
                await page(writer, token)
            assert len(writer.kv.scans.views) == 0

    simulate(1, main)


def test_slow_page_gives_a_token_that_works() -> None:
    """The time counts from the end of a page: one that is read slowly is not lost by that."""

    async def main(world: World) -> None:
        limits = LimitSettings(scan_view_ttl_ms=1_000, scan_message_bytes=1_024)
        async with serving(limits=limits) as writer:
            whole = await fill(writer, 20, b"v" * 500)
            first, token = await page(writer, limit=2)
            request = kv_pb2.ScanRequest(page_token=token, limit=10)
            slow = []
            async for reply in writer.kv.scan(request, CALL):
                slow.append(reply)
                if not reply.more:
                    await world.sleep_ms(5_000)
                    with pytest.raises(PageExpired):
                        await page(writer, token)
            assert len(slow) > 3
            rest = await gathered(
                writer.kv.scan(kv_pb2.ScanRequest(page_token=slow[-1].page_token), CALL)
            )
            assert first + pairs([*slow, *rest]) == whole

    simulate(1, main)


async def test_token_does_not_survive_a_restart() -> None:
    """The next writer of the same database does not know the view: PAGE_EXPIRED, begin again."""
    database = await Database.created()
    async with serving(database) as writer:
        await fill(writer)
        _, token = await page(writer, limit=1)
    async with serving(database) as writer:
        _, own = await page(writer, limit=1)
        with pytest.raises(PageExpired):
            await page(writer, token)
        assert len((await page(writer, own))[0]) == 9


async def test_scan_without_a_limit_keeps_no_view() -> None:
    """Only who may come back for a next page holds memory."""
    async with serving() as writer:
        await fill(writer)
        await writer.scan()
        await writer.scan(limit=10)
        await writer.scan(limit_bytes=10_000)
        assert len(writer.kv.scans.views) == 0


async def test_writer_that_ends_lets_go_of_its_views() -> None:
    """When a writer has run its course no view and no timer is left of it."""
    database = await Database.created()
    settings = ServeSettings(database=DatabaseSettings(url="memory://test"))
    writer = await Writer.open(database.store, settings=settings, runtime=database.runtime())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run())
        for key in (b"a", b"b"):
            answer = writer.kv.put(kv_pb2.PutRequest(key=key), CALL)
            assert isinstance(answer, asyncio.Future)
            await answer
        await gathered(writer.kv.scan(kv_pb2.ScanRequest(limit=1), CALL))
        assert len(writer.kv.scans.views) == 1
        writer.close()
    assert len(writer.kv.scans.views) == 0
