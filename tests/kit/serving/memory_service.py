"""Small implementations of the services: a dict, commits that a test can hold back, and accidents.

Some keys are accidents: reading them raises the error in `ACCIDENTS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from shalekv import errors
from shalekv.errors import InvalidRequest, ShaleError
from shalekv.server.replies.profile import profile_reply
from shalekv.server.service import Answer, Call
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv.watch.stream import Admit

ACCIDENTS: dict[bytes, Exception] = {
    b"!bug": ZeroDivisionError("the secret of line 17"),
    b"!fenced": errors.Fenced("epoch 8 has taken over from 7", own_epoch=7, newer_epoch=8),
    b"!full": errors.QueueFull("the queue is full", retry_after_ms=1_500),
    b"!corrupt": errors.BadChecksum("wal/00000000000000000007.sst", 4096, "block 3 does not match"),
    b"!unknown": errors.OutcomeUnknown("the upload was sent and no answer came"),
    b"!long": errors.InvalidRequest("key", "x" * 100_000),
}


class MemoryKv:
    """Answers `KvService` from a dict."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.calls: list[Call] = []
        self.held: list[asyncio.Future[kv_pb2.PutReply]] = []
        self.hold = False
        self.arrived = asyncio.Event()
        self.scans: list[AsyncIterator[kv_pb2.ScanReply]] = []
        self.scans_open = 0
        self.scanned_count = 0  # messages of all scans
        self.scan_opened = asyncio.Event()
        self.scan_closed = asyncio.Event()

    def get(self, request: kv_pb2.GetRequest, call: Call) -> Answer[kv_pb2.GetReply]:
        self._note(call)
        if request.key in ACCIDENTS:
            raise ACCIDENTS[request.key]
        found = request.key in self.values
        return kv_pb2.GetReply(found=found, value=self.values.get(request.key, b""))

    def batch_get(
        self, request: kv_pb2.BatchGetRequest, call: Call
    ) -> Answer[kv_pb2.BatchGetReply]:
        self._note(call)
        found = [kv_pb2.BatchGetResult(found=key in self.values) for key in request.keys]
        return kv_pb2.BatchGetReply(results=found)

    def put(self, request: kv_pb2.PutRequest, call: Call) -> Answer[kv_pb2.PutReply]:
        """A future of this call alone, completed at once unless `hold` is set."""
        self._note(call)
        future: asyncio.Future[kv_pb2.PutReply] = asyncio.get_running_loop().create_future()
        if request.key in ACCIDENTS:
            future.set_exception(ACCIDENTS[request.key])
            return future
        self.values[request.key] = request.value
        if self.hold:
            self.held.append(future)
        else:
            future.set_result(kv_pb2.PutReply())
        return future

    def delete(self, request: kv_pb2.DeleteRequest, call: Call) -> Answer[kv_pb2.DeleteReply]:
        self._note(call)
        self.values.pop(request.key, None)
        return kv_pb2.DeleteReply()

    def delete_range(
        self, request: kv_pb2.DeleteRangeRequest, call: Call
    ) -> Answer[kv_pb2.DeleteRangeReply]:
        self._note(call)
        for key in [key for key in self.values if key.startswith(request.range.prefix)]:
            del self.values[key]
        return kv_pb2.DeleteRangeReply()

    def write(self, request: kv_pb2.WriteRequest, call: Call) -> Answer[kv_pb2.WriteReply]:
        self._note(call)
        self.values |= {c.put.key: c.put.value for c in request.changes}
        return kv_pb2.WriteReply()

    def txn(self, request: kv_pb2.TxnRequest, call: Call) -> Answer[kv_pb2.TxnReply]:
        """A coroutine, as what has to be waited for more than once may be; it only reads."""
        self._note(call)

        async def answer() -> kv_pb2.TxnReply:
            await asyncio.sleep(0)
            reply = kv_pb2.TxnReply(succeeded=True)
            for operation in request.then:
                key = operation.get.key
                if key in ACCIDENTS:
                    raise ACCIDENTS[key]
                found = kv_pb2.GetReply(found=key in self.values, value=self.values.get(key, b""))
                reply.results.add(get=found)
            return reply

        return answer()

    def count(self, request: kv_pb2.CountRequest, call: Call) -> Answer[kv_pb2.CountReply]:
        self._note(call)
        found = [key for key in self.values if key.startswith(request.range.prefix)]
        return kv_pb2.CountReply(count=len(found))

    def scan(self, request: kv_pb2.ScanRequest, call: Call) -> AsyncIterator[kv_pb2.ScanReply]:
        """Yield one message for each key, repeatedly if the limit is greater than their number.

        The iterator is kept: only its reader can have closed it.
        """
        self._note(call)
        self.scans.append(self._scan(request))
        return self.scans[-1]

    async def _scan(self, request: kv_pb2.ScanRequest) -> AsyncIterator[kv_pb2.ScanReply]:
        if request.range.prefix in ACCIDENTS:
            raise ACCIDENTS[request.range.prefix]
        self.scans_open += 1
        self.scan_opened.set()
        try:
            sent = 0
            while sent < request.limit:
                for key, value in sorted(self.values.items()):
                    yield kv_pb2.ScanReply(entries=[kv_pb2.Entry(key=key, value=value)])
                    sent += 1
                    self.scanned_count += 1
        finally:
            self.scans_open -= 1
            self.scan_closed.set()

    async def holds(self, count: int) -> None:
        while len(self.held) < count:
            self.arrived.clear()
            await self.arrived.wait()

    def release(self) -> None:
        """Complete the commits that are held back, as a commit loop does."""
        for future in self.held:
            if not future.done():
                future.set_result(kv_pb2.PutReply())
        self.held.clear()

    def _note(self, call: Call) -> None:
        self.calls.append(call)
        self.arrived.set()


class NoSnapshots:
    """Implements `SnapshotService`: there are no snapshots, and none can be created."""

    def create(
        self, request: admin_pb2.CreateSnapshotRequest, _call: Call
    ) -> Answer[admin_pb2.CreateSnapshotReply]:
        raise errors.Overloaded(f"no room for {request.name}", retry_after_ms=1)

    def renew(
        self, request: admin_pb2.RenewSnapshotRequest, _call: Call
    ) -> Answer[admin_pb2.RenewSnapshotReply]:
        raise errors.SnapshotNotFound(request.name)

    def list(
        self, _request: admin_pb2.ListSnapshotsRequest, _call: Call
    ) -> Answer[admin_pb2.ListSnapshotsReply]:
        return admin_pb2.ListSnapshotsReply()

    def delete(
        self, request: admin_pb2.DeleteSnapshotRequest, _call: Call
    ) -> Answer[admin_pb2.DeleteSnapshotReply]:
        raise errors.SnapshotNotFound(request.name)


class NoAccess:
    """Implements `AccessService` where nothing is enforced."""

    def who_am_i(
        self, _request: admin_pb2.WhoAmIRequest, call: Call
    ) -> Answer[admin_pb2.WhoAmIReply]:
        return admin_pb2.WhoAmIReply(principal=call.principal)

    def get_policy(
        self, _request: admin_pb2.GetAccessPolicyRequest, _call: Call
    ) -> Answer[admin_pb2.GetAccessPolicyReply]:
        return admin_pb2.GetAccessPolicyReply()

    def set_policy(
        self, request: admin_pb2.SetAccessPolicyRequest, _call: Call
    ) -> Answer[admin_pb2.SetAccessPolicyReply]:
        raise errors.PolicyChanged(f"it is not {request.policy.version}")


class MemoryAdmin:
    """Implements `AdminService`, and records the loads that it got."""

    missing_processes: Sequence[int] = ()  # of those that share the port

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.snapshots = NoSnapshots()
        self.access = NoAccess()

    def header(self) -> kv_pb2.ReplyHeader:
        return kv_pb2.ReplyHeader(seq=1)

    def ingest_sst(
        self, request: admin_pb2.IngestSstRequest, _call: Call
    ) -> Answer[admin_pb2.IngestSstReply]:
        already_applied = request.load_id in self.loads
        self.loads.append(request.load_id)
        return admin_pb2.IngestSstReply(already_applied=already_applied)

    def status(
        self, _request: admin_pb2.StatusRequest, _call: Call
    ) -> Answer[admin_pb2.StatusReply]:
        return admin_pb2.StatusReply(version="0.0.0-test")

    def stats(self, _request: admin_pb2.StatsRequest, _call: Call) -> Answer[admin_pb2.StatsReply]:
        return admin_pb2.StatsReply(processes=[admin_pb2.ProcessRequests(role="test")])

    def list_slow_calls(
        self, _request: admin_pb2.ListSlowCallsRequest, _call: Call
    ) -> Answer[admin_pb2.ListSlowCallsReply]:
        return admin_pb2.ListSlowCallsReply(missing_processes=self.missing_processes)

    def profile(
        self, request: admin_pb2.ProfileRequest, _call: Call
    ) -> Answer[admin_pb2.ProfileReply]:
        return profile_reply(request, kv_pb2.ReplyHeader)


class MemoryWatches:
    """Implements `WatchService`, and keeps its streams for tests to inspect."""

    def __init__(self) -> None:
        self.streams: list[MemoryStream] = []

    def open(
        self,
        _describe: Callable[[BaseException], kv_pb2.OperationError],
        _admit: Admit | None = None,
        *,
        principal: str = "",
    ) -> MemoryStream:
        assert not principal
        self.streams.append(MemoryStream())
        return self.streams[-1]


class MemoryStream:
    """Answers `WatchStream`: what is no create ends it."""

    def __init__(self) -> None:
        self._replies: asyncio.Queue[kv_pb2.WatchReply | ShaleError | None] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.left = asyncio.Event()
        self.may_leave = asyncio.Event()
        self.may_leave.set()
        self.leaving = asyncio.Event()

    async def read(
        self, requests: AsyncIterator[kv_pb2.WatchRequest], _tasks: asyncio.TaskGroup
    ) -> None:
        async for request in requests:
            if not request.HasField("create"):
                self.refuse(InvalidRequest("request", "is no create"))
                return
            reply = kv_pb2.WatchReply(watch_id=request.create.watch_id, opened_at_seq=1)
            self._replies.put_nowait(reply)
        self._replies.put_nowait(None)

    async def replies(self) -> AsyncIterator[kv_pb2.WatchReply]:
        while (reply := await self._replies.get()) is not None:
            if isinstance(reply, ShaleError):
                raise reply
            yield reply

    def refuse(self, error: ShaleError) -> None:
        self._replies.put_nowait(error)

    def close(self) -> None:
        self.closed.set()

    def end(self) -> None:
        self._replies.put_nowait(None)

    async def leave(self) -> None:
        self.leaving.set()
        await self.may_leave.wait()
        self.left.set()
