"""What waits to be taken by the client of one stream of watches, in the order of telling.

A stream holds no more than its bound, and one commit or a part of it: whoever has more to tell asks
for room before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import NamedTuple

from shalekv.clock import Clock
from shalekv.errors import ShaleError
from shalekv.protocol.entry import Entry, Kind
from shalekv.read.memory_budget import SMALL_BYTES, MemoryBudget
from shalekv.settings import STREAM_MESSAGE_BYTES_MAX
from shalekv.v1 import kv_pb2
from shalekv.watch.change_event import ChangeEvent, Lack, Previous
from shalekv.watch.previous import look_up
from shalekv.watch.watch import Watch

# --- watch_replies
# Replies of watches as bytes: a commit is encoded once, however many watches tell of it.


CHANGE_FRAME_BYTES = 16  # of a change in a commit: its tag and length
_COMMIT_TAG = b"\x22"  # field 4 of WatchReply, with a length
_LOW_BITS = 0x7F  # of each byte of a number of variable length
assert _COMMIT_TAG[0] >> 3 == kv_pb2.WatchReply.COMMIT_FIELD_NUMBER

_DELETE_RANGE = kv_pb2.WatchChange.KIND_DELETE_RANGE
_DELETE = kv_pb2.WatchChange.KIND_DELETE
_EXPIRED = kv_pb2.WatchChange.KIND_EXPIRED
_PUT = kv_pb2.WatchChange.KIND_PUT


def commit_replies(
    header: kv_pb2.ReplyHeader, watch_id: int, commit: ChangeEvent, now_ms: int
) -> Iterator[bytes]:
    """The replies that tell of a commit: several if it does not fit into one message.

    Values before that have expired at `now_ms` are none. REQUIRES: none is `UNREAD`.
    """
    frame = kv_pb2.WatchReply(header=header, watch_id=watch_id).SerializeToString()
    for body in _bodies(commit, now_ms):
        # Fields of a message may stand one after the other: the commit is what many share.
        yield b"".join((frame, _COMMIT_TAG, _varint(len(body)), body))


def _bodies(commit: ChangeEvent, now_ms: int) -> Iterator[bytes]:
    """The same commit as one message or more."""
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
        told = kv_pb2.Entry(key=key, seq=seq)
        return kv_pb2.WatchChange(kind=_DELETE_RANGE, entry=told, end=value)
    told = kv_pb2.Entry(key=key, value=value, seq=seq, expire_at_ms=expire_at_ms)
    if kind is Kind.PUT:
        return kv_pb2.WatchChange(kind=_PUT, entry=told)
    return kv_pb2.WatchChange(kind=_EXPIRED if expire_at_ms else _DELETE, entry=told)


def _set_previous(change: kv_pb2.WatchChange, previous: Previous, now_ms: int) -> None:
    """Tell the value before; one that does not fit beside the new one is not known."""
    if isinstance(previous, Lack):
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


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > _LOW_BITS:
        encoded.append(number & _LOW_BITS | ~_LOW_BITS & 0xFF)
        number >>= _LOW_BITS.bit_length()
    encoded.append(number)
    return bytes(encoded)


# --- queue


EVENT_BYTES = 400  # of a reply without a commit
LOOKED_UP_AT_ONCE = 64  # commits whose values before are read together


class _Waiting(NamedTuple):
    watch: Watch | None  # None: of a watch that never was
    event: ChangeEvent | kv_pb2.WatchReply
    size_bytes: int


class WatchQueue:
    """The replies of one stream."""

    def __init__(
        self,
        room: MemoryBudget,
        stream_bytes_max: int,
        clock: Clock,
        *,
        header: Callable[[], kv_pb2.ReplyHeader],
        now_ms: Callable[[], int],
    ) -> None:
        """All streams share `room`. `header` and `now_ms` are asked when a reply is taken."""
        self._all = room
        self._stream_bytes_max = stream_bytes_max
        self._clock = clock
        self._header = header
        self._now_ms = now_ms
        self._waiting: deque[_Waiting] = deque()
        self._room = asyncio.Event()
        self._changed = asyncio.Event()
        self._untaken_since_ms: float | None = None
        self._is_ended = False
        self._ended_by: ShaleError | None = None
        self.is_closed = False
        self.held_bytes = 0

    def has_room(self, size_bytes: int) -> bool:
        """Whether something of that size may wait, too: always if nothing else does."""
        if not self.held_bytes:
            return True
        if self.held_bytes + size_bytes > self._stream_bytes_max:
            return False
        # Where others leave nothing, a stream goes on with little.
        return size_bytes <= self._all.free_bytes or self.held_bytes + size_bytes <= SMALL_BYTES

    async def wait_for_room(self, size_bytes: int) -> None:
        """Wait until `has_room` says yes. Of those that wait nobody is served out of turn twice."""
        while not self.is_closed and not self.has_room(size_bytes):
            self._room.clear()
            await self._room.wait()

    async def wait_for_half(self) -> None:
        """Wait until so much was taken that it is worth while to read from the store."""
        await self.wait_for_room(self._stream_bytes_max // 2)

    def stalled_ms(self) -> float:
        """For how long the client has not taken the reply that is before it."""
        since_ms = self._untaken_since_ms
        return 0.0 if since_ms is None else self._clock.monotonic_ms() - since_ms

    def put_commit(self, watch: Watch, commit: ChangeEvent) -> None:
        """Let a commit, or a part of it, wait; there should be room."""
        self._put(_Waiting(watch, commit, commit.size_bytes))

    def put_event(self, watch: Watch | None, reply: kv_pb2.WatchReply) -> None:
        """Let a reply without a header wait, whatever room there is."""
        error_bytes = len(reply.closed.message) if reply.WhichOneof("event") == "closed" else 0
        self._put(_Waiting(watch, reply, EVENT_BYTES + error_bytes))

    def drop(self) -> dict[Watch, int]:
        """Forget all commits that wait; of each watch the first of them."""
        first: dict[Watch, int] = {}
        kept: deque[_Waiting] = deque()
        for each in self._waiting:
            if isinstance(each.event, ChangeEvent):
                self._hold(-each.size_bytes)
                if each.watch is not None:
                    first.setdefault(each.watch, each.event.seq)
            else:
                kept.append(each)
        self._waiting = kept
        self._room.set()
        return first

    def end(self, error: ShaleError | None) -> None:
        """Nothing more will come: `replies` ends, or raises `error`, when all was taken."""
        if not self._is_ended:
            self._is_ended = True
            self._ended_by = error
            self._changed.set()

    def close(self) -> None:
        """The client has gone: nothing is kept any more."""
        self._waiting.clear()
        self._hold(-self.held_bytes)
        self.is_closed = True
        self._room.set()
        self._changed.set()

    async def replies(self) -> AsyncIterator[bytes]:
        """What was told, one reply after the other. Raises as `end` and `look_up`."""
        while True:
            self._changed.clear()
            if not self._waiting:
                if self._ended_by is not None:
                    raise self._ended_by.with_traceback(None)  # or it would grow with each stream
                if self._is_ended or self.is_closed:
                    return
                await self._changed.wait()
                continue
            await self._look_up()
            while self._waiting and not _is_unread(self._waiting[0]):
                taken = self._waiting.popleft()
                for data in self._encoded(taken):
                    self._untaken_since_ms = self._clock.monotonic_ms()
                    yield data
                    self._untaken_since_ms = None
                self._hold(-taken.size_bytes)
                self._room.set()

    def _put(self, waiting: _Waiting) -> None:
        if self.is_closed:
            return
        self._hold(waiting.size_bytes)
        self._waiting.append(waiting)
        self._changed.set()

    def _hold(self, more_bytes: int) -> None:
        if not self.is_closed:
            self.held_bytes += more_bytes
            self._all.count(more_bytes)

    async def _look_up(self) -> None:
        """Read the values before the next commits that are in the levels."""
        if not _is_unread(self._waiting[0]):
            return
        unread = [
            each.event
            for each in islice(self._waiting, LOOKED_UP_AT_ONCE)
            if isinstance(each.event, ChangeEvent) and each.event.held is not None
        ]
        await look_up(unread)

    def _encoded(self, taken: _Waiting) -> Iterator[bytes]:
        watch, event = taken.watch, taken.event
        if isinstance(event, ChangeEvent):
            if watch is not None and not watch.is_cancelled:
                yield from commit_replies(self._header(), watch.watch_id, event, self._now_ms())
            return
        event.header.CopyFrom(self._header())
        yield event.SerializeToString()


def _is_unread(waiting: _Waiting) -> bool:
    return isinstance(waiting.event, ChangeEvent) and waiting.event.held is not None
