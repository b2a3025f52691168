"""Transactions over keys that the levels hold: decided as if all of them were in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shalekv.engine.below import WITNESS_COUNT
from shalekv.errors import RangeTooCostly
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.letting_go import NEVER_POLLED, follow, forgotten
from tests.kit.serving.messages import (
    Compare,
    delete,
    get,
    put,
)
from tests.kit.serving.roles import Serving, serving
from tests.kit.serving.sweeping import compact

TTL_MS = 60_000
MIB = 1 << 20


@asynccontextmanager
async def compacted(
    *changes: kv_pb2.Change, limits: LimitSettings | None = None, **settings: Any
) -> AsyncIterator[Serving]:
    """A writer with nothing in memory: the levels hold commit 1, which has these changes, and 2."""
    database = await Database.created()
    async with serving(database, limits=limits, **NEVER_POLLED, **settings) as writer:
        await writer.ask(kv_pb2.WriteRequest(changes=[*changes, put(b"gone"), put(b"shut", b"v")]))
        await writer.delete(b"gone")
        await compact(database)
        await follow(writer)
        await forgotten(writer)
        yield writer


def empty(**fields: Any) -> kv_pb2.Compare:
    """A range must have no key with a value."""
    return Compare(range_empty=kv_pb2.KeyRange(**fields))


async def holds(writer: Serving, *compares: kv_pb2.Compare) -> bool:
    """Whether a transaction finds that these comparisons hold."""
    reply: kv_pb2.TxnReply = await writer.ask(kv_pb2.TxnRequest(compares=compares, then=[get()]))
    return reply.succeeded


RANGE = {"prefix": b"r"}


@pytest.mark.parametrize(
    ("count_max", "is_costly"), [(3, True), (4, False)], ids=["one too many", "as many"]
)
@pytest.mark.parametrize("kind", ["expired", "deleted"])
async def test_range_of_the_levels_may_cost_too_much(
    kind: str, count_max: int, *, is_costly: bool
) -> None:
    """Keys of the levels without a value are looked at, and not more of them than allowed."""
    ttl_ms = TTL_MS if kind == "expired" else 0
    changes = [put(b"r%d" % number, ttl_ms=ttl_ms) for number in range(4)]
    async with compacted(*changes, limits=LimitSettings(compare_count_max=count_max)) as writer:
        if kind == "deleted":
            await asyncio.gather(*(writer.delete(b"r%d" % number) for number in range(4)))
        else:
            writer.pass_ms(TTL_MS)
        if is_costly:
            with pytest.raises(RangeTooCostly):
                await holds(writer, empty(**RANGE))
        else:
            assert await holds(writer, empty(**RANGE))
        assert await holds(writer, empty(prefix=b"q"))


@pytest.mark.parametrize(
    ("count", "is_costly"), [(WITNESS_COUNT - 1, False), (WITNESS_COUNT, True)]
)
async def test_keys_of_a_range_that_are_deleted_after_the_look_do_not_count(
    count: int, *, is_costly: bool
) -> None:
    """Where all that was fetched is deleted before the decision, a range is empty if that was all
    of it, and is refused if more may be there.
    """
    changes = [put(b"r%02d" % number) for number in range(count)]
    async with compacted(*changes, queued_bytes_max=MIB) as writer:
        writer.store.is_holding = True
        large = asyncio.create_task(writer.put(b"large", bytes(MIB)))
        held = await writer.store.arrived(1)
        deleted = asyncio.create_task(
            writer.ask(kv_pb2.WriteRequest(changes=[delete(each.put.key) for each in changes]))
        )
        await quiesce()
        is_empty = asyncio.create_task(holds(writer, empty(**RANGE)))
        await quiesce()
        assert writer.engine.admission.waiting_bytes > 0
        writer.store.is_holding = False
        held.release()
        await asyncio.gather(large, deleted)
        if is_costly:
            with pytest.raises(RangeTooCostly):
                await is_empty
        else:
            assert await is_empty
