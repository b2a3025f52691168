"""`Scan` and `Count` of the writer and of readers: which view is read, messages, next pages.

A scan reads one view: that of a snapshot, the newest one, or the view that was kept for its page
token. `Scans` opens or finds it, `server.replies.scans` cuts the entries into messages, `OpenViews`
keeps views for next pages. A view keeps compacted entries in memory, and messages that the client
does not read take memory as well; both are bounded, so a scan can be ended in the middle: by
`OpenScan.expire` to free its view, by `ReplyBuffer.end` to free its messages.

A count is a scan that sends one number in place of messages.
"""

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
from functools import partial
from random import Random
from typing import Self, cast

from shalekv.clock import Clock
from shalekv.errors import ObjectNotFound, PageExpired
from shalekv.protocol.entry import Entry, KeyRange
from shalekv.read.engine import ReadEngine
from shalekv.read.memory_budget import MemoryBudget, Share, Stalls
from shalekv.read.scan import scan_slices
from shalekv.read.version import OpenView
from shalekv.server import requests
from shalekv.server.freshness import Freshness, SnapshotReads, entries_wanted
from shalekv.server.replies.gets import EncodedHeaders
from shalekv.server.replies.scans import ReplyBuffer, ScanMessage, scan_messages
from shalekv.server.requests import (
    LINEARIZABLE,
    UNCOMMITTED,
    LevelValue,
    PageSeal,
    PageToken,
)
from shalekv.server.service import Call
from shalekv.settings import KIB, LimitSettings
from shalekv.store.reachability import Reachability
from shalekv.v1 import kv_pb2

# A scan that waits for memory is refused after `RESULT_WAIT_MS`, but not before the streams that
# stall have been ended twice over, so that it gets their memory.
RESULT_WAIT_MS = 10_000
STALLS_WAITED = 2  # times `result_stalled_ms`
# Time for which a view is kept after the end of its scan: a client that lost the connection with
# the last messages of a scan asks for them again soon.
ENDED_TTL_MS = 5_000
SCAN_AHEAD_BYTES = 64 * KIB  # about a block of each source, which every scan needs
# A scan whose view keeps too much in memory is ended when its client has not read a message for
# this long,
UNREAD_MS = 100
# or when it has not ended after this time, which is less than writes wait for admission.
SCAN_GRACE_MS = 500
POLL_MS = 5  # between two checks whether such scans have ended
_VIEW_ID_BITS = 64


class OpenScan:
    """A running scan: the slices of a view. It can be ended from outside, to free the view.

    No other object may refer to the slices or to the view.
    """

    def __init__(self, opened: OpenView, slices: AsyncGenerator[list[Entry], None]) -> None:
        """Begin at the first slice; nothing is read yet."""
        self._opened: OpenView | None = opened
        self._slices: AsyncGenerator[list[Entry], None] | None = slices
        self._is_running = False

    @property
    def opened(self) -> OpenView:
        """The view. Raises `PageExpired` after `expire`."""
        if self._opened is None:
            raise PageExpired(
                "this scan was ended: its view kept memory that writes need, and its client did "
                "not read it to the end soon enough. Begin again behind the last key received"
            )
        return self._opened

    @property
    def is_expired(self) -> bool:
        """True if the view is gone."""
        return self._opened is None

    async def expire(self) -> None:
        """Free the view: the next slice raises `PageExpired`, the scan never ends early (I7)."""
        self._opened = None
        if not self._is_running:  # otherwise `__anext__` closes it when its slice has come
            await self.aclose()

    async def stop(self) -> None:
        """Stop reading, but keep the view. REQUIRES: the caller asks for no more slices."""
        slices, self._slices = self._slices, None
        if slices is not None:
            await slices.aclose()

    async def aclose(self) -> None:
        """Stop reading, and free the view."""
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


class OpenViews:
    """The views that scans use now, and those that are kept for their next pages.

    At most `scan_view_count_max` are kept, each for `scan_view_ttl_ms` after its last use.
    """

    def __init__(self, limits: LimitSettings, clock: Clock, random: Random) -> None:
        """Keep no views yet. Ids are random, so that no other process gives out the same."""
        self._limits = limits
        self._clock = clock
        self._random = random
        self._views: dict[int, OpenView] = {}  # the least recently used first
        self._expiries: dict[int, asyncio.TimerHandle] = {}
        # Running scans in the order of their beginning, with the monotonic time in ms since when a
        # message waits to be read; None: no message waits.
        self._scans: dict[OpenScan, float | None] = {}

    def __len__(self) -> int:
        return len(self._views)

    def keep(self, view: OpenView, view_id: int | None = None) -> int:
        """Keep a view, and return its id; `view_id` is the one that it has already."""
        if view_id is None:
            view_id = self._random.getrandbits(_VIEW_ID_BITS)
        self._drop(view_id)
        if len(self._views) >= self._limits.scan_view_count_max:
            self._drop(next(iter(self._views)))
        self._views[view_id] = view
        self._expire_after(self._limits.scan_view_ttl_ms, view_id)
        return view_id

    def end(self, view_id: int) -> None:
        """Note that a scan has ended: its view is dropped first, after `ENDED_TTL_MS` at most."""
        view = self._views.pop(view_id, None)
        if view is not None:
            self._views = {view_id: view} | self._views
            self._expiries.pop(view_id).cancel()
            self._expire_after(min(ENDED_TTL_MS, self._limits.scan_view_ttl_ms), view_id)

    def find(self, view_id: int) -> OpenView:
        """Return the view with this id. Raises `PageExpired`."""
        found = self._views.get(view_id)
        if found is None:
            raise PageExpired(
                "the view of this page token is gone: the server was started again, or kept it "
                f"for the {self._limits.scan_view_ttl_ms} ms of scan_view_ttl_ms, or had more than "
                f"the {self._limits.scan_view_count_max} of scan_view_count_max to keep. Begin the "
                "scan again"
            )
        return found

    @contextmanager
    def running(self, scan: OpenScan) -> Iterator[None]:
        """Register a scan until the end of the block."""
        self._scans[scan] = None
        try:
            yield
        finally:
            del self._scans[scan]

    def note_message(self, scan: OpenScan, *, is_waiting: bool) -> None:
        """Note that a message of the scan waits to be read, or was read."""
        self._scans[scan] = self._clock.monotonic_ms() if is_waiting else None

    async def shed(self, is_too_much: Callable[[], bool]) -> None:
        """Drop views, the oldest first, until what they keep in memory is not too much.

        Views that are kept for a next page go first. Then scans are ended with an error: those
        whose clients have not read a message for `UNREAD_MS`, and after `SCAN_GRACE_MS` any scan.
        """
        while is_too_much() and self._views:
            self._drop(next(iter(self._views)))
        late_ms = self._clock.monotonic_ms() + SCAN_GRACE_MS
        while is_too_much():
            now_ms = self._clock.monotonic_ms()
            for scan, waits_since_ms in list(self._scans.items()):
                is_stalled = waits_since_ms is not None and now_ms - waits_since_ms >= UNREAD_MS
                if is_too_much() and (is_stalled or now_ms >= late_ms):
                    await scan.expire()
            if now_ms >= late_ms:
                return
            await self._clock.sleep_ms(POLL_MS)

    def close(self) -> None:
        """Drop all views."""
        for view_id in list(self._views):
            self._drop(view_id)

    def _expire_after(self, ttl_ms: int, view_id: int) -> None:
        loop = asyncio.get_running_loop()
        self._expiries[view_id] = loop.call_later(ttl_ms / 1_000, self._drop, view_id)

    def _drop(self, view_id: int) -> None:
        if self._views.pop(view_id, None) is not None:
            self._expiries.pop(view_id).cancel()


@dataclass(slots=True)
class _KeptView:
    """State of the view that a scan keeps for its next page."""

    view_id: int | None = None  # None: not kept yet
    is_ended: bool = False  # the scan has reached its end


class Scans:
    """Answers the scans and counts of one `ReadEngine`."""

    def __init__(
        self,
        engine: ReadEngine,
        views: OpenViews,
        limits: LimitSettings,
        clock: Clock,
        *,
        freshness: Freshness,
        snapshots: SnapshotReads,
        headers: EncodedHeaders,
        store: Reachability,
    ) -> None:
        """Create the scans of `engine`; `store` says what is wrong with the object store.

        REQUIRES: the engine was given `views.shed`, to free memory that views keep.
        """
        self._store = store
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._freshness = freshness
        self._snapshots = snapshots
        self._headers = headers
        self.views = views
        self._stalls = Stalls(clock, limits.result_stalled_ms)
        self.result_budget = MemoryBudget(limits.result_bytes_max, self._stalls)  # unread messages

    def scan(
        self, request: kv_pb2.ScanRequest, level: LevelValue, call: Call
    ) -> AsyncIterator[bytes]:
        """Read a range at one sequence number and one logical time; yields serialized replies."""
        keys = requests.key_range(request.range)
        seal = PageSeal(self._engine.database_id, call.principal, call.secret, keys)
        token = seal.decode(request) if request.page_token else None
        if request.header.snapshot_id:
            return self._at_snapshot(request, seal, token, call)
        return self._at_view(request, seal, token, level, call)

    async def count(self, request: kv_pb2.CountRequest, level: LevelValue, call: Call) -> bytes:
        """Count the keys of a range at one sequence number and one logical time.

        Returns a serialized reply. Raises `DeadlinePassed` when time is up before the end.
        """
        keys, asked = requests.key_range(request.range), request.header
        scan = kv_pb2.ScanRequest(header=asked, keys_only=True, limit=request.limit)
        counted = kv_pb2.CountReply()
        if asked.snapshot_id:
            counting = self._count_snapshot(scan, keys, counted)
        else:
            staleness_ms = self._freshness.check(asked)
            if staleness_ms is None:
                staleness_ms = await self._freshness.wait(asked, call)
            counting = self._count_view(scan, keys, counted, level, staleness_ms)
        explain = partial(self._explain_count, counted)
        header = await requests.answer_in_time(counting, call, self._clock, explain)
        if asked.report_cost:
            header += self._headers.cost()
        return header + counted.SerializeToString()

    async def _count_snapshot(
        self, request: kv_pb2.ScanRequest, keys: KeyRange, counted: kv_pb2.CountReply
    ) -> bytes:
        """Count into `counted`, and return the header of the reply."""
        opened = await self._snapshots.open(request.header)
        slices = self._snapshots.slices(opened, keys, request)
        async with self._ahead(opened), aclosing(slices):
            await self._count(slices, request.limit, counted)
        return self._snapshots.header(opened.view)

    async def _count_view(
        self,
        request: kv_pb2.ScanRequest,
        keys: KeyRange,
        counted: kv_pb2.CountReply,
        level: LevelValue,
        staleness_ms: int,
    ) -> bytes:
        """Count into `counted`, and return the header of the reply."""
        opened = await self._open(level, staleness_ms)
        header = self._headers.encode(opened.view.seq, opened.view.wal_id, staleness_ms)
        ahead = self._ahead(opened)
        scan = OpenScan(opened, self._slices(opened, keys, request))
        del opened  # or `scan.expire` would not free it
        with self.views.running(scan):
            async with aclosing(scan), ahead:
                try:
                    await self._count(scan, request.limit, counted)
                except PageExpired:
                    raise PageExpired(
                        f"this count was ended at {counted.count} keys: its view kept memory that "
                        "writes need. Count a smaller range, set a limit, or count at a snapshot"
                    ) from None
        return header

    async def _count(
        self, slices: AsyncIterable[list[Entry]], limit: int, counted: kv_pb2.CountReply
    ) -> None:
        """Count entries, to the limit if that is not 0; other tasks run between two slices."""
        async for entries in slices:
            counted.count += len(entries)
            if 0 < limit < counted.count:
                counted.count, counted.more = limit, True
                return
            await self._clock.sleep_ms(0)

    def _explain_count(self, counted: kv_pb2.CountReply) -> str:
        """Say why a count has not ended: there is more to count, or the store does not answer."""
        if self._store.trouble(0.0) is not None:
            return self._store.explain()
        return f"{counted.count} keys were counted. Give it more time, or set a limit"

    async def _at_snapshot(
        self, request: kv_pb2.ScanRequest, seal: PageSeal, token: PageToken | None, call: Call
    ) -> AsyncGenerator[bytes, None]:
        """Scan a snapshot. Any server can continue at its page tokens."""
        snapshots, rest = self._snapshots, seal.keys
        opened = await snapshots.open(request.header)
        if token is not None:
            rest = token.rest(rest, reverse=request.reverse)
        slices = snapshots.slices(opened, rest, request)

        def next_page(last_key: bytes) -> bytes:
            return seal.encode(PageToken(None, last_key), request)

        header = snapshots.header(opened.view)
        async with self._ahead(opened) as ahead, aclosing(slices):
            buffer = self._buffer(slices.aclose, ahead, call)
            messages = self._messages(slices, request, header, buffer, next_page)
            async with aclosing(messages):
                async for message in messages:
                    yield message.data

    async def _at_view(
        self,
        request: kv_pb2.ScanRequest,
        seal: PageSeal,
        token: PageToken | None,
        level: LevelValue,
        call: Call,
    ) -> AsyncGenerator[bytes, None]:
        """Scan the view of the page token, or else the newest one, and keep it for next pages."""
        kept = _KeptView()
        rest = seal.keys
        if token is None:
            staleness_ms = self._freshness.check(request.header)
            if staleness_ms is None:
                staleness_ms = await self._freshness.wait(request.header, call)
            opened = await self._open(level, staleness_ms)
        else:
            kept.view_id = view_id = cast("int", token.view)
            opened = self.views.find(view_id)
            self.views.keep(opened, view_id)
            rest = token.rest(seal.keys, reverse=request.reverse)
            staleness_ms = math.ceil(self._clock.monotonic_ms() - opened.complete_until_ms)
        header = self._headers.encode(opened.view.seq, opened.view.wal_id, staleness_ms)
        ahead = self._ahead(opened)
        scan = OpenScan(opened, self._slices(opened, rest, request))
        del opened  # or `scan.expire` would not free it

        def next_page(last_key: bytes) -> bytes:
            kept.view_id = self.views.keep(scan.opened, kept.view_id)
            return seal.encode(PageToken(kept.view_id, last_key), request)

        with self.views.running(scan):
            async with aclosing(scan), ahead as share:  # all is released when the caller goes
                buffer = self._buffer(scan.stop, share, call)
                messages = self._messages(scan, request, header, buffer, next_page)
                async with aclosing(messages):
                    with self._keep_resumable(scan, kept, is_resumable=request.resumable):
                        async for message in messages:
                            self.views.note_message(scan, is_waiting=True)
                            yield message.data
                            self.views.note_message(scan, is_waiting=False)
                            kept.is_ended = not message.has_token

    @contextmanager
    def _keep_resumable(
        self, scan: OpenScan, kept: _KeptView, *, is_resumable: bool
    ) -> Iterator[None]:
        """Keep the view of a resumable scan when its caller goes, briefly if the scan has ended."""
        try:
            yield
        finally:
            if is_resumable and kept.view_id is not None:
                if kept.is_ended:
                    self.views.end(kept.view_id)
                elif not scan.is_expired:  # its time to live begins now
                    self.views.keep(scan.opened, kept.view_id)

    def _messages(
        self,
        slices: AsyncIterable[list[Entry]],
        request: kv_pb2.ScanRequest,
        header: bytes,
        buffer: ReplyBuffer,
        next_page: Callable[[bytes], bytes],
    ) -> AsyncGenerator[ScanMessage, None]:
        return scan_messages(
            slices, request, header, buffer, clock=self._clock, next_page=next_page
        )

    def _buffer(
        self, stop_reading: Callable[[], Awaitable[None]], ahead: Share | None, call: Call
    ) -> ReplyBuffer:
        async def close() -> None:
            if ahead is not None:
                ahead.give_back()
            await stop_reading()

        return ReplyBuffer(
            self.result_budget,
            message_bytes=self._limits.scan_message_bytes,
            wait_ms=self._wait_ms,
            close=close,
            call=call,
        )

    @property
    def _wait_ms(self) -> int:
        """Maximum wait of a scan for memory, ms: long enough for stalled ones to be ended."""
        return max(RESULT_WAIT_MS, STALLS_WAITED * self._limits.result_stalled_ms)

    def _ahead(self, opened: OpenView) -> AbstractAsyncContextManager[Share | None]:
        """Hold memory for blocks of the levels; stalled scans are ended to free some."""
        pinned = opened.view.pinned
        if pinned is None:
            return nullcontext()
        return pinned.ssts.read_ahead_budget.held(
            SCAN_AHEAD_BYTES, wait_ms=self._wait_ms, stalls=self._stalls
        )

    async def _slices(
        self, opened: OpenView, keys: KeyRange, request: kv_pb2.ScanRequest
    ) -> AsyncGenerator[list[Entry], None]:
        view = opened.view
        slices = scan_slices(
            view,
            start=keys.start,
            end=keys.end,
            reverse=request.reverse,
            now_ms=opened.now_ms,
            wanted=entries_wanted(request),
        )
        try:
            async with aclosing(slices):
                async for entries in slices:
                    yield entries
        except ObjectNotFound as missing:
            if view.pinned is None:
                raise
            raise await self._engine.explain(missing, view.pinned) from missing

    async def _open(self, level: LevelValue, staleness_ms: int) -> OpenView:
        """Open the newest view of the level; `staleness_ms` is that of the state at this moment."""
        engine = self._engine
        complete_until_ms = self._clock.monotonic_ms() - staleness_ms
        if level == LINEARIZABLE:
            await engine.confirm()
        if level == UNCOMMITTED:
            view = await engine.newest_view()
        else:
            view = await engine.committed_view()
        return OpenView(view, engine.now_ms(), complete_until_ms)
