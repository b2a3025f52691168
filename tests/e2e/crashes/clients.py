"""Clients that write and read at real writers and readers, which are killed and stopped.

Their replies are recorded in the form of the simulation's checkers. A client calls one process at a
time, so that it knows which one answered, and repeats what was not acknowledged, with the same
idempotency key and at any writer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv_client import (
    ConditionFailed,
    CounterOverflow,
    IdempotencyKeys,
    NotACounter,
    NotApplied,
)
from shalekv_client.error_table import error_of
from shalekv_client.routing.grpcio_channel import call_failed
from tests.e2e.crashes.fleet import WITHIN_S, Fleet, Serving, now_us
from tests.kit.processes.stubs import kv_stub, reason_of
from tests.kit.timeouts import until
from tests.sim import requests
from tests.sim.callers import result_of
from tests.sim.history import (
    Attempt,
    Got,
    History,
    Operation,
    Outcome,
    ReadOp,
    Refusal,
    ScanOp,
    Seen,
    WriteRequest,
)

CLIENTS = 6
ATTEMPTS_MAX = 4
TIMEOUTS_S = (0.4, 3.0, 12.0)  # the last is longer than any process is paused
READ_S = 3.0
PAUSES_S = (0, 0.03, 0.12)
SETTLED = (Outcome.ACKNOWLEDGED, Outcome.IN_MEMORY, Outcome.REFUSED)
LEVELS = (kv_pb2.READ_LEVEL_COMMITTED, kv_pb2.READ_LEVEL_LINEARIZABLE)
METHODS: Mapping[type, Callable[[kv_pb2_grpc.KVStub], Any]] = {
    kv_pb2.PutRequest: lambda stub: stub.Put,
    kv_pb2.DeleteRequest: lambda stub: stub.Delete,
    kv_pb2.DeleteRangeRequest: lambda stub: stub.DeleteRange,
    kv_pb2.WriteRequest: lambda stub: stub.Write,
    kv_pb2.TxnRequest: lambda stub: stub.Txn,
}
WIDE_KEYS = tuple(b"w/%03d" % number for number in range(150))  # that fill the levels
KEYS = (*requests.KEYS, *WIDE_KEYS)
WIDE_SHARE = 0.4
VALUE_DIGITS = (1, 1_500)  # zeros before the number: values of all sizes that identify their write
KEYS_AT_ONCE = 5
SCAN_SHARE, MIN_SEQ_SHARE = 0.15, 0.5  # shares of the reads of replicas


@dataclass(slots=True)
class _Stubs:
    """Stubs of one client for each of the processes that it has called."""

    _open: dict[Serving, tuple[AsyncExitStack, kv_pb2_grpc.KVStub]] = field(default_factory=dict)

    async def to(self, server: Serving) -> kv_pb2_grpc.KVStub:
        """A stub for a process, and never for another one at its address."""
        if server not in self._open:
            stack = AsyncExitStack()
            stub = await stack.enter_async_context(kv_stub(server.child.listen))
            self._open[server] = stack, stub
        return self._open[server][1]

    async def prune(self, *, is_over: bool = False) -> None:
        for server in [each for each in self._open if each.is_gone or is_over]:
            await self._open.pop(server)[0].aclose()


@asynccontextmanager
async def _stubs() -> AsyncIterator[_Stubs]:
    stubs = _Stubs()
    try:
        yield stubs
    finally:
        await stubs.prune(is_over=True)


class Clients:
    """All clients of one database, and the replies they got."""

    def __init__(self, fleet: Fleet, random: Random) -> None:
        # Time of the machine's clock at the time 0 of `now_us`.
        self.history = History(epoch_ms=(time.time_ns() - time.monotonic_ns()) // 1_000_000)
        self.seen: list[Seen] = []  # at replicas
        self.answered: Counter[int] = Counter()  # reads of replicas, by process id
        self.acknowledged = 0
        self.reasons: Counter[str] = Counter()  # reasons
        self._known: dict[bytes, Got] = {}
        self._newest_seq = 0  # of all writes acknowledged as durable
        self._fleet = fleet
        self._random = random
        self._keys = IdempotencyKeys(random_bytes=random.randbytes)
        self._over = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(self._client(Random(self._random.getrandbits(64))))
            for seat in range(len(self._fleet.readers)):
                tasks.create_task(self._replicas(seat, Random(self._random.getrandbits(64))))

    def stop(self) -> None:
        self._over.set()

    async def more(self, count: int) -> None:
        """Wait until `count` more writes are acknowledged."""
        goal = self.acknowledged + count
        await until(lambda: self.acknowledged >= goal, f"{count} writes", within_s=WITHIN_S)

    async def acknowledged_by(self, epoch: int, count: int) -> None:
        """Wait until a writer has acknowledged `count` writes."""

        def are_there() -> bool:
            attempts = self.history.attempts(Outcome.ACKNOWLEDGED)
            return sum(attempt.epoch == epoch for _, attempt in attempts) >= count

        await until(are_there, f"{count} writes in epoch {epoch}", within_s=WITHIN_S)

    async def more_reads(self, seat: int, count: int) -> None:
        """Wait until the reader in that seat has answered `count` more reads."""
        pid = self._fleet.readers[seat].child.pid
        goal = self.answered[pid] + count
        await until(lambda: self.answered[pid] >= goal, "reads of a replica", within_s=WITHIN_S)

    async def read_all(self, server: Serving) -> None:
        """Get every key, and scan; all of it must be answered."""
        before = len(self.history.reads), len(self.history.scans)
        async with _stubs() as stubs:
            for key in KEYS:
                await self._get(stubs, server, key, kv_pb2.READ_LEVEL_LINEARIZABLE, WITHIN_S)
            await self._scan(stubs, server, WITHIN_S)
        after = len(self.history.reads), len(self.history.scans)
        assert after == (before[0] + len(KEYS), before[1] + 1), server.child.report()

    async def repeat(self, server: Serving, count: int) -> None:
        """Send the last `count` requests once more: the answers must be the same."""
        async with _stubs() as stubs:
            for operation in self.history.operations[-count:]:
                await self._attempt(stubs, server, operation, TIMEOUTS_S[-1])

    async def _client(self, random: Random) -> None:
        async with _stubs() as stubs:
            while not self._over.is_set():
                await stubs.prune()
                server = await self._any_writer(random)
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(random.choice([1, 2, 4])):
                        dice = random.random()
                        if dice < 0.8:
                            tasks.create_task(self._change(stubs, server, random))
                        elif dice < 0.97:
                            level, key = random.choice(LEVELS), random.choice(KEYS)
                            tasks.create_task(self._get(stubs, server, key, level))
                        else:
                            tasks.create_task(self._scan(stubs, server))
                await self._pause(random.choice(PAUSES_S))

    async def _change(self, stubs: _Stubs, server: Serving, random: Random) -> None:
        """Run one operation until it is settled or given up, and sometimes although it was
        acknowledged.
        """
        number = len(self.history.operations) + 1
        operation = Operation(number, draw(number, random, self._known))
        operation.request.header.idempotency_key = self._keys.next()
        self.history.operations.append(operation)
        for _ in range(ATTEMPTS_MAX):
            await self._attempt(stubs, server, operation, random.choice(TIMEOUTS_S))
            is_settled = any(attempt.outcome in SETTLED for attempt in operation.attempts)
            if random.random() < (0.9 if is_settled else 0.1):
                return
            await self._pause(random.choice(PAUSES_S))
            server = await self._any_writer(random)

    async def _attempt(
        self, stubs: _Stubs, server: Serving, operation: Operation, timeout_s: float
    ) -> None:
        stub = await stubs.to(server)
        attempt = Attempt(server.epoch, now_us())
        operation.attempts.append(attempt)
        method = METHODS[type(operation.request)](stub)
        try:
            reply = await method(operation.request, timeout=timeout_s)
        except grpc.aio.AioRpcError as failed:
            error = error_of(server.child.listen, call_failed(failed))
            attempt.reason = error.reason or error.code
            if isinstance(error, ConditionFailed | NotACounter | CounterOverflow):
                attempt.outcome = Outcome.REFUSED
                found_seq = error.found_seq if isinstance(error, ConditionFailed) else None
                attempt.answer = Refusal(error.reason, found_seq)
            elif isinstance(error, NotApplied):
                attempt.outcome = Outcome.NOT_APPLIED
            if error.code == "DEADLINE_EXCEEDED":
                return  # the client gave up
            self.reasons[f"{attempt.outcome.name}: {attempt.reason}"] += 1
        else:
            is_in_memory = reply.durability == kv_pb2.DURABILITY_MEMORY
            attempt.outcome = Outcome.IN_MEMORY if is_in_memory else Outcome.ACKNOWLEDGED
            attempt.answer, attempt.seq = result_of(reply), reply.header.seq
            attempt.wal_id = reply.header.wal_id if reply.header.HasField("wal_id") else None
            if not is_in_memory:
                self._acknowledged(operation.request, attempt.seq)
        attempt.replied_us = now_us()

    def _acknowledged(self, request: WriteRequest, seq: int) -> None:
        self.acknowledged += 1
        self._newest_seq = max(self._newest_seq, seq)
        match request:
            case kv_pb2.PutRequest(key=key, value=value):
                self._see(key, Got(value, seq))
            case kv_pb2.DeleteRequest(key=key):
                self._see(key, Got(None, seq))

    async def _get(
        self,
        stubs: _Stubs,
        server: Serving,
        key: bytes,
        level: kv_pb2.ReadLevel.ValueType,
        within_s: float = READ_S,
    ) -> None:
        stub, invoked_us = await stubs.to(server), now_us()
        header = kv_pb2.RequestHeader(read_level=level)
        try:
            reply = await stub.Get(kv_pb2.GetRequest(header=header, key=key), timeout=within_s)
        except grpc.aio.AioRpcError as error:
            self.reasons[f"get: {reason_of(error) or error.code().name}"] += 1
            return
        shown = _got(reply) if reply.found else Got()
        is_linearizable = level == kv_pb2.READ_LEVEL_LINEARIZABLE
        noted = (reply.header.epoch, invoked_us, now_us(), shown, reply.header.seq)
        self.history.reads.append(ReadOp(key, is_linearizable, *noted))
        self._see(key, shown)

    async def _scan(self, stubs: _Stubs, server: Serving, within_s: float = READ_S) -> None:
        stub, invoked_us = await stubs.to(server), now_us()
        try:
            header, found = await _scanned(stub, kv_pb2.RequestHeader(), within_s)
        except grpc.aio.AioRpcError as error:
            self.reasons[f"scan: {reason_of(error) or error.code().name}"] += 1
            return
        entries = tuple(found.items())
        self.history.scans.append(ScanOp(header.epoch, invoked_us, now_us(), header.seq, entries))

    async def _replicas(self, seat: int, random: Random) -> None:
        """Read from the readers in a seat: no process goes back, and each has what is demanded."""
        async with _stubs() as stubs:
            while not self._over.is_set():
                await stubs.prune()
                server = self._fleet.readers[seat]
                min_seq = self._newest_seq if random.random() < MIN_SEQ_SHARE else 0
                try:
                    await self._read_replica(await stubs.to(server), server, min_seq, random)
                except grpc.aio.AioRpcError as error:
                    self.reasons[f"replica: {reason_of(error) or error.code().name}"] += 1
                await self._pause(0.05)

    async def _read_replica(
        self, stub: kv_pb2_grpc.KVStub, server: Serving, min_seq: int, random: Random
    ) -> None:
        began_us, asked, pid = now_us(), kv_pb2.RequestHeader(min_seq=min_seq), server.child.pid
        if random.random() < SCAN_SHARE:
            keys = KEYS
            header, found = await _scanned(stub, asked, READ_S)
        else:
            keys = tuple(random.sample(KEYS, KEYS_AT_ONCE))
            request = kv_pb2.BatchGetRequest(header=asked, keys=keys)
            reply = await stub.BatchGet(request, timeout=READ_S)
            replies = zip(keys, reply.results, strict=True)
            header, found = reply.header, {key: _got(each) for key, each in replies if each.found}
        noted = (began_us, now_us(), header.seq, header.staleness_ms, min_seq, keys, found)
        self.seen.append(Seen(f"reader {pid}", *noted))
        self.answered[pid] += 1

    def _see(self, key: bytes, shown: Got) -> None:
        if shown.seq > self._known.get(key, Got()).seq:
            self._known[key] = shown

    async def _any_writer(self, random: Random) -> Serving:
        """Mostly the newest; at times one that is paused or was overtaken."""
        while not (there := [each for each in self._fleet.writers if not each.is_gone]):
            await self._pause(PAUSES_S[-1])
            if self._over.is_set():
                return self._fleet.writers[-1]
        return there[-1] if random.random() < 0.7 else random.choice(there)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()


def _got(each: Any) -> Got:
    return Got(each.value, each.seq, each.expire_at_ms)


async def _scanned(
    stub: kv_pb2_grpc.KVStub, asked: kv_pb2.RequestHeader, within_s: float
) -> tuple[kv_pb2.ReplyHeader, dict[bytes, Got]]:
    header, found = kv_pb2.ReplyHeader(), dict[bytes, Got]()
    async for reply in stub.Scan(kv_pb2.ScanRequest(header=asked), timeout=within_s):
        header = reply.header
        found |= {entry.key: _got(entry) for entry in reply.entries}
    return header, found


def draw(number: int, random: Random, known: Mapping[bytes, Got]) -> WriteRequest:
    """A request as in the simulation, or one that fills the levels.

    Nothing expires: here no clock is the test's own.
    """
    if random.random() >= WIDE_SHARE:
        request = requests.Requests(random, known).draw(number)
        request.header.ClearField("read_level")  # an answer is always confirmed
        changes = list(request.changes) if isinstance(request, kv_pb2.WriteRequest) else []
        if isinstance(request, kv_pb2.TxnRequest):
            changes = [each.change for each in (*request.then, *request.otherwise)]
        puts: list[Any] = [each.put for each in changes if each.HasField("put")]
        for put in [request, *puts] if isinstance(request, kv_pb2.PutRequest) else puts:
            put.ttl_ms = 0
        return request
    key, dice = random.choice(WIDE_KEYS), random.random()
    value = b"v%0*d" % (random.randint(*VALUE_DIGITS), number)
    if dice < 0.5:
        return kv_pb2.PutRequest(key=key, value=value)
    if dice < 0.6:
        return kv_pb2.DeleteRequest(key=key)
    if dice < 0.63:
        return kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(prefix=key[:-1]))
    drawn = random.sample(WIDE_KEYS, random.randint(2, 8))
    changes = [kv_pb2.Change(delete=kv_pb2.DeleteChange(key=drawn[0]))]
    changes += [kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value)) for key in drawn[1:]]
    return kv_pb2.WriteRequest(changes=changes)
