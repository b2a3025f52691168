"""Clients that write and read at real writers, whatever becomes of those, and note what they see.

Most ask one process, so that it is known who answered, and repeat by themselves what they were not
told, with the same idempotency key and at whatever writer. Those that roam know the readers'
addresses alone, find the writer by themselves, and are told of all their attempts together.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from random import Random

import grpc

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv_client import Client, IdempotencyKeys, RetryPolicy, ShaleKVError
from tests.e2e.crashes.calls import Ending, send
from tests.e2e.crashes.moments import WITHIN_S, epoch_ms, now_us, until
from tests.e2e.crashes.servers import Servers, Serving
from tests.e2e.crashes.workload import KEYS, Workload
from tests.kit.processes.stubs import kv_stub, reason_of
from tests.sim.history import (
    UNKNOWN_EPOCH,
    Attempt,
    Got,
    History,
    Operation,
    Outcome,
    ReadOp,
    ScanOp,
    WriteRequest,
)

CLIENTS = 8
ROAMING = 2
ATTEMPTS_MAX = 4
TIMEOUTS_MS = (400, 3_000, 12_000)  # the last is longer than anybody stands still
ROAMING_TIMEOUT_MS = 20_000
READ_S = 3.0
PAUSES_MS = (0, 30, 120)
SETTLED = (Outcome.ACKNOWLEDGED, Outcome.IN_MEMORY, Outcome.REFUSED)
LEVELS = (kv_pb2.READ_LEVEL_COMMITTED, kv_pb2.READ_LEVEL_LINEARIZABLE)
# A key is given to every write; what was not told is repeated here, where each attempt is noted.
ONE_ATTEMPT = RetryPolicy(attempts_max=1)


class _Connection:
    """To one process, and never to another one at its address: the client, and a stub for gets.

    The client does not tell of which state the answer to a get is.
    """

    def __init__(self, server: Serving, timeout_ms: int = TIMEOUTS_MS[-1]) -> None:
        self.server = server
        self.client = _client_of(server, timeout_ms)
        self._stack = AsyncExitStack()
        self._stub: kv_pb2_grpc.KVStub | None = None

    async def stub(self) -> kv_pb2_grpc.KVStub:
        if self._stub is None:
            self._stub = await self._stack.enter_async_context(kv_stub(self.server.address))
        return self._stub

    async def close(self) -> None:
        await self.client.close()
        await self._stack.aclose()


@dataclass(slots=True)
class _Connections:
    """Of one client to each of the writers that it has asked."""

    open: dict[Serving, _Connection] = field(default_factory=dict)

    def to(self, server: Serving) -> _Connection:
        """The connection to a process."""
        if server not in self.open:
            self.open[server] = _Connection(server)
        return self.open[server]

    async def prune(self, *, is_over: bool = False) -> None:
        """Close those to processes that are gone."""
        for server in [each for each in self.open if each.is_gone or is_over]:
            await self.open.pop(server).close()


def _client_of(server: Serving, timeout_ms: int = TIMEOUTS_MS[-1]) -> Client:
    return Client(server.address, retry=ONE_ATTEMPT, timeout_ms=timeout_ms)


class Clients:
    """All clients of one database that write, and what they were told."""

    def __init__(self, servers: Servers, random: Random) -> None:
        """Nothing is sent yet."""
        self.history = History(epoch_ms=epoch_ms())
        self.servers = servers
        self.known: dict[bytes, Got] = {}
        self.newest_seq = 0  # of all that was acknowledged as durable
        self.acknowledged = 0
        self.told: Counter[str] = Counter()  # reasons
        self._random = random
        self._keys = IdempotencyKeys(random_bytes=random.randbytes)
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Write and read until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(self._client(Random(self._random.getrandbits(64))))
            for _ in range(ROAMING):
                tasks.create_task(self._roam(Random(self._random.getrandbits(64))))

    def stop(self) -> None:
        """Begin nothing more."""
        self._over.set()

    async def more(self, count: int) -> None:
        """Wait until so many more writes are acknowledged than now, by the newest writer or not."""
        goal = self.acknowledged + count
        what = f"{count} writes acknowledged"
        await until(lambda: self.acknowledged >= goal, what, lambda: dict(self.told))

    async def acknowledged_by(self, epoch: int, count: int) -> None:
        """Wait until a writer has acknowledged so many writes."""

        def are_there() -> bool:
            attempts = self.history.attempts(Outcome.ACKNOWLEDGED)
            return sum(attempt.epoch == epoch for _, attempt in attempts) >= count

        what = f"{count} writes acknowledged in epoch {epoch}"
        await until(are_there, what, lambda: dict(self.told))

    async def read_all(self, server: Serving) -> None:
        """Get every key, and scan; all of it must be answered."""
        before = len(self.history.reads), len(self.history.scans)
        connection = _Connection(server, int(WITHIN_S * 1_000))
        for key in KEYS:
            await self._get(connection, key, kv_pb2.READ_LEVEL_LINEARIZABLE, WITHIN_S)
        await self._scan(connection, WITHIN_S)
        await connection.close()
        after = len(self.history.reads), len(self.history.scans)
        assert after == (before[0] + len(KEYS), before[1] + 1), server.child.report()

    async def repeat(self, server: Serving, count: int) -> None:
        """Send the last so many requests once more: the answers must be the same."""
        async with _client_of(server) as client:
            for operation in self.history.operations[-count:]:
                await self._attempt(client, server.epoch, operation, TIMEOUTS_MS[-1])

    async def _client(self, random: Random) -> None:
        connections = _Connections()
        while not self._over.is_set():
            await connections.prune()
            connection = connections.to(await self._any_writer(random))
            async with asyncio.TaskGroup() as tasks:
                for _ in range(random.choice([1, 2, 4])):
                    dice = random.random()
                    if dice < 0.8:
                        tasks.create_task(self._change(connections, connection, random))
                    elif dice < 0.97:
                        level, key = random.choice(LEVELS), random.choice(KEYS)
                        tasks.create_task(self._get(connection, key, level))
                    else:
                        tasks.create_task(self._scan(connection))
            await self._pause(random)
        await connections.prune(is_over=True)

    async def _roam(self, random: Random) -> None:
        # Whoever comes back listens where the one before did.
        addresses = [reader.address for reader in self.servers.readers]
        async with Client(addresses, timeout_ms=ROAMING_TIMEOUT_MS) as client:
            while not self._over.is_set():
                operation = self._begin(Workload(random, self.known).draw)
                await self._attempt(client, UNKNOWN_EPOCH, operation, ROAMING_TIMEOUT_MS)
                await self._pause(random)

    async def _change(
        self, connections: _Connections, connection: _Connection, random: Random
    ) -> None:
        """One operation, until it is told or given up, and at times although it was told."""
        operation = self._begin(Workload(random, self.known).draw)
        for _ in range(ATTEMPTS_MAX):
            epoch, timeout_ms = connection.server.epoch, random.choice(TIMEOUTS_MS)
            await self._attempt(connection.client, epoch, operation, timeout_ms)
            is_settled = any(attempt.outcome in SETTLED for attempt in operation.attempts)
            if random.random() < (0.9 if is_settled else 0.1):
                return
            await self._pause(random)
            connection = connections.to(await self._any_writer(random))

    async def _attempt(
        self, client: Client, epoch: int, operation: Operation, timeout_ms: int
    ) -> None:
        attempt = Attempt(epoch, now_us())
        operation.attempts.append(attempt)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1_000):
                ending = await send(client, operation.request)
                attempt.replied_us = now_us()
                self._note(operation, attempt, ending)

    def _note(self, operation: Operation, attempt: Attempt, ending: Ending) -> None:
        attempt.outcome, attempt.answer = ending.outcome, ending.answer
        attempt.seq, attempt.wal_id, attempt.reason = ending.seq, ending.wal_id, ending.reason
        if ending.reason:
            self.told[f"{ending.outcome.name}: {ending.reason}"] += 1
        if ending.outcome is not Outcome.ACKNOWLEDGED:
            return
        self.acknowledged += 1
        self.newest_seq = max(self.newest_seq, ending.seq)
        match operation.request:
            case kv_pb2.PutRequest(key=key, value=value):
                self._see(key, Got(value, ending.seq))
            case kv_pb2.DeleteRequest(key=key):
                self._see(key, Got(None, ending.seq))

    async def _get(
        self,
        connection: _Connection,
        key: bytes,
        level: kv_pb2.ReadLevel.ValueType,
        within_s: float = READ_S,
    ) -> None:
        invoked_us = now_us()
        header = kv_pb2.RequestHeader(read_level=level)
        try:
            stub = await connection.stub()
            reply = await stub.Get(kv_pb2.GetRequest(header=header, key=key), timeout=within_s)
        except grpc.aio.AioRpcError as error:
            self.told[f"get: {reason_of(error) or error.code().name}"] += 1
            return
        shown = Got(reply.value, reply.seq, reply.expire_at_ms) if reply.found else Got()
        is_linearizable = level == kv_pb2.READ_LEVEL_LINEARIZABLE
        told = (reply.header.epoch, invoked_us, now_us(), shown, reply.header.seq)
        self.history.reads.append(ReadOp(key, is_linearizable, *told))
        self._see(key, shown)

    async def _scan(self, connection: _Connection, within_s: float = READ_S) -> None:
        invoked_us = now_us()
        scan = connection.client.scan()
        try:
            async with asyncio.timeout(within_s):
                entries = [(e.key, Got(e.value, e.seq, e.expire_at_ms or 0)) async for e in scan]
        except (TimeoutError, ShaleKVError) as error:
            self.told[f"scan: {type(error).__name__}"] += 1
            return
        assert scan.view is not None
        told = (scan.view.epoch, invoked_us, now_us(), scan.view.seq, tuple(entries))
        self.history.scans.append(ScanOp(*told))

    def _see(self, key: bytes, shown: Got) -> None:
        if shown.seq > self.known.get(key, Got()).seq:
            self.known[key] = shown

    def _begin(self, draw: Callable[[int], WriteRequest]) -> Operation:
        """The next operation."""
        number = len(self.history.operations) + 1
        operation = Operation(number, draw(number))
        operation.request.header.idempotency_key = self._keys.next()
        self.history.operations.append(operation)
        return operation

    async def _any_writer(self, random: Random) -> Serving:
        """Mostly the newest; at times one that stands still or was overtaken."""
        while not (there := [each for each in self.servers.writers if not each.is_gone]):
            await self._pause(random)
            if self._over.is_set():
                return self.servers.writer
        return there[-1] if random.random() < 0.7 else random.choice(there)

    async def _pause(self, random: Random) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(random.choice(PAUSES_MS) / 1_000):
                await self._over.wait()
