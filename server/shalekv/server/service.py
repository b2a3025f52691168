"""The seam between transports and roles: what a role answers, in plain values.

A request is a protobuf message and a `Call`; a reply is a protobuf message, an awaitable of one,
or an exception of `shalekv.errors`. Nothing here knows gRPC. A reply that waits for a commit is a
`Future` of this call alone, completed by the commit loop: a transport may await it or attach a
callback, so it needs no task for a call. A future must never be shared between calls, since one
cancelled call would cancel it for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from google.protobuf.message import Message

from shalekv.concurrency import FifoLock
from shalekv.errors import ShaleError
from shalekv.v1 import admin_pb2, kv_pb2

# An answer that explains why there is no other must be on its way before the caller gives up.
ANSWER_PARTS, ANSWER_MS_MAX = 10, 100

ReplyT = TypeVar("ReplyT")
Answer: TypeAlias = ReplyT | Awaitable[ReplyT]


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of a call beside its request."""

    peer: str = ""  # for logs
    deadline_ms: float | None = None  # on the clock of the runtime; None: no deadline
    line: FifoLock | None = None  # in which the writes of one session take effect; None: in none
    # Ends a stream with an error although its client does not take what was written before.
    end: Callable[[ShaleError], None] | None = None

    def answer_within_ms(self, now_ms: float) -> float | None:
        """The time until an answer must be on its way; None: there is no deadline."""
        if self.deadline_ms is None:
            return None
        left_ms = self.deadline_ms - now_ms
        return max(left_ms - min(left_ms / ANSWER_PARTS, ANSWER_MS_MAX), 0.0)


class KvService(Protocol):
    """Answers the calls of `shalekv.v1.KV` that this version implements."""

    def get(self, request: kv_pb2.GetRequest, call: Call) -> Answer[kv_pb2.GetReply]:
        """The value of one key."""
        ...

    def batch_get(
        self, request: kv_pb2.BatchGetRequest, call: Call
    ) -> Answer[kv_pb2.BatchGetReply]:
        """The values of many keys at one view."""
        ...

    def put(self, request: kv_pb2.PutRequest, call: Call) -> Answer[kv_pb2.PutReply]:
        """Set one key."""
        ...

    def delete(self, request: kv_pb2.DeleteRequest, call: Call) -> Answer[kv_pb2.DeleteReply]:
        """Delete one key."""
        ...

    def delete_range(
        self, request: kv_pb2.DeleteRangeRequest, call: Call
    ) -> Answer[kv_pb2.DeleteRangeReply]:
        """Delete all keys of a range."""
        ...

    def write(self, request: kv_pb2.WriteRequest, call: Call) -> Answer[kv_pb2.WriteReply]:
        """Apply many changes in one commit."""
        ...

    def txn(self, request: kv_pb2.TxnRequest, call: Call) -> Answer[kv_pb2.TxnReply]:
        """Compare, then read and change, in one commit."""
        ...

    def scan(self, request: kv_pb2.ScanRequest, call: Call) -> AsyncIterator[kv_pb2.ScanReply]:
        """Read a range in order; the iterator is closed when the caller goes away."""
        ...


class SnapshotService(Protocol):
    """Answers the calls of `shalekv.v1.Admin` about snapshots."""

    def create(
        self, request: admin_pb2.CreateSnapshotRequest, call: Call
    ) -> Answer[admin_pb2.CreateSnapshotReply]:
        """Pin the current state."""
        ...

    def renew(
        self, request: admin_pb2.RenewSnapshotRequest, call: Call
    ) -> Answer[admin_pb2.RenewSnapshotReply]:
        """Give a snapshot more time."""
        ...

    def list(
        self, request: admin_pb2.ListSnapshotsRequest, call: Call
    ) -> Answer[admin_pb2.ListSnapshotsReply]:
        """The snapshots that have not expired."""
        ...

    def delete(
        self, request: admin_pb2.DeleteSnapshotRequest, call: Call
    ) -> Answer[admin_pb2.DeleteSnapshotReply]:
        """Delete a snapshot."""
        ...


class DuplexStream(Protocol):
    """A call whose requests and replies come in any order."""

    async def read(self, requests: AsyncIterator[Any], tasks: asyncio.TaskGroup) -> None:
        """Take all requests, no faster than there is room; what takes time gets one of `tasks`."""
        ...

    def replies(self) -> AsyncIterator[Message | bytes]:
        """What the client is told, as messages or as their bytes; raises what ends the stream."""
        ...

    def refuse(self, error: ShaleError) -> None:
        """This process ends: so shall the stream, with `error`."""
        ...

    def close(self) -> None:
        """The client has gone."""
        ...


class WatchStreamService(DuplexStream, Protocol):
    """One stream of watches."""

    async def leave(self) -> None:
        """What is left to do when the client has gone."""
        ...


class WatchService(Protocol):
    """Answers `KV.Watch`."""

    def open(
        self, describe: Callable[[BaseException], kv_pb2.OperationError]
    ) -> WatchStreamService:
        """A new stream; `describe` makes of an error what a client is told of it."""
        ...


class AdminService(Protocol):
    """Answers the calls of `shalekv.v1.Admin` that this version implements."""

    @property
    def snapshots(self) -> SnapshotService:
        """What answers the calls about snapshots."""
        ...

    def ingest_sst(
        self, request: admin_pb2.IngestSstRequest, call: Call
    ) -> Answer[admin_pb2.IngestSstReply]:
        """Commit files that stand ready in the object store as one load."""
        ...

    def status(self, request: admin_pb2.StatusRequest, call: Call) -> Answer[admin_pb2.StatusReply]:
        """What this process is and how it does."""
        ...

    def stats(self, request: admin_pb2.StatsRequest, call: Call) -> Answer[admin_pb2.StatsReply]:
        """What the processes of this server have sent to the object store."""
        ...
