"""What the writer answers to range deletes, batches with counters and transactions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from google.protobuf.message import Message

from shalekv.errors import CounterOverflow, NotACounter, RangeTooCostly, ReplyTooLarge
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2
from tests.kit.engine.running_log import quiesce
from tests.kit.serving.messages import add, change, delete, delete_range, get, put
from tests.kit.serving.roles import DURABLE, MEMORY, UNCOMMITTED, Serving, pairs, serving
from tests.kit.states import counter

MIB = 1 << 20


async def keys(writer: Serving) -> list[bytes]:
    """The keys that a scan reads."""
    return [key for key, _ in pairs(await writer.scan())]


async def test_range_delete_is_one_commit() -> None:
    """All keys of the range go at once, under one number, and others stay."""
    async with serving() as writer:
        for key in (b"a", b"b", b"ba", b"c"):
            await writer.put(key)
        key_range = kv_pb2.KeyRange(prefix=b"b")
        reply = await writer.ask(kv_pb2.DeleteRangeRequest(range=key_range))
        assert (reply.header.seq, reply.header.wal_id) == (5, 5)
        assert (reply.header.epoch, reply.header.role) == (1, kv_pb2.ROLE_WRITER)
        assert reply.durability == DURABLE
        assert await keys(writer) == [b"a", b"c"]
        assert not (await writer.get(b"ba")).found
        await writer.put(b"b", b"new")
        assert (await writer.get(b"b")).value == b"new"
        assert (await writer.ask(kv_pb2.DeleteRangeRequest(all=True))).header.seq == 7
        assert await keys(writer) == []


async def test_range_delete_may_be_acknowledged_from_memory() -> None:
    """It rests on nothing, so it is ordered and answered at once, as a put is."""
    async with serving() as writer:
        await writer.put(b"a")
        writer.store.is_holding = True
        key_range = kv_pb2.KeyRange(start=b"a")
        answer = writer.begin(kv_pb2.DeleteRangeRequest(range=key_range, durability=MEMORY))
        assert isinstance(answer, kv_pb2.DeleteRangeReply)
        assert (answer.header.seq, answer.durability) == (2, MEMORY)
        assert not answer.header.HasField("wal_id")
        assert (await writer.get(b"a")).found
        assert not (await writer.get(b"a", UNCOMMITTED)).found


@pytest.mark.parametrize("durability", [DURABLE, MEMORY])
async def test_empty_range_delete_changes_nothing(durability: Any) -> None:
    """What deletes no key that there could be succeeds, needs no object, and tells the view."""
    async with serving() as writer:
        await writer.put(b"a")
        key_range = kv_pb2.KeyRange(start=b"a", end=b"a")
        reply = await writer.ask(kv_pb2.DeleteRangeRequest(range=key_range, durability=durability))
        assert (reply.header.seq, reply.durability) == (1, durability)
        assert await keys(writer) == [b"a"]
        assert writer.engine.log.objects_written == 1


async def test_adds_answer_with_the_new_values() -> None:
    """Each add sees what stands before it in its batch; the reply has one value for each add."""
    async with serving() as writer:
        await writer.put(b"n", counter(40))
        changes = [add(b"n", 2), put(b"other"), add(b"m", -1), delete(b"n"), add(b"n", 5)]
        changes += [add(b"zero", 0)]
        reply = await writer.ask(kv_pb2.WriteRequest(changes=changes))
        assert list(reply.counters) == [42, -1, 5, 0]
        assert (reply.header.seq, reply.durability) == (2, DURABLE)
        assert (await writer.get(b"n")).value == counter(5)
        assert (await writer.get(b"m")).value == counter(-1)


async def test_batch_of_all_kinds_is_one_commit() -> None:
    """Changes of all kinds are applied in their order, under one number."""
    async with serving() as writer:
        for key in (b"a", b"b"):
            await writer.put(key)
        changes = [put(b"c", b"1"), delete_range(start=b"a"), put(b"b", b"2"), add(b"n", 1)]
        reply = await writer.ask(kv_pb2.WriteRequest(changes=changes))
        (found,) = await writer.scan()
        assert [(entry.key, entry.seq) for entry in found.entries] == [(b"b", 3), (b"n", 3)]
        assert (reply.header.seq, list(reply.counters)) == (3, [1])


@pytest.mark.parametrize(
    ("value", "delta", "error"),
    [
        (b"1234567", 1, NotACounter),
        (b"", 1, NotACounter),
        (b"123456789", 1, NotACounter),
        (counter(2**63 - 1), 1, CounterOverflow),
        (counter(-(2**63)), -1, CounterOverflow),
    ],
)
async def test_add_that_is_refused_applies_nothing(
    value: bytes, delta: int, error: type[Exception]
) -> None:
    """Where one add is refused nothing of its commit is applied, before it and after it."""
    async with serving() as writer:
        await writer.put(b"n", value)
        changes = [put(b"a"), add(b"n", delta), put(b"b")]
        with pytest.raises(error):
            await writer.ask(kv_pb2.WriteRequest(changes=changes))
        assert await keys(writer) == [b"n"]
        assert (await writer.get(b"n")).seq == 1
        assert writer.engine.log.objects_written == 1


async def test_transaction_answers_for_the_branch_it_took() -> None:
    """One result for each operation of that branch, in its order; nothing of the other happens."""
    async with serving() as writer:
        await writer.put(b"a", b"1")
        await writer.put(b"n", counter(1), ttl_ms=9_000)
        request = kv_pb2.TxnRequest(
            compares=[kv_pb2.Compare(key=b"a", value=b"1")],
            then=[change(put(b"a", b"2")), get(b"a"), change(add(b"n", 2)), get(b"n"), get(b"x")],
            otherwise=[get(b"a"), change(put(b"no"))],
        )
        reply = await writer.ask(request)
        expires = (await writer.get(b"n")).expire_at_ms
        assert reply.succeeded
        assert expires > 0
        assert list(reply.results) == [
            kv_pb2.TxnResult(),
            kv_pb2.TxnResult(get=kv_pb2.GetReply(found=True, value=b"1", seq=1)),
            kv_pb2.TxnResult(counter=3),
            kv_pb2.TxnResult(
                get=kv_pb2.GetReply(found=True, value=counter(1), seq=2, expire_at_ms=expires)
            ),
            kv_pb2.TxnResult(get=kv_pb2.GetReply()),
        ]
        assert [result.WhichOneof("result") for result in reply.results] == [
            None,
            "get",
            "counter",
            "get",
            "get",
        ]
        assert (reply.header.seq, reply.header.wal_id, reply.durability) == (3, 3, DURABLE)
        failed = await writer.ask(request)
        assert not failed.succeeded
        assert failed.results[0].get.value == b"2"
        assert failed.header.seq == 4
        assert await keys(writer) == [b"a", b"n", b"no"]


async def test_counter_of_zero_is_told() -> None:
    """A result of zero is a result: it is not taken for the absence of one."""
    async with serving() as writer:
        reply = await writer.ask(kv_pb2.TxnRequest(then=[change(add(b"n", 0))]))
        assert reply.results[0].WhichOneof("result") == "counter"
        assert (await writer.get(b"n")).value == counter(0)


async def test_transaction_without_changes_tells_its_view() -> None:
    """Without a change there is no commit: the header is that of the state that was read."""
    async with serving() as writer:
        await writer.put(b"a", b"1")
        reply = await writer.ask(kv_pb2.TxnRequest(then=[get(b"a")]))
        assert (reply.header.seq, reply.header.wal_id, reply.durability) == (1, 1, DURABLE)
        assert reply.results[0].get.value == b"1"
        assert writer.engine.log.objects_written == 1
        assert (await writer.put(b"b")).header.seq > reply.header.seq


async def test_transaction_shows_nothing_that_a_crash_takes_back() -> None:
    """It reads the newest state, and is answered when all of that is durable."""
    async with serving() as writer:
        writer.store.is_holding = True
        await writer.put(b"a", b"1", durability=MEMORY)
        answer = asyncio.create_task(writer.ask(kv_pb2.TxnRequest(then=[get(b"a")])))
        held = await writer.store.arrived(1)
        await quiesce()
        assert not answer.done()
        held.release()
        reply = await answer
        assert (reply.results[0].get.value, reply.header.seq) == (b"1", 1)


NOT_FROM_MEMORY: dict[str, Message] = {
    "conditional put": kv_pb2.PutRequest(key=b"k", precondition=kv_pb2.Precondition(absent=True)),
    "conditional delete": kv_pb2.DeleteRequest(
        key=b"old", precondition=kv_pb2.Precondition(present=True)
    ),
    "add": kv_pb2.WriteRequest(changes=[add(b"n")]),
    "transaction of puts": kv_pb2.TxnRequest(then=[change(put(b"k"))]),
    "transaction that reads": kv_pb2.TxnRequest(then=[get(b"k"), change(put(b"k"))]),
    "transaction that compares": kv_pb2.TxnRequest(
        compares=[kv_pb2.Compare(key=b"k", seq=0)], then=[change(put(b"k"))]
    ),
}


@pytest.mark.parametrize("what", NOT_FROM_MEMORY)
async def test_what_is_judged_is_never_acknowledged_from_memory(what: str) -> None:
    """A condition, an add or a transaction at MEMORY is answered when durable, and says so."""
    async with serving() as writer:
        await writer.put(b"old")
        writer.store.is_holding = True
        request = type(NOT_FROM_MEMORY[what])()
        request.CopyFrom(NOT_FROM_MEMORY[what])
        request.durability = MEMORY  # type: ignore[attr-defined]  # all of them have it
        answer = asyncio.create_task(writer.ask(request))
        held = await writer.store.arrived(1)
        await quiesce()
        assert not answer.done()
        held.release()
        reply = await answer
        assert (reply.durability, reply.header.wal_id) == (DURABLE, 2)


async def test_transaction_that_reads_too_much_is_refused() -> None:
    """What would not fit into one reply is refused as a whole: its changes are not applied."""
    async with serving() as writer:
        await writer.put(b"a", b"x" * MIB)
        fits = await writer.ask(kv_pb2.TxnRequest(then=[get(b"a")] * 3))
        assert len(fits.results) == 3
        with pytest.raises(ReplyTooLarge):
            await writer.ask(kv_pb2.TxnRequest(then=[change(put(b"b")), *[get(b"a")] * 4]))
        assert not (await writer.get(b"b")).found


async def test_comparison_of_a_range_has_a_bound() -> None:
    """A range full of deleted keys is refused when the setting is passed, and not before."""
    limits = LimitSettings(compare_count_max=3)
    empty = kv_pb2.Compare(range_empty=kv_pb2.KeyRange(prefix=b"a"))
    async with serving(limits=limits) as writer:
        for number in range(3):
            await writer.put(b"a%d" % number)
            await writer.delete(b"a%d" % number)
        reply = await writer.ask(kv_pb2.TxnRequest(compares=[empty], then=[get(b"a")]))
        assert reply.succeeded
        await writer.put(b"a3")
        await writer.delete(b"a3")
        with pytest.raises(RangeTooCostly):
            await writer.ask(kv_pb2.TxnRequest(compares=[empty], then=[change(put(b"b"))]))
        assert not (await writer.get(b"b")).found
        await writer.put(b"a1")
        reply = await writer.ask(kv_pb2.TxnRequest(compares=[empty], otherwise=[get(b"a1")]))
        assert not reply.succeeded
