"""Clients: they write and read at writers at random, and repeat what they were not told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Any

from shalekv.errors import (
    ConditionFailed,
    CounterOverflow,
    KeyExpired,
    NotACounter,
    OutcomeUnknown,
    Overloaded,
    Stopping,
    StoreUnavailable,
)
from shalekv.roles.service import Call
from shalekv.roles.writer_kv import WriterKv
from shalekv.v1 import kv_pb2
from tests.sim.cluster import Cluster
from tests.sim.errors import NodeCrashed
from tests.sim.history import (
    Attempt,
    Got,
    Operation,
    Outcome,
    ReadOp,
    Refusal,
    ScanOp,
    Told,
    WriteRequest,
)
from tests.sim.model import watched_keys
from tests.sim.requests import KEYS, Requests
from tests.sim.script import Gate

REPEATS_MAX = 4
REPEATS_AT_ONCE = 20  # when all are repeated
TIMEOUTS_MS = (50.0, 2_000.0, 30_000.0)
REFUSED = (ConditionFailed, NotACounter, CounterOverflow)
# A refusal, or a read, that could not be confirmed says nothing; nothing was written either.
NOT_APPLIED = (Stopping, Overloaded, StoreUnavailable)
SETTLED = (Outcome.ACKNOWLEDGED, Outcome.IN_MEMORY, Outcome.REFUSED)
_METHODS: dict[type, Callable[[Any], Callable[[Any, Call], Any]]] = {
    kv_pb2.PutRequest: lambda kv: kv.put,
    kv_pb2.DeleteRequest: lambda kv: kv.delete,
    kv_pb2.DeleteRangeRequest: lambda kv: kv.delete_range,
    kv_pb2.WriteRequest: lambda kv: kv.write,
    kv_pb2.TxnRequest: lambda kv: kv.txn,
}


class Callers:
    """The clients of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        """None of them does anything yet."""
        self.cluster = cluster
        self.world = cluster.world
        self.history = cluster.history
        self.known: dict[bytes, Got] = {}  # the newest that any of them has seen of each key

    async def client(self, number: int) -> None:
        """Use writers at random, until cancelled."""
        random = self.world.random_for(f"client {number}")
        requests = Requests(random, self.known)
        while True:
            await self.world.sleep_ms(random.choice([0.0, 20.0, 1_000.0]) * self.cluster.pace)
            name = await self.any_writer(random)
            async with asyncio.TaskGroup() as tasks:  # what is asked at once may commit at once
                for _ in range(random.choice([1, 2, 4])):
                    drawn = random.random()
                    if drawn < 0.8:
                        tasks.create_task(self.change(random, requests, name))
                    elif drawn < 0.96:
                        tasks.create_task(self.read(name, random.choice(KEYS), drawn < 0.88))
                    else:
                        tasks.create_task(self.scan(name))

    async def any_writer(self, random: Random) -> str:
        """One of those that serve, as soon as there is one; mostly the newest."""
        cluster = self.cluster
        while not (names := [name for name in cluster.writers if name not in cluster.avoided]):
            await cluster.serving.wait()
            await self.world.sleep_ms(100.0 * cluster.pace)
        if random.random() < 0.6:
            return max(names, key=lambda name: cluster.writers[name].epoch)
        return random.choice(names)

    def begin(self, draw: Callable[[int], WriteRequest], random: Random) -> Operation:
        """The next operation, with an idempotency key in most cases."""
        number = len(self.history.operations) + 1
        operation = Operation(number, draw(number))
        if random.random() < 0.75:
            now_ms = self.world.store.clock_ms()
            key = bytearray(now_ms.to_bytes(6, "big") + random.randbytes(10))
            key[6], key[8] = 0x70 | key[6] & 0xF, 0x80 | key[8] & 0x3F  # a UUID of version 7
            operation.request.header.idempotency_key = bytes(key)
        self.history.operations.append(operation)
        return operation

    async def change(self, random: Random, requests: Requests, name: str) -> None:
        """One operation, at any writer that serves by then, until it is told or given up."""
        operation = self.begin(requests.draw, random)
        for _ in range(REPEATS_MAX):
            timeout_ms = random.choice(TIMEOUTS_MS)
            async with asyncio.TaskGroup() as tasks:
                copies = 2 if operation.key and random.random() < 0.1 else 1
                for _ in range(copies):
                    tasks.create_task(self.attempt(operation, name, timeout_ms))
            is_settled = any(each.outcome in SETTLED for each in operation.attempts)
            if not operation.key or random.random() < (0.9 if is_settled else 0.1):
                return
            await self.world.sleep_ms(random.choice([0.0, 20.0, 1_000.0]))
            name = await self.any_writer(random)

    async def contend(self, random: Random, name: str, gate: Gate, count: int) -> None:
        """Ask for what rests on the state, then change that while the first is on its way.

        `gate` holds the object that it is in.
        """
        requests = Requests(random, self.known)
        first = self.begin(requests.draw_resting, random)
        async with asyncio.TaskGroup() as tasks:
            if random.random() < 0.3:
                before = self.begin(partial(requests.draw_plain, keys=KEYS), random)
                tasks.create_task(self.attempt(before, name, TIMEOUTS_MS[-1]))
            tasks.create_task(self._attempt_twice(first, name, random))
            await self.cluster.reached(gate)
            for _ in range(count):
                plain = partial(requests.draw_plain, keys=watched_keys(first.request, KEYS))
                other = self.begin(plain, random)
                tasks.create_task(self.attempt(other, name, random.choice(TIMEOUTS_MS)))

    async def _attempt_twice(self, operation: Operation, name: str, random: Random) -> None:
        await self.attempt(operation, name, TIMEOUTS_MS[-1])
        if operation.key and random.random() < 0.7:
            await self.attempt(operation, name, TIMEOUTS_MS[-1])

    async def ask_once(self, random: Random, name: str) -> None:
        """Ask for what reads the state, and do not repeat it."""
        operation = self.begin(Requests(random, self.known).draw_reading, random)
        await self.attempt(operation, name, TIMEOUTS_MS[-1])

    async def attempt(self, operation: Operation, name: str, timeout_ms: float) -> None:
        """Send the request of an operation once, and take down what came back."""
        writer = self.cluster.writers.get(name)
        if writer is None:  # it has ended a moment ago
            return
        attempt = Attempt(writer.epoch, self.world.loop.now_us)
        operation.attempts.append(attempt)
        method = _METHODS[type(operation.request)](writer.kv)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                reply = await self._ask(name, lambda: method(operation.request, Call()))
        except (TimeoutError, NodeCrashed):
            return
        except (OutcomeUnknown, KeyExpired):
            attempt.outcome = Outcome.UNKNOWN
        except NOT_APPLIED:
            attempt.outcome = Outcome.NOT_APPLIED
        except REFUSED as error:
            attempt.outcome = Outcome.REFUSED
            attempt.answer = Refusal(error.reason, getattr(error, "found_seq", None))
        else:
            in_memory = reply.durability == kv_pb2.DURABILITY_MEMORY
            attempt.outcome = Outcome.IN_MEMORY if in_memory else Outcome.ACKNOWLEDGED
            attempt.answer = told(reply)
            attempt.seq = reply.header.seq
            attempt.wal_id = reply.header.wal_id if reply.header.HasField("wal_id") else None
            match operation.request:
                case kv_pb2.PutRequest(key=key, value=value):
                    self._see(key, Got(value, attempt.seq))
                case kv_pb2.DeleteRequest(key=key):
                    self._see(key, Got(None, attempt.seq))
        attempt.replied_us = self.world.loop.now_us

    async def read(self, name: str, key: bytes, is_linearizable: bool) -> None:  # noqa: FBT001
        """Get one key."""
        level = "READ_LEVEL_LINEARIZABLE" if is_linearizable else "READ_LEVEL_COMMITTED"
        request = kv_pb2.GetRequest(key=key)
        request.header.read_level = kv_pb2.ReadLevel.Value(level)
        writer, invoked_us = self.cluster.writers.get(name), self.world.loop.now_us
        if writer is None:  # it has ended a moment ago
            return
        kv = writer.kv
        reply = await self._answer(name, lambda: kv.get(request, Call()))
        if reply is None:
            return
        got = _got(reply)
        self._see(key, got)
        epoch, now_us = writer.epoch, self.world.loop.now_us
        read = ReadOp(key, is_linearizable, epoch, invoked_us, now_us, got, reply.header.seq)
        self.history.reads.append(read)

    async def scan(self, name: str) -> None:
        """Scan everything."""
        writer, invoked_us = self.cluster.writers.get(name), self.world.loop.now_us
        if writer is None:
            return
        kv = writer.kv
        found = await self._answer(name, lambda: _scanned(kv))
        if found is not None:
            seq, entries = found
            now_us = self.world.loop.now_us
            self.history.scans.append(ScanOp(writer.epoch, invoked_us, now_us, seq, entries))

    async def put_one(self, name: str) -> None:
        """Put a key and be told so (I13)."""
        number = len(self.history.operations) + 1
        operation = Operation(number, kv_pb2.PutRequest(key=KEYS[0], value=b"v%d" % number))
        self.history.operations.append(operation)
        await self.attempt(operation, name, TIMEOUTS_MS[-1])
        if not operation.is_acknowledged:
            raise AssertionError(f"I13: in peace {operation} ended as {operation.attempts}")

    async def read_all(self, name: str) -> None:
        """Get every key, and scan."""
        for key in KEYS:
            await self.read(name, key, True)
        await self.scan(name)

    async def repeat_all(self, name: str) -> None:
        """Send every request that has an idempotency key once more."""
        keyed = [operation for operation in self.history.operations if operation.key]
        for first in range(0, len(keyed), REPEATS_AT_ONCE):
            async with asyncio.TaskGroup() as tasks:
                for operation in keyed[first : first + REPEATS_AT_ONCE]:
                    tasks.create_task(self.attempt(operation, name, TIMEOUTS_MS[-1]))

    def _see(self, key: bytes, got: Got) -> None:
        if got.seq > self.known.get(key, Got()).seq:
            self.known[key] = got

    async def _answer(self, name: str, ask: Callable[[], Any]) -> Any:
        """What a read is answered; None: nothing, in time."""
        try:
            async with asyncio.timeout(TIMEOUTS_MS[-1] / 1000):
                return await self._ask(name, ask)
        except (TimeoutError, NodeCrashed, Stopping, StoreUnavailable):
            return None

    async def _ask(self, name: str, ask: Callable[[], Any]) -> Any:
        """The answer of a writer, computed on its node."""

        async def run() -> Any:
            answer = ask()
            return await answer if isinstance(answer, Awaitable) else answer

        return await self.world.node(name).run(run())


def told(reply: Any) -> Told:
    """A reply to a write as the model gives it."""
    match reply:
        case kv_pb2.WriteReply():
            return Told(results=tuple(reply.counters))
        case kv_pb2.TxnReply():
            return Told(reply.succeeded, tuple(map(_result, reply.results)))
        case _:
            return Told()


def _result(result: kv_pb2.TxnResult) -> Got | int | None:
    match result.WhichOneof("result"):
        case "get":
            return _got(result.get)
        case "counter":
            return result.counter
        case _:
            return None


def _got(reply: kv_pb2.GetReply) -> Got:
    return Got(reply.value, reply.seq, reply.expire_at_ms) if reply.found else Got()


async def _scanned(kv: WriterKv) -> tuple[int, tuple[tuple[bytes, Got], ...]]:
    """The number of the view, and all that is in it."""
    entries: list[tuple[bytes, Got]] = []
    seq = 0
    async for reply in kv.scan(kv_pb2.ScanRequest(), Call()):
        seq = reply.header.seq
        entries += [(e.key, Got(e.value, e.seq, e.expire_at_ms)) for e in reply.entries]
    return seq, tuple(entries)
