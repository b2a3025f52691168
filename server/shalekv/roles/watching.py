"""`KV.Watch`, as any process answers it that shows a prefix of the log."""

from __future__ import annotations

from collections.abc import Callable

from shalekv.clock import Clock
from shalekv.read.version import HeldTree
from shalekv.roles.watch_share import WatchShare
from shalekv.settings import WatchSettings
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv.watch.catch_up import CatchUp
from shalekv.watch.consumers import ConsumerLeases
from shalekv.watch.feed import CommitFeed
from shalekv.watch.history import History
from shalekv.watch.queue import WatchQueue
from shalekv.watch.stream import Describe, WatchStream
from shalekv.watch.watch import State


class Watches:
    """Implements `roles.service.WatchService`."""

    def __init__(
        self,
        feed: CommitFeed,
        history: History,
        settings: WatchSettings,
        clock: Clock,
        *,
        hold: Callable[[], HeldTree],
        header: Callable[[int, int | None], kv_pb2.ReplyHeader],
        now_ms: Callable[[], int],
        leases: ConsumerLeases | None = None,
    ) -> None:
        """`hold` is the tree that reads use now; `header` makes that of a reply; `now_ms` is
        logical time. Without `leases` no watch can have a consumer.
        """
        self._settings = settings
        self._clock = clock
        self._header = header
        self._now_ms = now_ms
        self._feed = feed
        catch_up = CatchUp(feed, history, hold, clock)
        self._share = WatchShare(feed, history, catch_up, leases, settings, clock)

    @property
    def held_bytes(self) -> int:
        """What waits to be taken, of all streams."""
        return self._share.room.used_bytes

    def open(self, describe: Describe) -> WatchStream:
        """A new stream; `describe` makes of an error what a client is told of it."""
        queue = WatchQueue(
            self._share.room,
            self._settings.watch_stream_bytes_max,
            self._clock,
            header=self._header_now,
            now_ms=self._now_ms,
        )
        return WatchStream(self._share, queue, describe)

    def status(self) -> admin_pb2.WatchStatus:
        """What there is, and what was done."""
        share = self._share
        return admin_pb2.WatchStatus(
            watches=share.watch_count,
            streams=len(share.streams),
            buffered_bytes=share.room.used_bytes,
            buffered_bytes_max=self._settings.watch_stream_bytes_max,
            commits_told=share.commits_told,
            catching_up=sum(stream.count(State.BEHIND) for stream in share.streams),
            cut=share.cut_count,
        )

    def _header_now(self) -> kv_pb2.ReplyHeader:
        position = self._feed.position
        return self._header(position.seq, position.wal_id)
