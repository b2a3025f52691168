"""A watch: an asynchronous iterator over commits that goes on across connections."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

from shalekv.v1 import kv_pb2
from shalekv_client.closing import AsyncClosing
from shalekv_client.errors import ShaleKVError
from shalekv_client.results import Entry, entries_of, known

# --- watch_events
# What a watch tells: commits, and how far everything was told.


# What an event holds beside keys and values, and what a change does, about.
EVENT_OVERHEAD_BYTES = 200
CHANGE_OVERHEAD_BYTES = 300


class ChangeKind(enum.Enum):
    """What happened to a key. The numbers are the wire's."""

    PUT = 1
    DELETE = 2
    DELETE_RANGE = 3  # to all keys of a range
    EXPIRED = 4  # the value was hidden since `expire_at_ms`, and is removed now


@dataclass(frozen=True, slots=True)
class WatchChange:
    """One change of a commit."""

    kind: ChangeKind | None  # None: one unknown to this client
    key: bytes  # of a range delete: the first
    value: bytes = b""  # of a put
    expire_at_ms: int | None = None  # when the value expires, or has expired; None: never
    end: bytes = b""  # of a range delete: the first key after it; empty: to the last of all
    previous: Entry | None = None  # the value before, if it was asked for and there was one
    previous_unknown: bool = False  # it was asked for, and nobody knows whether there was one

    @property
    def size_bytes(self) -> int:
        """Memory that it holds, about."""
        before = self.previous
        before_bytes = len(before.key) + len(before.value) if before is not None else 0
        own_bytes = len(self.key) + len(self.value) + len(self.end)
        return CHANGE_OVERHEAD_BYTES + own_bytes + before_bytes


@dataclass(frozen=True, slots=True)
class WatchCommit:
    """One commit: all of its changes inside the range, by key, deletes of ranges first."""

    seq: int
    wal_id: int  # the WAL object that holds it
    changes: tuple[WatchChange, ...]

    @property
    def size_bytes(self) -> int:
        """Memory that it holds, about."""
        return EVENT_OVERHEAD_BYTES + sum(change.size_bytes for change in self.changes)


@dataclass(frozen=True, slots=True)
class WatchProgress:
    """Every commit up to this sequence number was told."""

    seq: int

    @property
    def size_bytes(self) -> int:
        """Memory that it holds, about."""
        return EVENT_OVERHEAD_BYTES


WatchEvent: TypeAlias = WatchCommit | WatchProgress


def changes_of(changes: Iterable[kv_pb2.WatchChange]) -> list[WatchChange]:
    """The changes of one message."""
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


# --- watch


# Events of one watch that wait to be taken. Past it the server is asked to tell this watch nothing
# more, until half of them are taken.
BUFFERED_BYTES_MAX = 4 * 1024 * 1024


class Watches(Protocol):
    """Where watches are kept: `shalekv_client.watch_stream.Watching`."""

    def begin(self, watch: Watch) -> None:
        """Open a watch for the first time."""
        ...

    def go_on(self, watch: Watch) -> None:
        """Open a watch again that was parked."""
        ...

    def ack(self, watch: Watch) -> None:
        """Tell the server what the watch's consumer has acknowledged."""
        ...

    async def end(self, watch: Watch) -> None:
        """Close a watch."""
        ...


class Watch(AsyncClosing, AsyncIterator[WatchEvent]):
    """Every commit to a range in order, whole and exactly once. Iterate over it once.

        async with client.watch(prefix=b"user/") as watch:
            async for event in watch:
                ...

    Inside `async with` it is open: it tells of every commit that begins from then on. Without it
    the first event that is asked for opens it. A connection that breaks, or a server that goes
    away, is replaced by another, and the watch goes on behind the last commit that it was told;
    nobody sees that. Until it was open once it gives up as other calls do; after that never.

    Raises `WalCollected` when the commits that it needs are no longer in the WAL: read the state
    again, and watch from behind it. Raises `WatchTooSlow` when this program did not even read from
    its connections in time: watch again from `next_seq` on.
    """

    def __init__(
        self,
        watches: Watches,
        create: kv_pb2.WatchCreate,
        *,
        buffered_bytes_max: int = BUFFERED_BYTES_MAX,
    ) -> None:
        """As `Client.watch` makes it; `create` is without an id."""
        self.opened_at_seq: int | None = None  # the first commit that it tells; None: not open yet
        self.acked_seq = 0
        self.is_parked = False  # the server is to tell nothing until there is room
        self.attempts = 0  # in vain to open it, in a row
        self._watches = watches
        self._create = create
        self._buffered_bytes_max = buffered_bytes_max
        self._told_seq = create.start_seq  # the first commit that was not told; 0: not known
        self._taken_seq = create.start_seq  # the same of what was taken
        self._events: deque[WatchEvent] = deque()
        self._held_bytes = 0
        self._news = asyncio.Event()
        self._failure: ShaleKVError | None = None
        self._is_begun = False
        self._is_closed = False

    @property
    def next_seq(self) -> int:
        """Where another watch goes on behind the last event that was taken; 0: with what comes."""
        return self._taken_seq

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be told."""
        return self._is_closed or self._failure is not None

    async def opened(self) -> int:
        """Wait until it is open: the first sequence number that it tells of."""
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
        """The next event. What was told before an error comes before the error."""
        self._begin()
        while not self._events:
            if self._is_closed:
                raise StopAsyncIteration
            self._check()
            await self._wait()
        return self._take()

    async def read(self) -> list[WatchEvent]:
        """The events that wait, at least one; none when the watch is closed. Raises as above."""
        try:
            events = [await anext(self)]
        except StopAsyncIteration:
            return []
        while self._events:
            events.append(self._take())
        return events

    def ack(self, seq: int) -> None:
        """Tell that the consumer has processed all up to `seq`, and needs it no more.

        The server is told soon, again after a connection broke, and at the latest by `aclose`.
        """
        if not self._create.consumer:
            raise ValueError("only a watch with a consumer can acknowledge")
        if seq > self.acked_seq:
            self.acked_seq = seq
            if not self.is_over:
                self._watches.ack(self)

    async def aclose(self) -> None:
        """Close the watch; what was not taken is dropped. Again, it does nothing."""
        if self._is_closed:
            return
        was_open = self._is_begun and self._failure is None
        self._is_closed = True
        self._events.clear()
        self._news.set()
        if was_open:
            await self._watches.end(self)

    def request(self, number: int) -> kv_pb2.WatchRequest:
        """What opens it, where it has to go on, with the number `number`."""
        request = kv_pb2.WatchRequest(create=self._create)
        request.create.watch_id = number
        request.create.start_seq = self._told_seq
        return request

    def note_opened(self, seq: int) -> None:
        """The server will tell from this commit on."""
        self.attempts = 0
        if self.opened_at_seq is None:
            self.opened_at_seq = seq
        if not self._told_seq:
            self._told_seq = seq
            if not self._taken_seq:
                self._taken_seq = seq
        self._news.set()

    def tell(self, event: WatchEvent) -> bool:
        """Keep `event` until it is taken; whether there is room for more."""
        is_progress = isinstance(event, WatchProgress)  # may say again how far all was told
        if event.seq + is_progress < self._told_seq or self.is_over:
            return True  # told by another server before
        self._told_seq = event.seq + 1
        last = self._events[-1] if self._events else None
        if is_progress and isinstance(last, WatchProgress):
            self._events[-1] = event
            return True
        self._events.append(event)
        self._held_bytes += event.size_bytes
        self._news.set()
        return self._held_bytes <= self._buffered_bytes_max

    def fail(self, reason: ShaleKVError) -> None:
        """Nothing more comes, because of `reason`."""
        if not self.is_over:
            self._failure = reason
            self._news.set()

    def _take(self) -> WatchEvent:
        event = self._events.popleft()
        self._held_bytes -= event.size_bytes
        self._taken_seq = event.seq + 1
        if self.is_parked and self._held_bytes <= self._buffered_bytes_max // 2:
            self.is_parked = False
            if not self.is_over:
                self._watches.go_on(self)
        return event

    def _begin(self) -> None:
        if not self._is_begun and not self._is_closed:
            self._is_begun = True
            self._watches.begin(self)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.again()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()
