"""The queue of replies that the client of one stream of watches has not yet taken, in order.

Publishers check for space before they add a commit. So a queue exceeds its limit of bytes by at
most one commit, or one part of a commit, and by replies without a commit, which are small.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import NamedTuple

from shalekv.clock import Clock
from shalekv.errors import ShaleError, raise_if
from shalekv.format.coding import varint
from shalekv.protocol.entry import Entry, Kind
from shalekv.read.memory_budget import SMALL_BYTES, MemoryBudget
from shalekv.settings import STREAM_MESSAGE_BYTES_MAX
from shalekv.v1 import kv_pb2
from shalekv.watch.change_event import ChangeEvent, Previous, Unresolved
from shalekv.watch.previous import read_previous
from shalekv.watch.watch import Watch

EVENT_BYTES = 400  # memory for a reply without a commit
READ_AHEAD_COMMITS = 64  # queued commits whose previous values are read together
CHANGE_FRAME_BYTES = 16  # for the tag and length of a change in a commit
_COMMIT_TAG = b"\x22"  # field 4 of WatchReply, length-delimited
assert _COMMIT_TAG[0] >> 3 == kv_pb2.WatchReply.COMMIT_FIELD_NUMBER

_DELETE_RANGE = kv_pb2.WatchChange.KIND_DELETE_RANGE
_DELETE = kv_pb2.WatchChange.KIND_DELETE
_EXPIRED = kv_pb2.WatchChange.KIND_EXPIRED
_PUT = kv_pb2.WatchChange.KIND_PUT


class _QueuedReply(NamedTuple):
    watch: Watch | None  # None: a reply about a watch that was not opened, or is closed
    event: ChangeEvent | kv_pb2.WatchReply
    size_bytes: int


class _QueueState(enum.Enum):
    OPEN = enum.auto()
    ENDED = enum.auto()  # what is queued is still sent
    CLOSED = enum.auto()  # the client has gone


class WatchQueue:
    """The queued replies of one stream."""

    def __init__(
        self,
        budget: MemoryBudget,
        stream_bytes_max: int,
        clock: Clock,
        *,
        header: Callable[[], kv_pb2.ReplyHeader],
        now_ms: Callable[[], int],
    ) -> None:
        """`budget` is shared by all streams; `header` and `now_ms` are called for each reply."""
        self._budget = budget
        self._stream_bytes_max = stream_bytes_max
        self._clock = clock
        self._header = header
        self._now_ms = now_ms
        self._queued: deque[_QueuedReply] = deque()
        self._space_freed = asyncio.Event()
        self._changed = asyncio.Event()
        self._untaken_since_ms: float | None = None
        self._state = _QueueState.OPEN
        self._ended_by: ShaleError | None = None
        self.held_bytes = 0

    @property
    def is_closed(self) -> bool:
        """Return whether the client has gone: nothing more is queued."""
        return self._state is _QueueState.CLOSED

    def has_space(self, size_bytes: int) -> bool:
        """Return whether a reply of that size fits: always if the queue is empty."""
        if not self.held_bytes:
            return True
        if self.held_bytes + size_bytes > self._stream_bytes_max:
            return False
        # When the other streams use up the budget, each stream goes on with a small queue.
        return size_bytes <= self._budget.free_bytes or self.held_bytes + size_bytes <= SMALL_BYTES

    async def wait_for_space(self, size_bytes: int) -> None:
        """Wait until `has_space`. Waiters check again in FIFO order whenever space is freed."""
        while not self.is_closed and not self.has_space(size_bytes):
            self._space_freed.clear()
            await self._space_freed.wait()

    async def wait_until_half_free(self) -> None:
        """Wait until half of the queue is free: less is not worth a read from the store."""
        await self.wait_for_space(self._stream_bytes_max // 2)

    def stalled_ms(self) -> float:
        """Return for how long the client has not taken the next reply; 0: it waits for one."""
        since_ms = self._untaken_since_ms
        return 0.0 if since_ms is None else self._clock.monotonic_ms() - since_ms

    def put_commit(self, watch: Watch, commit: ChangeEvent) -> None:
        """Queue a commit, or a part of it. The caller checks `has_space` before."""
        self._put(_QueuedReply(watch, commit, commit.size_bytes))

    def put_event(self, watch: Watch | None, reply: kv_pb2.WatchReply) -> None:
        """Queue a reply without a header, even if there is no space."""
        error_bytes = len(reply.closed.message) if reply.WhichOneof("event") == "closed" else 0
        self._put(_QueuedReply(watch, reply, EVENT_BYTES + error_bytes))

    def drop(self) -> dict[Watch, int]:
        """Drop all queued commits; return the first of them for each watch."""
        first: dict[Watch, int] = {}
        kept: deque[_QueuedReply] = deque()
        for each in self._queued:
            if isinstance(each.event, ChangeEvent):
                self._hold(-each.size_bytes)
                if each.watch is not None:
                    first.setdefault(each.watch, each.event.seq)
            else:
                kept.append(each)
        self._queued = kept
        self._space_freed.set()
        return first

    def end(self, error: ShaleError | None) -> None:
        """End the queue: `replies` ends, or raises `error`, once all replies were taken."""
        if self._state is _QueueState.OPEN:
            self._state = _QueueState.ENDED
            self._ended_by = error
            self._changed.set()

    def close(self) -> None:
        """Drop everything, since the client has gone."""
        self._queued.clear()
        self._hold(-self.held_bytes)
        self._state = _QueueState.CLOSED
        self._space_freed.set()
        self._changed.set()

    async def replies(self) -> AsyncIterator[bytes]:
        """Yield the encoded replies. Raises the error passed to `end`, and as `read_previous`."""
        while True:
            self._changed.clear()
            if not self._queued:
                raise_if(self._ended_by)
                if self._state is not _QueueState.OPEN:
                    return
                await self._changed.wait()
                continue
            await self._read_previous()
            while self._queued and not _is_unread(self._queued[0]):
                taken = self._queued.popleft()
                for data in self._encoded(taken):
                    self._untaken_since_ms = self._clock.monotonic_ms()
                    yield data
                    self._untaken_since_ms = None
                self._hold(-taken.size_bytes)
                self._space_freed.set()

    def _put(self, reply: _QueuedReply) -> None:
        if self.is_closed:
            return
        self._hold(reply.size_bytes)
        self._queued.append(reply)
        self._changed.set()

    def _hold(self, more_bytes: int) -> None:
        if not self.is_closed:
            self.held_bytes += more_bytes
            self._budget.count(more_bytes)

    async def _read_previous(self) -> None:
        """Read from the levels the previous values that the next commits need."""
        if not _is_unread(self._queued[0]):
            return
        unread = [
            each.event
            for each in islice(self._queued, READ_AHEAD_COMMITS)
            if isinstance(each.event, ChangeEvent) and each.event.pinned is not None
        ]
        await read_previous(unread)

    def _encoded(self, taken: _QueuedReply) -> Iterator[bytes]:
        watch, event = taken.watch, taken.event
        if isinstance(event, ChangeEvent):
            if watch is not None and not watch.is_cancelled:
                yield from commit_replies(self._header(), watch.watch_id, event, self._now_ms())
            return
        event.header.CopyFrom(self._header())
        yield event.SerializeToString()


def _is_unread(reply: _QueuedReply) -> bool:
    return isinstance(reply.event, ChangeEvent) and reply.event.pinned is not None


def commit_replies(
    header: kv_pb2.ReplyHeader, watch_id: int, commit: ChangeEvent, now_ms: int
) -> Iterator[bytes]:
    """Encode a commit as replies: several if it does not fit into one message.

    The commit is encoded once for all watches that report it, unless it takes several messages.
    A previous value that has expired at `now_ms` is left out. REQUIRES: none is `UNREAD`.
    """
    frame = kv_pb2.WatchReply(header=header, watch_id=watch_id).SerializeToString()
    for body in _bodies(commit, now_ms):
        # Encoded fields of a message may be concatenated, so the body of the commit is shared.
        yield b"".join((frame, _COMMIT_TAG, varint(len(body)), body))


def _bodies(commit: ChangeEvent, now_ms: int) -> Iterator[bytes]:
    """Encode the commit as one or more `WatchCommit` messages."""
    if commit.encoded is not None:
        yield commit.encoded
        return
    message = kv_pb2.WatchCommit(seq=commit.seq, wal_id=commit.wal_id)
    size_bytes = 0
    is_whole = True
    for change in _changes(commit, now_ms):
        change_bytes = change.ByteSize() + CHANGE_FRAME_BYTES
        if size_bytes and size_bytes + change_bytes > STREAM_MESSAGE_BYTES_MAX:
            message.more = True
            yield message.SerializeToString()
            message = kv_pb2.WatchCommit(seq=commit.seq, wal_id=commit.wal_id)
            size_bytes = 0
            is_whole = False
        message.changes.append(change)
        size_bytes += change_bytes
    message.more = commit.more
    body = message.SerializeToString()
    if is_whole:
        commit.encoded = body
    yield body


def _changes(commit: ChangeEvent, now_ms: int) -> Iterator[kv_pb2.WatchChange]:
    if commit.previous is None:
        yield from map(_change, commit.changes)
        return
    for entry, previous in zip(commit.changes, commit.previous, strict=True):
        change = _change(entry)
        if entry.kind is not Kind.RANGE_TOMBSTONE:
            _set_previous(change, previous, now_ms)
        yield change


def _change(entry: Entry) -> kv_pb2.WatchChange:
    key, seq, kind, value, expire_at_ms = entry
    if kind is Kind.RANGE_TOMBSTONE:
        proto = kv_pb2.Entry(key=key, seq=seq)
        return kv_pb2.WatchChange(kind=_DELETE_RANGE, entry=proto, end=value)
    proto = kv_pb2.Entry(key=key, value=value, seq=seq, expire_at_ms=expire_at_ms)
    if kind is Kind.PUT:
        return kv_pb2.WatchChange(kind=_PUT, entry=proto)
    return kv_pb2.WatchChange(kind=_EXPIRED if expire_at_ms else _DELETE, entry=proto)


def _set_previous(change: kv_pb2.WatchChange, previous: Previous, now_ms: int) -> None:
    """Set the previous value; report it as unknown if it does not fit beside the new one."""
    if isinstance(previous, Unresolved):
        change.previous_unknown = True
        return
    if previous is None or not previous.is_visible(now_ms):
        return
    if change.ByteSize() + len(previous.value) > STREAM_MESSAGE_BYTES_MAX:
        change.previous_unknown = True
        return
    change.previous.key = previous.key
    change.previous.value = previous.value
    change.previous.seq = previous.seq
    change.previous.expire_at_ms = previous.expire_at_ms
