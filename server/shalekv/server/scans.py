"""What is answered to `Scan`: which view is read, from where, and how to go on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
)
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Self, TypeAlias, cast

from shalekv.clock import Clock
from shalekv.errors import ObjectNotFound, PageExpired, StreamTooSlow
from shalekv.protocol.entry import Entry, KeyRange
from shalekv.read.engine import ReadEngine
from shalekv.read.memory_budget import MemoryBudget, Share, Stalls
from shalekv.read.scan import scan_slices
from shalekv.read.version import OpenView
from shalekv.server import requests
from shalekv.server.freshness import Freshness, SnapshotReads
from shalekv.server.requests import (
    LINEARIZABLE,
    UNCOMMITTED,
    LevelValue,
    PageToken,
    decode_page_token,
)
from shalekv.server.service import Call
from shalekv.settings import KIB, LimitSettings
from shalekv.v1 import kv_pb2

# --- open_scan
# A scan that goes on: it can be ended from outside, to free what its view keeps in memory.


class OpenScan:
    """The slices of a scan. Nobody else may refer to them, or to the view."""

    def __init__(self, opened: OpenView, slices: AsyncGenerator[list[Entry], None]) -> None:
        """Nothing is read yet."""
        self._opened: OpenView | None = opened
        self._slices: AsyncGenerator[list[Entry], None] | None = slices
        self._is_running = False

    @property
    def opened(self) -> OpenView:
        """The view. Raises `PageExpired` when it was let go."""
        if self._opened is None:
            raise PageExpired(
                "this scan was ended: its view kept memory that writes need, and it was not soon "
                "taken to its end. Begin again behind the last key that has come"
            )
        return self._opened

    @property
    def is_let_go(self) -> bool:
        """Whether the view is gone."""
        return self._opened is None

    async def let_go(self) -> None:
        """End the scan: who asks for more gets `PageExpired`, never a short answer (I7)."""
        self._opened = None
        if not self._is_running:  # otherwise it ends when its slice has come
            await self.aclose()

    async def stop(self) -> None:
        """Read no more, but keep the view. REQUIRES: the caller asks for no more."""
        slices, self._slices = self._slices, None
        if slices is not None:
            await slices.aclose()

    async def aclose(self) -> None:
        """Read no more."""
        self._opened = None
        await self.stop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Entry]:
        _ = self.opened
        if self._slices is None:
            raise StopAsyncIteration
        self._is_running = True
        try:
            return await anext(self._slices)
        finally:
            self._is_running = False
            if self._opened is None:
                await self.aclose()


# --- open_views
# Views that are kept for the next page of a scan.


_ID_BITS = 64
# Who lost the connection with the last messages of a scan asks for them again soon.
ENDED_TTL_MS = 5_000


class OpenViews:
    """At most `scan_view_count_max` views, each for `scan_view_ttl_ms` after its last use."""

    def __init__(self, limits: LimitSettings, random: Random) -> None:
        """Ids are random, so that those of another process are not mistaken for ours."""
        self._limits = limits
        self._random = random
        self._views: dict[int, OpenView] = {}  # that which was used longest ago comes first
        self._expiries: dict[int, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._views)

    def keep(self, view: OpenView, view_id: int | None = None) -> int:
        """Keep a view from now on, under its id if it has one already; returns the id."""
        if view_id is None:
            view_id = self._random.getrandbits(_ID_BITS)
        self._drop(view_id)
        if len(self._views) >= self._limits.scan_view_count_max:
            self._drop(next(iter(self._views)))
        self._views[view_id] = view
        self._expire_after(self._limits.scan_view_ttl_ms, view_id)
        return view_id

    def end(self, view_id: int) -> None:
        """The scan has come to its end: its view is the first to go, and not kept for long."""
        view = self._views.pop(view_id, None)
        if view is not None:
            self._views = {view_id: view} | self._views
            self._expiries.pop(view_id).cancel()
            self._expire_after(min(ENDED_TTL_MS, self._limits.scan_view_ttl_ms), view_id)

    def find(self, view_id: int) -> OpenView:
        """The view with this id. Raises `PageExpired`."""
        found = self._views.get(view_id)
        if found is None:
            raise PageExpired(
                "the view of this page token is gone: the server was started again, or kept it "
                f"for the {self._limits.scan_view_ttl_ms} ms of scan_view_ttl_ms, or had more than "
                f"the {self._limits.scan_view_count_max} of scan_view_count_max to keep. Begin the "
                "scan again"
            )
        return found

    def drop_oldest(self) -> bool:
        """Let go of the view that was used longest ago; whether there was one."""
        for view_id in self._views:
            self._drop(view_id)
            return True
        return False

    def close(self) -> None:
        """Let go of all of them."""
        for view_id in list(self._views):
            self._drop(view_id)

    def _expire_after(self, ttl_ms: int, view_id: int) -> None:
        loop = asyncio.get_running_loop()
        self._expiries[view_id] = loop.call_later(ttl_ms / 1_000, self._drop, view_id)

    def _drop(self, view_id: int) -> None:
        if self._views.pop(view_id, None) is not None:
            self._expiries.pop(view_id).cancel()


# --- scan_stream
# Cutting a scan into messages: by size, by the limits of the request, and by turns.


# What an entry costs in a message beside key and value, at most: five tags, 5 + 3 + 5 bytes of
# lengths (of entry, key and value), and two numbers of up to 10 bytes.
ENTRY_FRAME_BYTES = 40
MESSAGE_COPIES = 2  # as a message, and as the bytes that the transport has not sent yet


async def scan_messages(
    slices: AsyncIterable[list[Entry]],
    request: kv_pb2.ScanRequest,
    header: kv_pb2.ReplyHeader,
    outlet: Outlet,
    *,
    clock: Clock,
    next_page: Callable[[bytes], bytes],
) -> AsyncGenerator[kv_pb2.ScanReply, None]:
    """The replies to a scan. REQUIRES: `slices` hold visible entries in order.

    A message is cut before it passes what `outlet` has room for; an entry that is larger stands
    alone, and waits for room. The last message tells whether a limit has ended the scan, and then
    has the token that `next_page` makes of the last key; of a scan that is resumable all others
    have one, too. Other tasks run between two slices, and nothing is read ahead of what the caller
    has taken. Raises `Overloaded` and `StreamTooSlow`.
    """
    reply = kv_pb2.ScanReply(header=header)
    reply_bytes = count = total_bytes = 0
    last_key = b""
    with outlet:
        async for entries in slices:
            for entry in entries:
                if _is_ended(request, count, total_bytes):
                    reply.more = True
                    reply.page_token = next_page(last_key)
                    outlet.offer(reply_bytes)
                    yield reply
                    outlet.taken()
                    return
                value = b"" if request.keys_only else entry.value
                size_bytes = len(entry.key) + len(value) + ENTRY_FRAME_BYTES
                if reply_bytes and reply_bytes + size_bytes > outlet.bytes_max:
                    if request.resumable:
                        reply.page_token = next_page(last_key)
                    outlet.offer(reply_bytes)
                    yield reply
                    outlet.taken()
                    reply, reply_bytes = kv_pb2.ScanReply(header=header), 0
                if not reply_bytes:
                    await outlet.begin(size_bytes)
                reply.entries.add(
                    key=entry.key, value=value, seq=entry.seq, expire_at_ms=entry.expire_at_ms
                )
                reply_bytes += size_bytes
                last_key = entry.key
                count += 1
                total_bytes += len(entry.key) + len(value)
            await clock.sleep_ms(0)
        outlet.offer(reply_bytes)
        yield reply
        outlet.taken()


class Outlet:
    """Memory that one scan holds for its client: room for one message after the other."""

    def __init__(
        self,
        room: MemoryBudget,
        *,
        message_bytes: int,
        wait_ms: int,
        close: Callable[[], Awaitable[None]],
        call: Call,
    ) -> None:
        """When it is ended for others, it closes what is read by `close`, and then the `call`."""
        self._share = Share(room)
        self._stalls = room.stalls
        self._message_bytes = message_bytes
        self._wait_ms = wait_ms
        self._close = close
        self._call = call
        self._ended_by: StreamTooSlow | None = None
        self.bytes_max = 0  # of the message that was begun

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stalls is not None:
            self._stalls.taken(self)
        self._share.give_back()

    async def begin(self, needed_bytes: int) -> None:
        """Take room for the next message, which begins with so many bytes."""
        await self._share.take(
            MESSAGE_COPIES * needed_bytes,
            MESSAGE_COPIES * self._message_bytes,
            wait_ms=self._wait_ms,
        )
        self.bytes_max = min(self._share.taken_bytes // MESSAGE_COPIES, self._message_bytes)

    def offer(self, size_bytes: int) -> None:
        """The message has become so large, and the client may take it."""
        self._share.keep(MESSAGE_COPIES * size_bytes)
        if self._stalls is not None:
            self._stalls.offer(self, size_bytes)

    def taken(self) -> None:
        """The client has taken the message. Raises what has ended the scan meanwhile."""
        if self._ended_by is not None:
            raise self._ended_by
        if self._stalls is not None:
            self._stalls.taken(self)
        self._share.give_back()

    async def end(self, error: StreamTooSlow) -> None:
        """Implements `Stream`. REQUIRES: a message waits to be taken."""
        self._ended_by = error
        self._share.give_back()
        try:
            await self._close()
        finally:
            if self._call.end is not None:
                self._call.end(error)


def _is_ended(request: kv_pb2.ScanRequest, count: int, total_bytes: int) -> bool:
    """Whether a limit of the request is reached."""
    by_count = 0 < request.limit <= count
    by_bytes = 0 < request.limit_bytes <= total_bytes
    return by_count or by_bytes


# --- scans


SCAN_AHEAD_BYTES = 64 * KIB  # a block of each source or so, which no scan can do without
# A scan whose view keeps too much is ended when a message was not taken for so long,
UNTAKEN_MS = 100
# ... or when it has not come to its end by then: less than writes wait for room.
GOING_ON_MS = 500
LOOK_MS = 5  # between two looks whether scans have come to their end
Header: TypeAlias = Callable[[int, int | None], kv_pb2.ReplyHeader]


@dataclass(slots=True)
class Kept:
    """Whether a view of a scan is kept, and the scan has come to its end."""

    view_id: int | None = None
    is_ended: bool = False


class Scans:
    """Scans of a `ReadEngine`."""

    def __init__(
        self,
        engine: ReadEngine,
        limits: LimitSettings,
        clock: Clock,
        random: Random,
        *,
        freshness: Freshness,
        snapshots: SnapshotReads,
        header: Header,
    ) -> None:
        """`header` makes that of a reply, of a sequence number and a WAL id."""
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._freshness = freshness
        self._snapshots = snapshots
        self._header = header
        self._views = OpenViews(limits, random)
        self._stalls = Stalls(clock, limits.result_stalled_ms)
        # For messages that were not taken.
        self.room = MemoryBudget(limits.result_bytes_max, self._stalls)
        self._database_id = engine.database_id
        # Since when a message waits to be taken; None: it is being read. In the order of beginning.
        self._open_scans: dict[OpenScan, float | None] = {}
        engine.shed_views = self.shed

    async def shed(self) -> None:
        """Let go of views until they keep little in memory that is compacted, the oldest first.

        First those that wait for a next page, then those of scans whose clients do not take what
        was read: these end with an error. Scans that go on are given time to come to their end.
        """
        while self._keep_too_much() and self._views.drop_oldest():
            pass
        late_ms = self._clock.monotonic_ms() + GOING_ON_MS
        while self._keep_too_much():
            now_ms = self._clock.monotonic_ms()
            for scan, waits_since_ms in list(self._open_scans.items()):
                is_stalled = waits_since_ms is not None and now_ms - waits_since_ms >= UNTAKEN_MS
                if self._keep_too_much() and (is_stalled or now_ms >= late_ms):
                    await scan.let_go()
            if now_ms >= late_ms:
                return
            await self._clock.sleep_ms(LOOK_MS)

    def _keep_too_much(self) -> bool:
        return self._engine.memtable.held_bytes > self._engine.held_bytes_max

    @property
    def views(self) -> OpenViews:
        """The views that are kept for next pages."""
        return self._views

    def scan(
        self, request: kv_pb2.ScanRequest, level: LevelValue, call: Call
    ) -> AsyncIterator[kv_pb2.ScanReply]:
        """Read a range at one sequence number and one logical time."""
        keys = requests.key_range(request.range)
        token = None
        if request.page_token:
            token = decode_page_token(self._database_id, request, keys)
        if request.header.snapshot_id:
            return self._at_snapshot(request, keys, token, call)
        return self._at_view(request, keys, token, level, call)

    async def _at_snapshot(
        self, request: kv_pb2.ScanRequest, keys: KeyRange, token: PageToken | None, call: Call
    ) -> AsyncGenerator[kv_pb2.ScanReply, None]:
        """Nothing is kept for it here: its tokens name the snapshot, and any server goes on."""
        snapshots, snapshot_id = self._snapshots, request.header.snapshot_id
        opened = await snapshots.open(request.header)
        rest = keys if token is None else token.rest(keys, reverse=request.reverse)
        slices = snapshots.slices(snapshot_id, opened, rest, reverse=request.reverse)

        def next_page(last_key: bytes) -> bytes:
            return PageToken(snapshot_id, last_key).encode(self._database_id, request, keys)

        header = snapshots.header(opened.view)
        async with self._ahead(opened) as ahead, aclosing(slices):
            outlet = self._outlet(slices.aclose, ahead, call)
            messages = self._messages(slices, request, header, outlet, next_page)
            async with aclosing(messages):
                async for message in messages:
                    yield message

    async def _at_view(
        self,
        request: kv_pb2.ScanRequest,
        keys: KeyRange,
        token: PageToken | None,
        level: LevelValue,
        call: Call,
    ) -> AsyncGenerator[kv_pb2.ScanReply, None]:
        """Of a view that is the newest when the scan begins, and kept for those who come back."""
        kept = Kept()
        rest = keys
        if token is None:
            staleness_ms = self._freshness.check(request.header)
            if staleness_ms is None:
                staleness_ms = await self._freshness.wait(request.header, call)
            opened = await self._open(level, staleness_ms)
        else:
            kept.view_id = cast("int", token.view)
            opened = self._views.find(kept.view_id)
            self._views.keep(opened, kept.view_id)
            rest = token.rest(keys, reverse=request.reverse)
            staleness_ms = math.ceil(self._clock.monotonic_ms() - opened.fresh_ms)
        header = self._header(opened.view.seq, opened.view.wal_id)
        header.staleness_ms = staleness_ms
        ahead = self._ahead(opened)
        scan = OpenScan(opened, self._slices(opened, rest, reverse=request.reverse))
        del opened  # which `scan` may let go

        def next_page(last_key: bytes) -> bytes:
            kept.view_id = self._views.keep(scan.opened, kept.view_id)
            return PageToken(kept.view_id, last_key).encode(self._database_id, request, keys)

        self._open_scans[scan] = None
        try:
            async with aclosing(scan), ahead as share:  # it all goes with the caller
                outlet = self._outlet(scan.stop, share, call)
                messages = self._messages(scan, request, header, outlet, next_page)
                async with aclosing(messages):
                    with self._left(scan, kept, is_resumable=request.resumable):
                        async for message in messages:
                            self._open_scans[scan] = self._clock.monotonic_ms()
                            yield message
                            self._open_scans[scan] = None
                            kept.is_ended = not message.page_token
        finally:
            del self._open_scans[scan]

    @contextmanager
    def _left(self, scan: OpenScan, kept: Kept, *, is_resumable: bool) -> Iterator[None]:
        """What becomes of the view of a resumable scan when the caller goes."""
        try:
            yield
        finally:
            if is_resumable and kept.view_id is not None:
                if kept.is_ended:
                    self._views.end(kept.view_id)
                elif not scan.is_let_go:  # from now on it has all its time to come back
                    self._views.keep(scan.opened, kept.view_id)

    def _messages(
        self,
        slices: AsyncIterable[list[Entry]],
        request: kv_pb2.ScanRequest,
        header: kv_pb2.ReplyHeader,
        outlet: Outlet,
        next_page: Callable[[bytes], bytes],
    ) -> AsyncGenerator[kv_pb2.ScanReply, None]:
        return scan_messages(
            slices, request, header, outlet, clock=self._clock, next_page=next_page
        )

    def _outlet(
        self, stop_reading: Callable[[], Awaitable[None]], ahead: Share | None, call: Call
    ) -> Outlet:
        async def close() -> None:
            if ahead is not None:
                ahead.give_back()
            await stop_reading()

        return Outlet(
            self.room,
            message_bytes=self._limits.scan_message_bytes,
            wait_ms=self._limits.result_wait_ms,
            close=close,
            call=call,
        )

    def _ahead(self, opened: OpenView) -> AbstractAsyncContextManager[Share | None]:
        """Room to read the levels, of which there is little where many scans stand still."""
        held = opened.view.held
        if held is None:
            return nullcontext()
        wait_ms = self._limits.result_wait_ms
        return held.ssts.ahead.held(SCAN_AHEAD_BYTES, wait_ms=wait_ms, stalls=self._stalls)

    async def _slices(
        self, opened: OpenView, keys: KeyRange, *, reverse: bool
    ) -> AsyncGenerator[list[Entry], None]:
        view = opened.view
        slices = scan_slices(
            view, start=keys.start, end=keys.end, reverse=reverse, now_ms=opened.now_ms
        )
        try:
            async with aclosing(slices):
                async for entries in slices:
                    yield entries
        except ObjectNotFound as missing:
            if view.held is None:
                raise
            raise await self._engine.explain(missing, view.held) from missing

    async def _open(self, level: LevelValue, staleness_ms: int) -> OpenView:
        """The newest view of the level; `staleness_ms` is that of the state at this moment."""
        engine = self._engine
        fresh_ms = self._clock.monotonic_ms() - staleness_ms
        if level == LINEARIZABLE:
            await engine.confirm()
        if level == UNCOMMITTED:
            view = await engine.newest_view()
        else:
            view = await engine.committed_view()
        return OpenView(view, engine.time.now_ms(), fresh_ms)
