"""A watch: an asynchronous iterator over commits that survives broken connections.

Its events are commits, and progress: up to which sequence number all commits were delivered.
`shalekv_client.watch_stream` does the calls.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

from shalekv.v1 import kv_pb2
from shalekv_client.closing import AsyncCloseable
from shalekv_client.errors import ShaleKVError
from shalekv_client.results import Entry, entries_of, known

# Approximate memory of an event, and of a change, beside keys and values.
EVENT_OVERHEAD_BYTES = 200
CHANGE_OVERHEAD_BYTES = 300

# Events of one watch that wait to be taken. Beyond it, the watch is closed at the server until half
# of them are taken.
BUFFERED_BYTES_MAX = 4 * 1024 * 1024


class ChangeKind(enum.Enum):
    """The kind of a change to a key. The numbers are those of the protocol."""

    PUT = 1
    DELETE = 2
    DELETE_RANGE = 3  # to all keys of a range
    EXPIRED = 4  # the value has been hidden since `expire_at_ms`, and is removed now


@dataclass(frozen=True, slots=True)
class WatchChange:
    """One change of a commit."""

    kind: ChangeKind | None  # None: one unknown to this client
    key: bytes  # of a range delete: the first
    value: bytes = b""  # of a put
    expire_at_ms: int | None = None  # when the value expires, or has expired; None: never
    end: bytes = b""  # of a range delete: the first key after it; empty: to the last of all
    previous: Entry | None = None  # the value before, if it was asked for and there was one
    previous_unknown: bool = False  # it was asked for, but is not known

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the change."""
        before = self.previous
        before_bytes = len(before.key) + len(before.value) if before is not None else 0
        own_bytes = len(self.key) + len(self.value) + len(self.end)
        return CHANGE_OVERHEAD_BYTES + own_bytes + before_bytes


@dataclass(frozen=True, slots=True)
class WatchCommit:
    """One commit: all its changes inside the range, range deletes first, then by key."""

    seq: int
    wal_id: int  # the WAL object that holds it
    changes: tuple[WatchChange, ...]

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the event."""
        return EVENT_OVERHEAD_BYTES + sum(change.size_bytes for change in self.changes)


@dataclass(frozen=True, slots=True)
class WatchProgress:
    """All commits up to this sequence number were delivered."""

    seq: int

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the event."""
        return EVENT_OVERHEAD_BYTES


WatchEvent: TypeAlias = WatchCommit | WatchProgress


def changes_of(changes: Iterable[kv_pb2.WatchChange]) -> list[WatchChange]:
    """Decode the changes of one message."""
    return [_change(change) for change in changes]


def _change(change: kv_pb2.WatchChange) -> WatchChange:
    entry, before = change.entry, change.previous
    previous = None
    if change.HasField("previous"):
        (previous,) = entries_of([before])
    return WatchChange(
        kind=known(ChangeKind, change.kind),
        key=entry.key,
        value=entry.value,
        expire_at_ms=entry.expire_at_ms or None,
        end=change.end,
        previous=previous,
        previous_unknown=change.previous_unknown,
    )


class _EventQueue:
    """The events of one watch that wait to be taken."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._events: deque[WatchEvent] = deque()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: WatchEvent) -> bool:
        """Add an event; return whether more events may be added. Progress replaces progress."""
        last = self._events[-1] if self._events else None
        if isinstance(event, WatchProgress) and isinstance(last, WatchProgress):
            self._events[-1] = event
            return True
        self._events.append(event)
        self.held_bytes += event.size_bytes
        return self.held_bytes <= self._bytes_max

    def take(self) -> WatchEvent:
        """Remove and return the oldest event."""
        event = self._events.popleft()
        self.held_bytes -= event.size_bytes
        return event

    def clear(self) -> None:
        """Drop all events."""
        self._events.clear()
        self.held_bytes = 0

    @property
    def is_half_free(self) -> bool:
        """Return whether a watch that was parked should continue."""
        return self.held_bytes <= self._bytes_max // 2


class _State(enum.Enum):
    NEW = enum.auto()
    BEGUN = enum.auto()  # it is open, or its owner tries to open it
    CLOSED = enum.auto()  # by its user


class WatchOwner(Protocol):
    """The owner of watches, which opens them: `shalekv_client.watch_stream.WatchMultiplexer`."""

    def begin(self, watch: Watch) -> None:
        """Open a watch for the first time."""
        ...

    def go_on(self, watch: Watch) -> None:
        """Open a parked watch again."""
        ...

    def ack(self, watch: Watch) -> None:
        """Send the acknowledgement of the watch's consumer to the server."""
        ...

    async def end(self, watch: Watch) -> None:
        """Close a watch."""
        ...


class Watch(AsyncCloseable, AsyncIterator[WatchEvent]):
    """All commits to a range, in order, whole and exactly once. Iterate over it once.

        async with client.watch(prefix=b"user/") as watch:
            async for event in watch:
                ...

    Inside `async with` the watch is open: it delivers every commit that begins from then on.
    Without `async with`, asking for the first event opens it. When a connection breaks or a server
    fails, another is used, and the watch continues behind the last delivered commit; its user does
    not notice. Opening it for the first time fails as other calls do; after that it never gives up.

    Raises `WalCollected` when the commits that it needs are no longer in the WAL: read the state
    again, and watch from behind it. Raises `WatchTooSlow` when this program did not even read from
    its connections in time: watch again from `next_seq` on.
    """

    def __init__(
        self,
        owner: WatchOwner,
        create: kv_pb2.WatchCreate,
        *,
        buffered_bytes_max: int = BUFFERED_BYTES_MAX,
    ) -> None:
        """Create a watch that is not open; `Client.watch` does so. `create` has no id."""
        self.opened_at_seq: int | None = None  # the first commit it delivers; None: not open yet
        self.acked_seq = 0
        self.is_parked = False  # closed at the server until its user has taken events
        self.attempts = 0  # to open it that have failed, in a row
        self._owner = owner
        self._create = create
        self._undelivered_seq = create.start_seq  # the first undelivered commit; 0: not known
        self._untaken_seq = create.start_seq  # the first commit that was not taken; 0: not known
        self._events = _EventQueue(buffered_bytes_max)
        self._changed = asyncio.Event()
        self._failure: ShaleKVError | None = None
        self._state = _State.NEW

    @property
    def next_seq(self) -> int:
        """The `from_seq` with which another watch continues behind the last event taken.

        0: with the next commit.
        """
        return self._untaken_seq

    @property
    def is_over(self) -> bool:
        """Return whether the watch is closed or has failed."""
        return self._state is _State.CLOSED or self._failure is not None

    async def opened(self) -> int:
        """Wait until the watch is open; return the first sequence number that it covers."""
        self._begin()
        while self.opened_at_seq is None:
            self._check()
            await self._wait()
        return self.opened_at_seq

    async def __aenter__(self) -> Self:
        try:
            await self.opened()
        except BaseException:
            await self.aclose()
            raise
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        """Return the next event. Events that came before an error are returned before it."""
        self._begin()
        while not self._events:
            if self._state is _State.CLOSED:
                raise StopAsyncIteration
            self._check()
            await self._wait()
        return self._take()

    async def read(self) -> list[WatchEvent]:
        """Return the events that wait, at least one; none when the watch is closed.

        Raises as iterating does.
        """
        try:
            events = [await anext(self)]
        except StopAsyncIteration:
            return []
        while self._events:
            events.append(self._take())
        return events

    def ack(self, seq: int) -> None:
        """Acknowledge that the consumer has processed all commits up to `seq`.

        The acknowledgement is sent soon, again after a connection broke, and at the latest by
        `aclose`.
        """
        if not self._create.consumer:
            raise ValueError("only a watch with a consumer can acknowledge")
        if seq > self.acked_seq:
            self.acked_seq = seq
            if not self.is_over:
                self._owner.ack(self)

    async def aclose(self) -> None:
        """Close the watch; events that were not taken are dropped. A second call does nothing."""
        if self._state is _State.CLOSED:
            return
        was_open = self._state is _State.BEGUN and self._failure is None
        self._state = _State.CLOSED
        self._events.clear()
        self._changed.set()
        if was_open:
            await self._owner.end(self)

    def request(self, number: int) -> kv_pb2.WatchRequest:
        """Return the request that opens the watch where it has to continue, with id `number`."""
        request = kv_pb2.WatchRequest(create=self._create)
        request.create.watch_id = number
        request.create.start_seq = self._undelivered_seq
        return request

    def note_opened(self, seq: int) -> None:
        """Note that the server delivers from this commit on."""
        self.attempts = 0
        if self.opened_at_seq is None:
            self.opened_at_seq = seq
        if not self._undelivered_seq:
            self._undelivered_seq = seq
            if not self._untaken_seq:
                self._untaken_seq = seq
        self._changed.set()

    def deliver(self, event: WatchEvent) -> bool:
        """Keep `event` until it is taken; return whether more events may be delivered."""
        is_progress = isinstance(event, WatchProgress)  # may repeat the last sequence number
        if event.seq + is_progress < self._undelivered_seq or self.is_over:
            return True  # delivered before, by another server
        self._undelivered_seq = event.seq + 1
        self._changed.set()
        return self._events.put(event)

    def fail(self, reason: ShaleKVError) -> None:
        """End the watch with the error `reason`."""
        if not self.is_over:
            self._failure = reason
            self._changed.set()

    def _take(self) -> WatchEvent:
        event = self._events.take()
        self._untaken_seq = event.seq + 1
        if self.is_parked and self._events.is_half_free:
            self.is_parked = False
            if not self.is_over:
                self._owner.go_on(self)
        return event

    def _begin(self) -> None:
        if self._state is _State.NEW:
            self._state = _State.BEGUN
            self._owner.begin(self)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.again()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
