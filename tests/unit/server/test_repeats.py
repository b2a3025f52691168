"""Idempotency keys: a repeated request is applied once, and answered as the first time."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from google.protobuf.message import Message

from shalekv.errors import ConditionFailed, KeyExpired, MemtableFull
from shalekv.v1 import kv_pb2
from shalekv.write.idempotency import AppliedRequest
from tests.kit.constants import set_constants
from tests.kit.engine.databases import Database
from tests.kit.serving.roles import (
    COMMITTED,
    MEMORY,
    Serving,
    absent,
    add,
    change,
    delete,
    delete_range,
    follow,
    get,
    key_header,
    pairs,
    present,
    put,
    serving,
    touch,
)
from tests.kit.serving.sweeping import compact
from tests.kit.states import counter

KEY = b"the key of a request"
WINDOW_MS = 86_400_000
REQUESTS: dict[str, Any] = {
    "put": kv_pb2.PutRequest(key=b"a", value=b"1", ttl_ms=WINDOW_MS),
    "conditional put": kv_pb2.PutRequest(key=b"a", precondition=absent()),
    "delete": kv_pb2.DeleteRequest(key=b"old"),
    "conditional delete": kv_pb2.DeleteRequest(key=b"old", precondition=present()),
    "counted delete": kv_pb2.DeleteRequest(key=b"old", count_deleted=True),
    "delete_range": kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(prefix=b"o")),
    "counted delete_range": kv_pb2.DeleteRangeRequest(all=True, count_deleted=True),
    "write": kv_pb2.WriteRequest(changes=[put(b"a"), delete(b"old")]),
    "counters": kv_pb2.WriteRequest(changes=[add(b"n", 2), add(b"m", -3), delete_range(end=b"b")]),
    "touches": kv_pb2.TxnRequest(then=[change(touch(b"old")), change(touch(b"x"))]),
    "txn": kv_pb2.TxnRequest(
        compares=[kv_pb2.Compare(key=b"a", exists=False)],
        then=[change(put(b"a", b"1")), get(b"old"), get(b"x"), change(add(b"n", 5))],
        otherwise=[change(delete(b"a"))],
    ),
    "other branch": kv_pb2.TxnRequest(
        compares=[kv_pb2.Compare(key=b"a", exists=True)],
        otherwise=[change(put(b"a", b"1"))],
    ),
}
EACH_KIND = pytest.mark.parametrize("kind", REQUESTS)


def keyed(request: Any, key: bytes = KEY, **fields: Any) -> Any:
    copy = type(request)()
    copy.CopyFrom(request)
    copy.header.CopyFrom(key_header(key, **fields))
    return copy


async def fill(writer: Serving) -> None:
    """Write keys that the requests delete and add to."""
    await writer.put(b"old", b"value")
    await writer.put(b"n", counter(40))


def same(first: Message, *others: Message) -> None:
    wanted = first.SerializeToString(deterministic=True)
    assert [other.SerializeToString(deterministic=True) for other in others] == [
        wanted for _ in others
    ]


@EACH_KIND
async def test_repeat_gets_the_first_reply_after_a_restart(kind: str) -> None:
    """The next writer answers as the first did, except for its own epoch."""
    database = await Database.created()
    request = keyed(REQUESTS[kind])
    async with serving(database) as writer:
        await fill(writer)
        first = await writer.ask(request)
        state = pairs(await writer.scan())
    async with serving(database) as writer:
        repeated = await writer.ask(request)
        assert (first.header.epoch, repeated.header.epoch) == (1, 2)
        first.header.epoch = 2
        same(first, repeated)
        assert pairs(await writer.scan()) == state
        assert writer.engine.log.stats.objects == 0


@EACH_KIND
async def test_header_is_no_content(kind: str) -> None:
    """A repeat may have another header: only the other fields identify it."""
    async with serving() as writer:
        await fill(writer)
        request = REQUESTS[kind]
        first = await writer.ask(keyed(request))
        same(first, await writer.ask(keyed(request, read_level=COMMITTED)))
        same(first, await writer.ask(keyed(request, max_staleness_ms=2**64 - 1)))
        for length in (1, 100, 127, 128, 16_383, 16_384, 70_000):
            of_later_version = keyed(request)
            of_later_version.header.MergeFromString(unknown_field(length))
            same(first, await writer.ask(of_later_version))


def unknown_field(length: int) -> bytes:
    """An unknown field of this many bytes."""
    long = kv_pb2.GetRequest(key=bytes(length)).SerializeToString()
    return b"\xa2\x06" + long[1:]  # field 100 in place of 2


async def test_hash_of_a_request_is_for_ever() -> None:
    """The hash of a request never changes, since records outlive the server that wrote them."""
    request = kv_pb2.PutRequest(key=b"k", value=b"v", ttl_ms=5)
    wire = b"\x01" + b"\x12\x01k" + b"\x1a\x01v" + b"\x20\x05"  # the kind of reply, then fields
    async with serving() as writer:
        await writer.ask(keyed(request))
        request_hash = hashlib.blake2b(wire, digest_size=16).digest()
        assert isinstance(writer.engine.idempotency.find(KEY, request_hash), AppliedRequest)


async def test_copies_of_a_refused_request_are_refused_alike() -> None:
    """Copies that wait together get the same refusal, and the key is free again."""
    async with serving() as writer:
        await fill(writer)
        writer.store.is_holding = True
        await writer.put(b"a", durability=MEMORY)
        request = keyed(kv_pb2.PutRequest(key=b"a", precondition=absent()))
        copies = [asyncio.ensure_future(writer.begin(request)) for _ in range(3)]
        writer.store.release_all()
        refused = await asyncio.gather(*copies, return_exceptions=True)
        assert {type(each) for each in refused} == {ConditionFailed}
        await writer.delete(b"a")
        assert (await writer.ask(request)).header.wal_id > 0


async def test_repeat_from_memory_is_answered_at_once() -> None:
    """A repeat of a MEMORY write is answered at once with the same number; after it has landed,
    with its object.
    """
    async with serving() as writer:
        writer.store.is_holding = True
        request = keyed(kv_pb2.PutRequest(key=b"a", durability=MEMORY))
        first, again = writer.begin(request), writer.begin(request)
        assert isinstance(first, kv_pb2.PutReply)
        assert isinstance(again, kv_pb2.PutReply)
        same(first, again)
        writer.store.release_all()
        await writer.put(b"b")
        later = await writer.ask(request)
        assert (later.header.seq, later.header.wal_id) == (1, 1)
        assert later.durability == MEMORY


async def test_key_is_remembered_for_its_window() -> None:
    """After `idempotency_window_s` a repeat is refused as expired, and applies nothing."""
    async with serving(idempotency_window_s=WINDOW_MS // 1_000) as writer:
        request = keyed(kv_pb2.WriteRequest(changes=[add(b"n")]))
        first = await writer.ask(request)
        writer.pass_ms(WINDOW_MS - 60_000)
        same(first, await writer.ask(request))
        writer.pass_ms(60_000)
        with pytest.raises(KeyExpired):
            await writer.ask(request)
        assert (await writer.get(b"n")).value == counter(1)


SMALL: dict[str, Any] = {
    "direct_ingest_bytes": 65_536,
    "admission_timeout_ms": 0,
}


def large(key: bytes) -> kv_pb2.WriteRequest:
    return kv_pb2.WriteRequest(changes=[put(key, bytes(100_000))])


async def test_loads_wait_for_compaction_and_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond the bound a large batch is refused with advice, until loads are compacted."""
    set_constants(monkeypatch, {"shalekv.write.admission:UNCOMPACTED_LOADS_MAX": 2})
    database = await Database.created()
    async with serving(database, **SMALL) as writer:
        for key in (b"a", b"b"):
            await writer.ask(large(key))
        with pytest.raises(MemtableFull, match="loads are not compacted"):
            await writer.ask(large(b"c"))
        writer.check_idle()
        await compact(database)
        await follow(writer)
        await writer.ask(large(b"c"))
        assert [(await writer.get(key)).found for key in (b"a", b"b", b"c")] == [True] * 3
