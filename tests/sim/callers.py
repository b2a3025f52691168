"""Clients: they write and read at random writers, and repeat what was not acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
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
    QuorumUnavailable,
    SnapshotNotFound,
    Stopping,
    StoreUnavailable,
)
from shalekv.server.service import Call
from shalekv.server.writer_service import WriterKv
from shalekv.v1 import kv_pb2
from tests.kit.model import watched_keys
from tests.kit.serving.answers import answered, scan_of
from tests.sim.cluster import Cluster
from tests.sim.errors import NodeCrashed, Violation
from tests.sim.history import (
    Attempt,
    Got,
    Operation,
    Outcome,
    ReadOp,
    Refusal,
    ScanOp,
    WriteRequest,
    WriteResult,
)
from tests.sim.invariants.catalogue import checks
from tests.sim.network import Gate
from tests.sim.requests import KEYS, Requests


@checks(13, "writers", "database", "two_phase", "quorum")
def check_i13_one_writer_serves(
    serving: Collection[str], running: Collection[str], endings: Sequence[str]
) -> None:
    """Check that one writer runs, and that it serves; `endings` says why others ended."""
    if len(serving) != 1 or list(running) != list(serving):
        raise Violation(
            f"I13: in peace {list(serving)} serve, {list(running)} run; others ended by {endings}"
        )


@checks(13, "writers", "database", "two_phase", "quorum")
def check_i13_writes_succeed(operation: Operation) -> None:
    """A write is acknowledged."""
    last = operation.attempts[-1]
    if last.outcome is not Outcome.ACKNOWLEDGED:
        problem = f"I13: in peace {operation} ended as {operation.attempts}"
        raise Violation(problem, at_us=last.replied_us)


@checks(13, "writers", "database", "two_phase", "quorum")
def check_i13_reads_are_answered(
    writer: str, answered: tuple[int, int], asked: tuple[int, int]
) -> None:
    """Check that all gets and scans were answered."""
    if answered != asked:
        raise Violation(f"I13: in peace {writer} answers {answered} gets and scans of {asked}")


READ_TIMEOUT_MS = 30_000.0
REFUSED = (ConditionFailed, NotACounter, CounterOverflow)
# A refusal or a read that could not be confirmed has no result; nothing was written either. What a
# writer reads may be gone if it was paused until its snapshot expired (I7).
NOT_APPLIED = (Stopping, Overloaded, StoreUnavailable, SnapshotNotFound, QuorumUnavailable)
UNKNOWN = (OutcomeUnknown, KeyExpired)
UNANSWERED = (
    TimeoutError,
    NodeCrashed,
    OutcomeUnknown,
    QuorumUnavailable,
    SnapshotNotFound,
    Stopping,
    StoreUnavailable,
)
_METHODS: dict[type, Callable[[Any], Callable[[Any, Call], Any]]] = {
    kv_pb2.PutRequest: lambda kv: kv.put,
    kv_pb2.DeleteRequest: lambda kv: kv.delete,
    kv_pb2.DeleteRangeRequest: lambda kv: kv.delete_range,
    kv_pb2.WriteRequest: lambda kv: kv.write,
    kv_pb2.TxnRequest: lambda kv: kv.txn,
}


class Calls:
    """Calls to the writers of a cluster; a writer that is gone is not called."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sim = cluster.sim
        self._history = cluster.history
        self.known: dict[bytes, Got] = {}  # the newest that any client has seen of each key

    async def attempt(self, operation: Operation, name: str, timeout_ms: float) -> None:
        writer = self._cluster.writers.get(name)
        if writer is None:
            return
        attempt = Attempt(writer.epoch, self._sim.loop.now_us)
        operation.attempts.append(attempt)
        method = _METHODS[type(operation.request)](writer.kv)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                reply = await self._ask(name, lambda: method(operation.request, Call()))
        except (TimeoutError, NodeCrashed):
            return
        except UNKNOWN as error:
            attempt.outcome, attempt.reason = Outcome.UNKNOWN, error.reason
        except NOT_APPLIED as error:
            attempt.outcome, attempt.reason = Outcome.NOT_APPLIED, error.reason
        except REFUSED as error:
            attempt.outcome, attempt.reason = Outcome.REFUSED, error.reason
            attempt.answer = Refusal(error.reason, getattr(error, "found_seq", None))
        else:
            self._take_down(operation, attempt, reply)
        attempt.replied_us = self._sim.loop.now_us

    async def get(self, key: bytes, level: kv_pb2.ReadLevel.ValueType, name: str) -> None:
        writer, invoked_us = self._cluster.writers.get(name), self._sim.loop.now_us
        if writer is None:
            return
        request = kv_pb2.GetRequest(key=key, header=kv_pb2.RequestHeader(read_level=level))
        kv = writer.kv
        reply = await self._answer(name, lambda: answered(kv_pb2.GetReply, kv.get(request, Call())))
        if reply is not None:
            got, now_us = _got(reply), self._sim.loop.now_us
            self._see(key, got)
            is_linearizable = level == kv_pb2.READ_LEVEL_LINEARIZABLE
            self._history.reads.append(
                ReadOp(
                    key, is_linearizable, writer.epoch, invoked_us, now_us, got, reply.header.seq
                )
            )

    async def scan(self, name: str) -> None:
        writer, invoked_us = self._cluster.writers.get(name), self._sim.loop.now_us
        if writer is None:
            return
        kv = writer.kv
        found = await self._answer(name, lambda: _scanned(kv))
        if found is not None:
            seq, entries = found
            now_us = self._sim.loop.now_us
            self._history.scans.append(ScanOp(writer.epoch, invoked_us, now_us, seq, entries))

    def _take_down(self, operation: Operation, attempt: Attempt, reply: Any) -> None:
        in_memory = reply.durability == kv_pb2.DURABILITY_MEMORY
        attempt.outcome = Outcome.IN_MEMORY if in_memory else Outcome.ACKNOWLEDGED
        attempt.answer = result_of(reply)
        attempt.seq = reply.header.seq
        attempt.wal_id = reply.header.wal_id if reply.header.HasField("wal_id") else None
        match operation.request:
            case kv_pb2.PutRequest(key=key, value=value):
                self._see(key, Got(value, attempt.seq))
            case kv_pb2.DeleteRequest(key=key):
                self._see(key, Got(None, attempt.seq))

    def _see(self, key: bytes, got: Got) -> None:
        if got.seq > self.known.get(key, Got()).seq:
            self.known[key] = got

    async def _answer(self, name: str, ask: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(READ_TIMEOUT_MS / 1000):
                return await self._ask(name, ask)
        except UNANSWERED:
            return None

    async def _ask(self, name: str, ask: Callable[[], Any]) -> Any:
        """The answer of a writer, computed on its node."""

        async def run() -> Any:
            answer = ask()
            try:
                return await answer if isinstance(answer, Awaitable) else answer
            finally:
                del answer  # its error would hold this frame

        return await self._sim.node(name).run(run())


def result_of(reply: Any) -> WriteResult:
    """A reply to a write as the model gives it."""
    match reply:
        case kv_pb2.WriteReply():
            return WriteResult(results=tuple(reply.counters))
        case kv_pb2.TxnReply():
            return WriteResult(reply.succeeded, tuple(map(_result, reply.results)))
        case _:
            return WriteResult()


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
    async for reply in scan_of(kv, kv_pb2.ScanRequest(), Call()):
        seq = reply.header.seq
        entries += [(e.key, Got(e.value, e.seq, e.expire_at_ms)) for e in reply.entries]
    return seq, tuple(entries)


ATTEMPTS_MAX = 4
TTL_SHARES = (0.05, 0.2, 0.6)  # shares of the puts in a run that expire
REPEATS_AT_ONCE = 20  # when all are repeated
TIMEOUTS_MS = (50.0, 2_000.0, 30_000.0)
PATIENT_MS = TIMEOUTS_MS[-1]
SETTLED = (Outcome.ACKNOWLEDGED, Outcome.IN_MEMORY, Outcome.REFUSED)


class Callers:
    """The clients of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sim = cluster.sim
        self._operations = cluster.history.operations
        self._calls = Calls(cluster)
        self._ttl_share = cluster.sim.random_for("expiry").choice(TTL_SHARES)

    async def client(self, number: int) -> None:
        random = self._sim.random_for(f"client {number}")
        while True:
            await self._sim.sleep_ms(random.choice([0.0, 20.0, 1_000.0]) * self._cluster.pace)
            name = await self._any_writer(random)
            async with asyncio.TaskGroup() as tasks:  # concurrent requests may commit together
                for _ in range(random.choice([1, 2, 4])):
                    key, drawn = random.choice(KEYS), random.random()
                    if drawn < 0.8:
                        tasks.create_task(self._change(random, name))
                    elif drawn < 0.88:
                        level = kv_pb2.READ_LEVEL_COMMITTED
                        tasks.create_task(self._calls.get(key, level, name))
                    elif drawn < 0.96:
                        level = kv_pb2.READ_LEVEL_LINEARIZABLE
                        tasks.create_task(self._calls.get(key, level, name))
                    else:
                        tasks.create_task(self._calls.scan(name))

    async def contend(self, random: Random, name: str, gate: Gate, count: int) -> None:
        """Ask for what rests on the state, then change that while the first is on its way.

        `gate` holds the object that it is in.
        """
        requests = self._requests(random)
        first = self._begin(requests.draw_resting, random)
        async with asyncio.TaskGroup() as tasks:
            if random.random() < 0.3:
                before = self._begin(partial(requests.draw_plain, keys=KEYS), random)
                tasks.create_task(self._calls.attempt(before, name, PATIENT_MS))
            tasks.create_task(self._attempt_twice(first, name, random))
            await self._cluster.reached(gate)
            for _ in range(count):
                plain = partial(requests.draw_plain, keys=watched_keys(first.request, KEYS))
                other = self._begin(plain, random)
                tasks.create_task(self._calls.attempt(other, name, random.choice(TIMEOUTS_MS)))

    async def ask_once(self, random: Random, name: str) -> None:
        """Ask for what reads the state, and do not repeat it."""
        operation = self._begin(self._requests(random).draw_reading, random)
        await self._calls.attempt(operation, name, PATIENT_MS)

    async def write_once(self, random: Random, name: str) -> None:
        """Write what does not rest on the state, often only to memory, and do not repeat it."""
        operation = self._begin(partial(self._requests(random).draw_plain, keys=KEYS), random)
        if random.random() < 0.4:
            operation.request.durability = kv_pb2.DURABILITY_MEMORY
        await self._calls.attempt(operation, name, PATIENT_MS)

    async def put_one(self, name: str) -> None:
        """Put a key; it must be acknowledged (I13)."""
        check_i13_writes_succeed(await self.try_to_put(name))

    async def try_to_put(self, name: str) -> Operation:
        operation = self._begin(lambda n: kv_pb2.PutRequest(key=KEYS[0], value=b"v%d" % n), None)
        await self._calls.attempt(operation, name, PATIENT_MS)
        return operation

    async def read_all(self, name: str) -> None:
        """Get every key, and scan (I13)."""
        history = self._cluster.history
        before = len(history.reads), len(history.scans)
        for key in KEYS:
            await self._calls.get(key, kv_pb2.READ_LEVEL_LINEARIZABLE, name)
        await self._calls.scan(name)
        answered = len(history.reads) - before[0], len(history.scans) - before[1]
        check_i13_reads_are_answered(name, answered, (len(KEYS), 1))

    async def repeat_all(self, name: str) -> None:
        """Send every request that has an idempotency key once more."""
        keyed = [operation for operation in self._operations if operation.key]
        for first in range(0, len(keyed), REPEATS_AT_ONCE):
            async with asyncio.TaskGroup() as tasks:
                for operation in keyed[first : first + REPEATS_AT_ONCE]:
                    tasks.create_task(self._calls.attempt(operation, name, PATIENT_MS))

    async def _change(self, random: Random, name: str) -> None:
        """Run one operation at any writer that serves, until it is settled or given up.

        Sometimes it is sent twice at once, and sometimes repeated although it was acknowledged.
        """
        operation = self._begin(self._requests(random).draw, random)
        for _ in range(ATTEMPTS_MAX):
            timeout_ms = random.choice(TIMEOUTS_MS)
            names = [name]
            if operation.key and random.random() < 0.1:
                names.append(random.choice([name, await self._any_writer(random)]))
            async with asyncio.TaskGroup() as tasks:
                for each in names:
                    tasks.create_task(self._calls.attempt(operation, each, timeout_ms))
            is_settled = any(attempt.outcome in SETTLED for attempt in operation.attempts)
            if not operation.key or random.random() < (0.9 if is_settled else 0.1):
                return
            await self._sim.sleep_ms(random.choice([0.0, 20.0, 1_000.0]))
            name = await self._any_writer(random)

    async def _attempt_twice(self, operation: Operation, name: str, random: Random) -> None:
        await self._calls.attempt(operation, name, PATIENT_MS)
        if operation.key and random.random() < 0.7:
            await self._calls.attempt(operation, name, PATIENT_MS)

    async def _any_writer(self, random: Random) -> str:
        """One of those that serve, as soon as there is one; mostly the newest."""
        cluster = self._cluster
        while not (names := [name for name in cluster.writers if name not in cluster.avoided]):
            await cluster.serving.wait()
            await self._sim.sleep_ms(100.0 * cluster.pace)
        if random.random() < 0.6:
            return max(names, key=lambda name: cluster.writers[name].epoch)
        return random.choice(names)

    def _begin(self, draw: Callable[[int], WriteRequest], random: Random | None) -> Operation:
        """The next operation, in most cases with an idempotency key if `random` draws one."""
        number = len(self._operations) + 1
        operation = Operation(number, draw(number))
        if random is not None and random.random() < 0.75:
            key = bytearray(self._sim.store.clock_ms().to_bytes(6, "big") + random.randbytes(10))
            key[6], key[8] = 0x70 | key[6] & 0xF, 0x80 | key[8] & 0x3F  # a UUID of version 7
            operation.request.header.idempotency_key = bytes(key)
        self._operations.append(operation)
        return operation

    def _requests(self, random: Random) -> Requests:
        return Requests(random, self._calls.known, self._ttl_share)
