"""Calls that are cancelled at any moment: they harm no other, and nothing leaks."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from google.protobuf.message import Message

from shalekv.errors import ConditionFailed
from shalekv.v1 import kv_pb2
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import quiesce
from tests.kit.seeds import random_of
from tests.kit.serving.messages import absent, add, change, delete_range, get, key_header, put
from tests.kit.serving.roles import LINEARIZABLE, MEMORY, Serving, header, pairs, serving
from tests.kit.states import counter

KIB = 1 << 10
MIB = 1 << 20
CANCELLED_COUNT = 300  # for each seed
KEYS = [b"a", b"b", b"c", b"d"]


class Copies:
    """Copies of one request that counts up: applied once at most, whoever waits for it."""

    def __init__(self, number: int) -> None:
        self.counter_key = b"counter %d" % number
        self.request = kv_pb2.WriteRequest(
            header=key_header(b"%d" % number), changes=[add(self.counter_key)]
        )
        self.replies: list[kv_pb2.WriteReply] = []

    async def check(self, writer: Serving) -> None:
        """It was applied once, or not at all if nobody was told so; all were told the same."""
        found = await writer.get(self.counter_key)
        assert found.value == (counter(1) if found.found else b"")
        assert found.found or not self.replies
        self.replies.append(await writer.ask(self.request))
        assert {each.SerializeToString(deterministic=True) for each in self.replies} == {
            self.replies[0].SerializeToString(deterministic=True)
        }
        assert (await writer.get(self.counter_key)).value == counter(1)


class Callers:
    """A writer whose store answers at random, and callers who come and go."""

    def __init__(self, writer: Serving, random: Random) -> None:
        self.writer = writer
        self.random = random
        self.calls: dict[asyncio.Task[Any], Message] = {}
        self.copies: dict[bytes, Copies] = {}
        self.acknowledged = dict.fromkeys(KEYS, 0)  # the greatest number of a put
        self.cancelled = self.answered = 0

    def drawn(self) -> Message:
        random = self.random
        key = random.choice(KEYS)
        value = bytes(random.choice([10, 10, 100 * KIB]))
        number = max(0, len(self.copies) - random.randrange(4))
        copies = self.copies.setdefault(b"%d" % number, Copies(number))
        requests: list[Message] = [
            kv_pb2.PutRequest(key=key, value=value),
            kv_pb2.PutRequest(key=key, value=value, durability=MEMORY),
            kv_pb2.PutRequest(key=key, value=value, precondition=absent()),
            kv_pb2.DeleteRequest(key=b"x" + key),
            kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(prefix=b"x" + key)),
            kv_pb2.WriteRequest(changes=[put(b"x" + key, value), delete_range(start=b"y")]),
            kv_pb2.TxnRequest(then=[get(key), change(add(b"n"))]),
            kv_pb2.TxnRequest(compares=[kv_pb2.Compare(key=key, exists=True)], then=[get(key)]),
            kv_pb2.GetRequest(key=key, header=header(LINEARIZABLE)),
            kv_pb2.BatchGetRequest(keys=KEYS),
            *[copies.request] * 3,
        ]
        return random.choice(requests)

    async def step(self) -> None:
        """Callers come, the store answers some uploads, others run for a while; callers go."""
        random = self.random
        for _ in range(random.randrange(4)):
            request = self.drawn()
            self.calls[asyncio.create_task(self.writer.ask(request))] = request
        for held in self.writer.store.waiting:
            if random.random() < 0.3:
                held.release()
        for _ in range(random.randrange(6)):
            await asyncio.sleep(0)
        self.note_calls()
        if self.calls:
            task = random.choice(list(self.calls))
            task.cancel()
            del self.calls[task]
            self.cancelled += 1

    def note_calls(self) -> None:
        """Calls that nobody cancelled and that have ended were answered."""
        for task, request in [each for each in self.calls.items() if each[0].done()]:
            del self.calls[task]
            error = task.exception()
            assert error is None or isinstance(error, ConditionFailed), request
            if error is None:
                self.note(request, task.result())

    def note(self, request: Any, reply: Any) -> None:
        self.answered += 1
        if isinstance(request, kv_pb2.PutRequest):
            before = self.acknowledged[request.key]
            self.acknowledged[request.key] = max(before, reply.header.seq)
        if request.header.idempotency_key:
            self.copies[request.header.idempotency_key].replies.append(reply)

    async def finish(self) -> None:
        self.writer.store.let_go()
        async with asyncio.timeout(30):
            await asyncio.gather(*self.calls, return_exceptions=True)
            self.note_calls()

    async def check(self) -> None:
        """Nothing is left of anybody, the log goes on, and all that was told is true."""
        writer = self.writer
        await quiesce()
        writer.check_idle()
        assert len(writer.engine.log.overlay) == 0
        assert writer.engine.log.objects_in_flight == 0
        assert writer.engine.prefix.waiting_count == 0
        assert (await writer.put(b"after")).header.wal_id > 0
        for copies in self.copies.values():
            await copies.check(writer)
        for key, seq in self.acknowledged.items():
            assert (await writer.get(key)).seq >= seq > 0


@pytest.mark.parametrize("seed", range(3))
async def test_cancelled_calls_harm_nobody(seed: int) -> None:
    """300 cancellations for each seed: all others are answered, and all that was told is true."""
    random = random_of(f"cancellations/{seed}")
    database = await Database.created(seed)
    k = random.choice([1, 2, 4])
    async with serving(
        database, queued_bytes_max=MIB, queue_wait_ms=60_000, max_parallel_writes=k
    ) as writer:
        writer.store.is_holding = True
        callers = Callers(writer, random)
        while callers.cancelled < CANCELLED_COUNT:
            await callers.step()
        await callers.finish()
        await callers.check()
        assert callers.answered > CANCELLED_COUNT / 5
        state = pairs(await writer.scan())
    async with serving(database) as after_restart:
        assert pairs(await after_restart.scan()) == state
