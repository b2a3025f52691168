"""Reads, and times in the log, while transactions are pending that have found expiring values."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.message import Message

from shalekv.errors import ConditionFailed
from shalekv.format.sst import open_sst
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.roles import (
    COMMITTED,
    LINEARIZABLE,
    UNCOMMITTED,
    Compare,
    Serving,
    absent,
    add,
    change,
    follow,
    forgotten,
    get,
    pairs,
    present,
    put,
    serving,
)
from tests.kit.serving.sweeping import BY_HAND, TTL_MS, compact
from tests.kit.states import counter
from tests.kit.store import Gate, HeldCreate
from tests.kit.virtual_time import virtual_time

FINDS: dict[str, Message] = {
    "a put": kv_pb2.PutRequest(key=b"a", value=b"new", precondition=present()),
    "a refused put": kv_pb2.PutRequest(key=b"a", precondition=absent()),
    "an add": kv_pb2.WriteRequest(changes=[add(b"a"), put(b"other")]),
    "a get": kv_pb2.TxnRequest(then=[get(b"a"), change(put(b"other"))]),
    "a get that writes nothing": kv_pb2.TxnRequest(then=[get(b"a")]),
    "a range": kv_pb2.TxnRequest(
        compares=[Compare(range_empty=kv_pb2.KeyRange(prefix=b"a"))],
        otherwise=[change(put(b"other"))],
    ),
}


async def begun(writer: Serving, request: Message) -> asyncio.Task[Any]:
    """A task that waits until the request is durable; it is decided, and its object is held."""
    task = asyncio.create_task(writer.ask(request))
    await quiesce()
    return task


async def shown(writer: Serving, key: bytes) -> bool:
    """Return whether reads show a value of the key; all kinds of reads agree."""
    found = {(await writer.get(key, level)).found for level in (COMMITTED, LINEARIZABLE)}
    found.add((await writer.ask(kv_pb2.BatchGetRequest(keys=[key]))).results[0].found)
    found.add(key in dict(pairs(await writer.scan())))
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("name", FINDS)
@virtual_time(seed=1)
async def test_what_a_pending_transaction_has_found_does_not_expire(name: str) -> None:
    """No read shows that a value has expired before the transaction that found it (I14)."""
    async with serving(**BY_HAND) as writer:
        await writer.put(b"a", counter(1), ttl_ms=TTL_MS)
        await writer.put(b"b", ttl_ms=TTL_MS)
        writer.store.is_holding = True
        before = await begun(writer, kv_pb2.PutRequest(key=b"before"))
        asked = await begun(writer, FINDS[name])
        writer.pass_ms(TTL_MS - 1)
        assert await shown(writer, b"a")
        writer.pass_ms(TTL_MS)
        assert await shown(writer, b"a")
        assert await shown(writer, b"b")  # a state has one time
        assert (await writer.get(b"a", UNCOMMITTED)).found
        writer.store.release_all()
        await asyncio.wait([before, asked])
        assert isinstance(asked.exception(), ConditionFailed if "refused" in name else type(None))
        assert await shown(writer, b"a") is (name == "a put")
        assert not await shown(writer, b"b")


@virtual_time(seed=1)
async def test_values_expire_that_no_pending_transaction_has_found() -> None:
    """Transactions that found other values, or none, stop no time; nor does what has expired."""
    async with serving(**BY_HAND) as writer:
        await writer.put(b"a", ttl_ms=TTL_MS)
        await writer.put(b"later", ttl_ms=10 * TTL_MS)
        await writer.put(b"lasting")
        writer.store.is_holding = True
        keys = (b"lasting", b"later")
        puts = [kv_pb2.PutRequest(key=key, precondition=present()) for key in keys]
        found = [await begun(writer, each) for each in puts]
        writer.pass_ms(TTL_MS)
        assert not await shown(writer, b"a")
        new = kv_pb2.PutRequest(key=b"a", precondition=absent())
        asked = await begun(writer, new)
        writer.pass_ms(TTL_MS)
        assert not await shown(writer, b"a")
        writer.store.release_all()
        await asyncio.gather(*found, asked)
        assert await shown(writer, b"a")


@virtual_time(seed=1)
async def test_time_in_the_log_stays_before_what_later_transactions_found() -> None:
    """A reader applies an object and its time: it shows no value as expired too early either.

    The time of an object is no earlier than the decisions in it.
    """
    async with serving(**BY_HAND, max_parallel_writes=2) as writer:
        expires_ms = writer.engine.time.now_ms() + TTL_MS
        await writer.put(b"a", ttl_ms=TTL_MS)
        writer.store.is_holding = True
        puts = [kv_pb2.PutRequest(key=key) for key in (b"first", b"second", b"third")]
        found = kv_pb2.PutRequest(key=b"a", precondition=present())
        pending = [await begun(writer, each) for each in (*puts, found)]  # two are in flight
        writer.pass_ms(2 * TTL_MS)
        decided_ms = writer.engine.time.now_ms()
        pending.append(await begun(writer, kv_pb2.PutRequest(key=b"b", precondition=absent())))
        for count in range(1, 5):
            (await writer.store.arrived(count)).release()
            await quiesce()
        await asyncio.gather(*pending)
        assert [_time_ms(writer, held) for held in writer.store.held] == [
            expires_ms - TTL_MS
        ] * 2 + [expires_ms - 1, decided_ms]


def _time_ms(writer: Serving, held: HeldCreate) -> int:
    """The logical time of an object of the log."""
    sst = open_sst(held.name, held.data, database_id=writer.engine.database_id)
    return sst.properties.logical_time_ms


@virtual_time(seed=1)
async def test_a_read_that_fetches_a_block_is_as_of_its_beginning() -> None:
    """A value that expires while its block is fetched is shown: a later write may have found it."""
    database = await Database.created()
    gate = Gate("get_range", "levels/")
    async with serving(database, before=gate, **BY_HAND) as writer:
        await writer.put(b"a", ttl_ms=TTL_MS)
        await compact(database)
        await follow(writer)
        await forgotten(writer)
        gate.close()
        one = await begun(writer, kv_pb2.GetRequest(key=b"a"))
        many = await begun(writer, kv_pb2.BatchGetRequest(keys=[b"a", b"b"]))
        assert gate.waiting
        await writer.put(b"b")
        writer.pass_ms(TTL_MS)
        gate.open()
        assert (await one).found
        assert [each.found for each in (await many).results] == [True, False]
        assert not (await writer.get(b"a")).found
