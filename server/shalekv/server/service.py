"""Interfaces between the transport and the roles, in protobuf messages and without gRPC.

A request is a protobuf message and a `Call`; a reply is a message or its bytes, an awaitable
of either, or an exception of `shalekv.errors`. A reply that waits for a commit is a `PendingReply`,
which belongs to this call alone and is completed by the commit loop, with bytes: a transport may
await it or attach a callback, so it needs no task for a call. An awaitable must never be shared
between calls, since cancelling one call would cancel it for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from google.protobuf.message import Message

from shalekv.concurrency import FifoLock
from shalekv.errors import ShaleError
from shalekv.server.access.caller import Caller
from shalekv.telemetry.activity import CallActivity
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv.watch.stream import Admit
from shalekv_wire.trace_context import UNNAMED, CallNames

# The error of a call that cannot be answered in time has to reach the client before the deadline:
# it is sent ahead of it by a tenth of the time that was left, but by no more than 100 ms.
MARGIN_DIVISOR, MARGIN_MS_MAX = 10, 100

ReplyT = TypeVar("ReplyT")
Answer: TypeAlias = ReplyT | Awaitable[ReplyT]
# Makes the header of a reply from a sequence number and a WAL id.
MakeHeader: TypeAlias = Callable[[int, int | None], kv_pb2.ReplyHeader]


@dataclass(frozen=True, slots=True)
class Call:
    """Context of a call: everything but the request."""

    peer: str = ""  # for logs
    deadline_ms: float | None = None  # on the clock of the runtime; None: no deadline
    # Orders the writes of one session: each takes effect after those before it; None: no session.
    write_order: FifoLock | None = None
    caller: Caller | None = None  # None: there is no guard, so nothing is refused
    names: CallNames = UNNAMED  # of the client, for logs, replies and traces
    # Ends a stream with an error even if its client does not read what was written before.
    end: Callable[[ShaleError], None] | None = None
    activity: CallActivity | None = None  # None: the call is not traced

    @property
    def principal(self) -> str:
        """Name of the principal that calls; empty: anonymous, or there is no guard."""
        return "" if self.caller is None else self.caller.identity.principal.name

    @property
    def request_id(self) -> str:
        """The name that the client gave the call; empty: none."""
        return self.names.request_id

    @property
    def trace_id(self) -> str:
        """The trace that the call is part of; empty: none."""
        return self.names.trace_id if self.activity is None else self.activity.trace_id

    @property
    def secret(self) -> bytes:
        """The secret of the policy; empty: none is stored, or there is no guard."""
        return b"" if self.caller is None else self.caller.secret

    def recorded_in(self, activity: CallActivity) -> Call:
        """Return the context of the same call, which is traced."""
        return Call(
            self.peer,
            self.deadline_ms,
            self.write_order,
            self.caller,
            self.names,
            self.end,
            activity,
        )

    def answer_within_ms(self, now_ms: float) -> float | None:
        """Time left until an answer must be sent; None: there is no deadline."""
        if self.deadline_ms is None:
            return None
        left_ms = self.deadline_ms - now_ms
        return max(left_ms - min(left_ms / MARGIN_DIVISOR, MARGIN_MS_MAX), 0.0)


class KvService(Protocol):
    """Data API of a role: the calls of `shalekv.v1.KV`, apart from sessions and watches."""

    def get(self, request: kv_pb2.GetRequest, call: Call) -> Answer[kv_pb2.GetReply | bytes]:
        """Read one key."""
        ...

    def batch_get(
        self, request: kv_pb2.BatchGetRequest, call: Call
    ) -> Answer[kv_pb2.BatchGetReply | bytes]:
        """Read many keys in one view."""
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

    def count(self, request: kv_pb2.CountRequest, call: Call) -> Answer[kv_pb2.CountReply | bytes]:
        """Count the keys of a range in one view."""
        ...

    def scan(
        self, request: kv_pb2.ScanRequest, call: Call
    ) -> AsyncIterator[kv_pb2.ScanReply | bytes]:
        """Read a range in order; the iterator is closed when the caller goes away."""
        ...


class SnapshotService(Protocol):
    """Snapshot calls of `shalekv.v1.Admin`."""

    def create(
        self, request: admin_pb2.CreateSnapshotRequest, call: Call
    ) -> Answer[admin_pb2.CreateSnapshotReply]:
        """Pin the current state."""
        ...

    def renew(
        self, request: admin_pb2.RenewSnapshotRequest, call: Call
    ) -> Answer[admin_pb2.RenewSnapshotReply]:
        """Extend the life of a snapshot."""
        ...

    def list(
        self, request: admin_pb2.ListSnapshotsRequest, call: Call
    ) -> Answer[admin_pb2.ListSnapshotsReply]:
        """List the snapshots that have not expired."""
        ...

    def delete(
        self, request: admin_pb2.DeleteSnapshotRequest, call: Call
    ) -> Answer[admin_pb2.DeleteSnapshotReply]:
        """Delete a snapshot."""
        ...


class AccessService(Protocol):
    """Calls of `shalekv.v1.Admin` about access."""

    def who_am_i(
        self, request: admin_pb2.WhoAmIRequest, call: Call
    ) -> Answer[admin_pb2.WhoAmIReply]:
        """Tell who the caller is, and what it may do."""
        ...

    def get_policy(
        self, request: admin_pb2.GetAccessPolicyRequest, call: Call
    ) -> Answer[admin_pb2.GetAccessPolicyReply]:
        """Return the access policy."""
        ...

    def set_policy(
        self, request: admin_pb2.SetAccessPolicyRequest, call: Call
    ) -> Answer[admin_pb2.SetAccessPolicyReply]:
        """Replace the access policy."""
        ...


class DuplexStream(Protocol):
    """Bidirectional stream: requests and replies are independent of each other."""

    async def read(self, requests: AsyncIterator[Any], tasks: asyncio.TaskGroup) -> None:
        """Read all requests, no faster than memory allows; slow ones run in tasks of `tasks`."""
        ...

    def replies(self) -> AsyncIterator[Message | bytes]:
        """Yield replies, as messages or serialized; raises the error that ends the stream."""
        ...

    def refuse(self, error: ShaleError) -> None:
        """End the stream with `error`, because this process ends."""
        ...

    def close(self) -> None:
        """Release everything: the client has gone."""
        ...


class WatchStreamService(DuplexStream, Protocol):
    """One stream of watches."""

    async def leave(self) -> None:
        """Do the work that is left when the client has gone, such as requests to the store."""
        ...


class WatchService(Protocol):
    """Implementation of `KV.Watch`."""

    def open(
        self,
        describe: Callable[[BaseException], kv_pb2.OperationError],
        admit: Admit | None = None,
        /,
        *,
        principal: str = "",
    ) -> WatchStreamService:
        """Open a stream; `describe` converts an exception to the error that its client gets.

        `admit` is asked before each watch; the consumers of watches belong to `principal`.
        """
        ...


class AdminService(Protocol):
    """Operator's API of a role: the calls of `shalekv.v1.Admin`."""

    @property
    def snapshots(self) -> SnapshotService:
        """Implementation of the snapshot calls."""
        ...

    @property
    def access(self) -> AccessService:
        """Implementation of the calls about access."""
        ...

    def header(self) -> kv_pb2.ReplyHeader:
        """Make the header of a reply that shows all that this process shows."""
        ...

    def ingest_sst(
        self, request: admin_pb2.IngestSstRequest, call: Call
    ) -> Answer[admin_pb2.IngestSstReply]:
        """Commit SST files that are already in the object store as one load."""
        ...

    def status(self, request: admin_pb2.StatusRequest, call: Call) -> Answer[admin_pb2.StatusReply]:
        """Describe this process and its state."""
        ...

    def stats(self, request: admin_pb2.StatsRequest, call: Call) -> Answer[admin_pb2.StatsReply]:
        """Count the requests that the processes of this server have sent to the object store.

        If others share the port, what all their calls have cost is there, too; `rpc` adds it else.
        """
        ...

    def list_slow_calls(
        self, request: admin_pb2.ListSlowCallsRequest, call: Call
    ) -> Answer[admin_pb2.ListSlowCallsReply]:
        """List the slow calls of other processes that share the port; `rpc` adds its own."""
        ...

    def profile(
        self, request: admin_pb2.ProfileRequest, call: Call
    ) -> Answer[admin_pb2.ProfileReply]:
        """Sample where this server spends its time."""
        ...
