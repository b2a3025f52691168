"""A session against calls one after another: writes of all kinds, the same results and state."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from google.protobuf.message import Message

from shalekv.errors import ShaleError
from shalekv.v1 import kv_pb2
from tests.kit.serving.messages import (
    absent,
    add,
    change,
    delete,
    delete_range,
    get,
    key_header,
    present,
    put,
)
from tests.kit.serving.roles import MEMORY, Serving, pairs, serving
from tests.kit.states import counter
from tests.unit.rpc.sessions import DrivenSession, described, driven, operation, operations

MIB = 1 << 20
KEYS = [b"a", b"b", b"c"]
COUNT = 200


def drawn_all(random: Random) -> list[Message]:
    """Writes of all kinds; some are refused, some come again with the same idempotency key.

    What may be refused is not repeated: a repeat that comes while the first is on its way is
    refused as that is, one that comes later is judged anew.
    """
    requests: list[Message] = []
    keyed: list[Message] = []
    for number in range(COUNT):
        if keyed and random.random() < 0.2:
            requests.append(random.choice(keyed))
            continue
        is_plain = random.random() < 0.3
        header = key_header(b"%d" % number) if is_plain else None
        requests.append(plain(random, header) if is_plain else judged(random))
        keyed += requests[-1:] * is_plain
    return requests


def plain(random: Random, header: kv_pb2.RequestHeader | None) -> Message:
    """A write that is never refused."""
    key = random.choice(KEYS)
    requests: list[Message] = [
        kv_pb2.PutRequest(header=header, key=key, value=counter(7)),
        kv_pb2.DeleteRequest(header=header, key=key),
        kv_pb2.DeleteRangeRequest(header=header, range=kv_pb2.KeyRange(prefix=key)),
        kv_pb2.WriteRequest(header=header, changes=[put(key, b"no counter"), delete(b"a")]),
    ]
    return random.choice(requests)


def judged(random: Random) -> Message:
    """A write that depends on what is there."""
    key = random.choice(KEYS)
    condition = random.choice([absent(), present()])
    some = [put(key, counter(random.randrange(5))), add(key, random.randrange(-3, 3))]
    some += [delete(key), delete_range(start=key), put(key, b"no counter")]
    picked = random.sample(some, random.randrange(1, 4))
    requests: list[Message] = [
        kv_pb2.PutRequest(key=key, value=counter(7), precondition=condition),
        kv_pb2.DeleteRequest(key=key, precondition=condition),
        kv_pb2.WriteRequest(changes=[add(key), *picked]),
        kv_pb2.TxnRequest(
            compares=[kv_pb2.Compare(key=key, exists=random.random() < 0.5)],
            then=[*map(change, picked), get(key)],
            otherwise=[get(random.choice(KEYS)), change(put(key, counter(1)))],
        ),
    ]
    return random.choice(requests)


async def one_after_another(writer: Serving, requests: list[Message]) -> list[Any]:
    """Outcomes of calls of which each is answered before the next is sent."""
    outcomes = []
    for number, request in enumerate(requests):
        result = kv_pb2.SessionResult(id=number)
        try:
            reply = await writer.ask(request)
        except ShaleError as error:
            result.error.CopyFrom(described(error))
        else:
            kind = operation(0, request).WhichOneof("operation") or ""
            getattr(result, kind).CopyFrom(reply)
        outcomes.append(comparable(result))
    return outcomes


async def in_messages(
    session: DrivenSession, requests: list[Message], writer: Serving, random: Random
) -> list[Any]:
    """Outcomes of the same requests in a session, in messages of random length."""
    sent = operations(*requests)
    while sent:
        count = random.randrange(1, 20)
        session.send(*sent[:count])
        sent = sent[count:]
        for _ in range(random.randrange(30)):
            await asyncio.sleep(0)
        for held in writer.store.waiting[: random.randrange(3)]:
            held.release()
    writer.store.let_go()
    found = await session.rest()
    return [comparable(found[number]) for number in range(COUNT)]


def comparable(result: kv_pb2.SessionResult) -> kv_pb2.SessionResult:
    """A result but for the object in which it landed and its database."""
    kind = result.WhichOneof("result") or ""
    if kind != "error":
        reply = getattr(result, kind)
        reply.header.ClearField("wal_id")
        reply.header.ClearField("database_id")
    return result


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("seed", range(10))
async def test_session_does_what_calls_one_after_another_do(seed: int, k: int) -> None:
    """Refused, repeated, counted, and at the door: results are the same, and so is the state."""
    random = Random(f"session/{seed}")
    requests = drawn_all(random)
    filler = kv_pb2.PutRequest(key=b"filler", value=b"x" * MIB, durability=MEMORY)
    async with serving() as writer:
        writer.begin(filler)
        expected = await one_after_another(writer, requests)
        state = pairs(await writer.scan())
        assert 10 < sum(each.WhichOneof("result") == "error" for each in expected) < 150
    settings: dict[str, Any] = {
        "queued_bytes_max": MIB,
        "queue_wait_ms": 60_000,
        "max_parallel_writes": k,
    }
    async with serving(**settings) as writer, driven(writer.kv) as session:
        writer.store.is_holding = True
        writer.begin(filler)
        outcomes = await in_messages(session, requests, writer, random)
        assert outcomes == expected
        assert pairs(await writer.scan()) == state
