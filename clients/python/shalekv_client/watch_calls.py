"""Where a client's watches are told from: one of its servers, and another when that one fails."""

from __future__ import annotations

from shalekv.v1 import kv_pb2
from shalekv_client.closing import AsyncClosing
from shalekv_client.errors import ShaleKVError
from shalekv_client.fleet import Fleet
from shalekv_client.policies import Destination
from shalekv_client.retry import RetryPolicy
from shalekv_client.servers import Server
from shalekv_client.watch import BUFFERED_BYTES_MAX, Watch
from shalekv_client.watch_stream import Hear, WatchCall
from shalekv_client.watching import Watching


class WatchCalls(AsyncClosing):
    """The watches of a client, at any of its servers: all of them tell the same."""

    def __init__(self, fleet: Fleet, *, policy: RetryPolicy, timeout_ms: int) -> None:
        """A watch is open after `timeout_ms`, or fails."""
        self._fleet = fleet
        self._timeout_ms = timeout_ms
        self._server: Server | None = None  # that was asked last
        self._watching = Watching(
            self._open_call, address=fleet.address, policy=policy, timeout_ms=timeout_ms
        )

    def watch(
        self,
        *,
        start: bytes,
        end: bytes,
        prefix: bytes,
        from_seq: int,
        previous: bool,
        consumer: str,
        buffered_bytes_max: int = BUFFERED_BYTES_MAX,
    ) -> Watch:
        """A watch that is not open yet; see `Client.watch`."""
        create = kv_pb2.WatchCreate(
            range=kv_pb2.KeyRange(start=start, end=end, prefix=prefix),
            start_seq=from_seq,
            previous_value=previous,
            consumer=consumer,
        )
        return Watch(self._watching, create, buffered_bytes_max=buffered_bytes_max)

    async def aclose(self) -> None:
        """End all watches; those that somebody waits for fail."""
        await self._watching.aclose()

    async def _open_call(self, reason: ShaleKVError | None) -> tuple[str, WatchCall, Hear]:
        if self._server is not None and reason is not None:
            self._fleet.failed(self._server, reason, Destination.BY_POLICY)
        server = self._server = await self._fleet.pick(Destination.BY_POLICY, self._timeout_ms)
        return server.address, server.kv.Watch(), server.heard
