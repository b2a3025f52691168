"""What is answered to `Scan`: which view is read, from where, and how to go on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from random import Random
from typing import TypeAlias

from shalekv.clock import Clock
from shalekv.core.entry import Entry
from shalekv.core.key_range import KeyRange
from shalekv.engine.levels.held_tree import HeldTree
from shalekv.engine.read_engine import ReadEngine
from shalekv.engine.result_room import ResultRoom
from shalekv.engine.scan import scan_slices
from shalekv.engine.view import OpenView
from shalekv.errors import ObjectNotFound
from shalekv.roles import requests
from shalekv.roles.freshness import Freshness
from shalekv.roles.open_scan import OpenScan
from shalekv.roles.open_views import OpenViews
from shalekv.roles.page_token import PageToken, decode_page_token
from shalekv.roles.requests import LINEARIZABLE, UNCOMMITTED, LevelValue
from shalekv.roles.scan_stream import scan_messages
from shalekv.roles.service import Call
from shalekv.settings import KIB, LimitSettings
from shalekv.v1 import kv_pb2

SCAN_AHEAD_BYTES = 64 * KIB  # a block of each source or so, which no scan can do without
# A scan whose view keeps too much is ended when a message was not taken for so long,
UNTAKEN_MS = 100
# ... or when it has not come to its end by then: less than writes wait for room.
GOING_ON_MS = 500
LOOK_MS = 5  # between two looks whether scans have come to their end
Header: TypeAlias = Callable[[int, int | None], kv_pb2.ReplyHeader]


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
        header: Header,
    ) -> None:
        """`header` makes that of a reply, of a sequence number and a WAL id."""
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._freshness = freshness
        self._header = header
        self._views = OpenViews(limits, random)
        self.room = ResultRoom(limits.result_bytes_max)  # for messages that were not taken
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

    async def scan(
        self, request: kv_pb2.ScanRequest, level: LevelValue, call: Call
    ) -> AsyncIterator[kv_pb2.ScanReply]:
        """Read a range at one sequence number and one logical time."""
        keys = requests.key_range(request.range)
        view_id = None
        rest = keys
        if request.page_token:
            token = decode_page_token(self._database_id, request, keys)
            view_id = token.view_id
            opened = self._views.find(view_id)
            self._views.keep(opened, view_id)
            rest = token.rest(keys, reverse=request.reverse)
        else:
            if self._freshness.is_due(request.header):
                await self._freshness.reach(request.header, call)
            opened = await self._open(level)
        view = opened.view
        header = self._header(view.seq, view.wal_id)
        ahead = nullcontext() if view.held is None else self._room_ahead(view.held)
        scan = OpenScan(opened, self._slices(opened, rest, reverse=request.reverse))
        del opened, view  # which `scan` may let go

        def next_page(last_key: bytes) -> bytes:
            return self._token(request, keys, scan.opened, view_id, last_key)

        messages = scan_messages(
            scan,
            request,
            header,
            message_bytes=self._limits.scan_message_bytes,
            room=self.room,
            wait_ms=self._limits.result_wait_ms,
            clock=self._clock,
            next_page=next_page,
        )
        self._open_scans[scan] = None
        try:
            async with ahead, aclosing(scan), aclosing(messages):  # it all goes with the caller
                async for message in messages:
                    self._open_scans[scan] = self._clock.monotonic_ms()
                    yield message
                    self._open_scans[scan] = None
        finally:
            del self._open_scans[scan]

    def _room_ahead(self, held: HeldTree) -> AbstractAsyncContextManager[None]:
        """Room to read the levels, of which there is little where many scans stand still."""
        return held.ssts.ahead.held(SCAN_AHEAD_BYTES, wait_ms=self._limits.result_wait_ms)

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

    async def _open(self, level: LevelValue) -> OpenView:
        engine = self._engine
        if level == LINEARIZABLE:
            await engine.confirm()
        if level == UNCOMMITTED:
            view = await engine.newest_view()
        else:
            view = await engine.committed_view()
        return OpenView(view, engine.time.now_ms())

    def _token(
        self,
        request: kv_pb2.ScanRequest,
        keys: KeyRange,
        opened: OpenView,
        view_id: int | None,
        last_key: bytes,
    ) -> bytes:
        """The token of the next page, whose view is kept from now on."""
        kept_id = self._views.keep(opened, view_id)
        return PageToken(kept_id, last_key).encode(self._database_id, request, keys)
