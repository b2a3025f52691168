"""What is answered to `Scan`: which view is read, from where, and how to go on."""

from __future__ import annotations

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
from typing import TypeAlias, cast

from shalekv.clock import Clock
from shalekv.core.key_range import KeyRange
from shalekv.engine.stalls import Stalls
from shalekv.engine.view import OpenView
from shalekv.errors import ObjectNotFound
from shalekv.protocol.entry import Entry
from shalekv.read.engine import ReadEngine
from shalekv.read.memory_budget import ResultRoom, Share
from shalekv.read.scan import scan_slices
from shalekv.roles.open_scan import OpenScan
from shalekv.roles.open_views import OpenViews
from shalekv.roles.page_token import PageToken, decode_page_token
from shalekv.roles.scan_stream import Outlet, scan_messages
from shalekv.roles.snapshot_reads import SnapshotReads
from shalekv.server import requests
from shalekv.server.freshness import Freshness
from shalekv.server.requests import LINEARIZABLE, UNCOMMITTED, LevelValue
from shalekv.server.service import Call
from shalekv.settings import KIB, LimitSettings
from shalekv.v1 import kv_pb2

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
        self.room = ResultRoom(limits.result_bytes_max, self._stalls)
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
            staleness_ms = self._freshness.judge(request.header)
            if staleness_ms is None:
                staleness_ms = await self._freshness.reach(request.header, call)
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
