"""Calls of clients to writers, each taken down in the history with what came back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
from shalekv.roles.service import Call
from shalekv.roles.writer_kv import WriterKv
from shalekv.v1 import kv_pb2
from tests.sim.cluster import Cluster
from tests.sim.errors import NodeCrashed
from tests.sim.history import Attempt, Got, Operation, Outcome, ReadOp, Refusal, ScanOp, Told

READ_TIMEOUT_MS = 30_000.0
REFUSED = (ConditionFailed, NotACounter, CounterOverflow)
# A refusal, or a read, that could not be confirmed says nothing; nothing was written either. Of a
# writer that was stopped for so long that its snapshot has expired, what it reads may be gone (I7).
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
    """Asks the writers of a cluster; one that is gone by then is not asked."""

    def __init__(self, cluster: Cluster) -> None:
        """Nothing is known yet."""
        self._cluster = cluster
        self._world = cluster.world
        self._history = cluster.history
        self.known: dict[bytes, Got] = {}  # the newest that any client has seen of each key

    async def attempt(self, operation: Operation, name: str, timeout_ms: float) -> None:
        """Send the request of an operation once."""
        writer = self._cluster.writers.get(name)
        if writer is None:
            return
        attempt = Attempt(writer.epoch, self._world.loop.now_us)
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
        attempt.replied_us = self._world.loop.now_us

    async def get(self, key: bytes, level: kv_pb2.ReadLevel.ValueType, name: str) -> None:
        """Get one key."""
        writer, invoked_us = self._cluster.writers.get(name), self._world.loop.now_us
        if writer is None:
            return
        request = kv_pb2.GetRequest(key=key, header=kv_pb2.RequestHeader(read_level=level))
        kv = writer.kv
        reply = await self._answer(name, lambda: kv.get(request, Call()))
        if reply is not None:
            got, now_us = _got(reply), self._world.loop.now_us
            self._see(key, got)
            is_linearizable = level == kv_pb2.READ_LEVEL_LINEARIZABLE
            self._history.reads.append(
                ReadOp(
                    key, is_linearizable, writer.epoch, invoked_us, now_us, got, reply.header.seq
                )
            )

    async def scan(self, name: str) -> None:
        """Scan everything."""
        writer, invoked_us = self._cluster.writers.get(name), self._world.loop.now_us
        if writer is None:
            return
        kv = writer.kv
        found = await self._answer(name, lambda: _scanned(kv))
        if found is not None:
            seq, entries = found
            now_us = self._world.loop.now_us
            self._history.scans.append(ScanOp(writer.epoch, invoked_us, now_us, seq, entries))

    def _take_down(self, operation: Operation, attempt: Attempt, reply: Any) -> None:
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

    def _see(self, key: bytes, got: Got) -> None:
        if got.seq > self.known.get(key, Got()).seq:
            self.known[key] = got

    async def _answer(self, name: str, ask: Callable[[], Any]) -> Any:
        """What a read is answered; None: nothing, in time."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_MS / 1000):
                return await self._ask(name, ask)
        except UNANSWERED:
            return None

    async def _ask(self, name: str, ask: Callable[[], Any]) -> Any:
        """The answer of a writer, computed on its node."""

        async def run() -> Any:
            answer = ask()
            return await answer if isinstance(answer, Awaitable) else answer

        return await self._world.node(name).run(run())


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
