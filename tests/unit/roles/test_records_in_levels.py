"""Idempotency keys whose records are in the levels: as good as those in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shalekv.errors import KeyExpired, KeyReused
from shalekv.roles.compactor import Compactor
from shalekv.settings import (
    CompactorSettings,
    CompactSettings,
    LevelSettings,
    UrlSettings,
)
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.serving.messages import add, key_header
from tests.kit.serving.roles import Serving, serving

WINDOW_S = 100
WINDOW_MS = WINDOW_S * 1_000
KEY = b"the key of a request"
REQUEST = kv_pb2.WriteRequest(changes=[add(b"n", 2)], header=key_header(KEY))
OTHER = kv_pb2.WriteRequest(changes=[add(b"n", 3)], header=key_header(KEY))
SETTINGS = CompactSettings(
    database=UrlSettings(url="memory://records"),
    levels=LevelSettings(sst_bytes=65_536, block_bytes=1_024),
    compactor=CompactorSettings(wal_trigger_count=1, wal_trigger_age_ms=0),
)


async def compact(database: Database) -> None:
    """Merge all that is in the WAL into the levels."""
    compactor = await Compactor.open(
        database.store, settings=SETTINGS, runtime=database.runtime(), hurry=asyncio.Event()
    )
    await compactor.run(is_once=True)


@asynccontextmanager
async def compacted(database: Database) -> AsyncIterator[tuple[Serving, kv_pb2.WriteReply]]:
    """A writer that has let go of the record of `REQUEST`, which the levels hold, and its reply."""
    async with serving(database, idempotency_window_s=WINDOW_S, fence_poll_ms=10) as writer:
        first = await writer.ask(REQUEST)
        await compact(database)
        # Nobody is told of this: it is seen from outside alone.
        while len(writer.engine.idempotency) or writer.engine.memtable.key_count:  # noqa: ASYNC110 - as said
            await asyncio.sleep(0)
        yield writer, first


async def value(writer: Serving) -> int:
    """The counter."""
    return int.from_bytes((await writer.get(b"n")).value, "little", signed=True)


async def test_repeat_gets_the_first_reply_from_the_levels() -> None:
    """Compacted and let go of, the record still answers its repeat, and nothing is applied."""
    async with compacted(await Database.created()) as (writer, first):
        assert await writer.ask(REQUEST) == first
        assert await value(writer) == 2


async def test_repeat_gets_the_first_reply_from_another_writer() -> None:
    """The next writer finds the record in the levels."""
    database = await Database.created()
    async with compacted(database) as (_, first):
        pass
    async with serving(database, idempotency_window_s=WINDOW_S) as writer:
        reply = await writer.ask(REQUEST)
        assert (reply.counters, reply.header.seq) == (first.counters, first.header.seq)
        assert await value(writer) == 2


async def test_key_is_not_used_for_other_content() -> None:
    """A key whose record is in the levels is refused for another request."""
    async with compacted(await Database.created()) as (writer, _):
        with pytest.raises(KeyReused):
            await writer.ask(OTHER)
        assert await value(writer) == 2


async def test_copies_in_flight_apply_once() -> None:
    """Copies that look into the levels together are one request: of a new key, too."""
    async with compacted(await Database.created()) as (writer, first):
        assert await asyncio.gather(*(writer.ask(REQUEST) for _ in range(5))) == [first] * 5
        new = kv_pb2.WriteRequest(changes=[add(b"n", 5)], header=key_header(b"another"))
        replies: list[Any] = await asyncio.gather(*(writer.ask(new) for _ in range(5)))
        assert [reply.counters for reply in replies] == [[7]] * 5


async def test_window_is_the_same_in_the_levels() -> None:
    """After the window a repeat is refused, for as long again, compacted once more or not."""
    database = await Database.created()
    async with compacted(database) as (writer, _):
        writer.pass_ms(WINDOW_MS)
        with pytest.raises(KeyExpired):
            await writer.ask(REQUEST)
        await writer.put(b"x")
        await compact(database)
        writer.pass_ms(WINDOW_MS - 10_000)
        with pytest.raises(KeyExpired):
            await writer.ask(REQUEST)
        writer.pass_ms(20_000)
        assert (await writer.ask(REQUEST)).counters == [4]
