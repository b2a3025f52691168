"""Demands of reads on the state that they see.

`Freshness` checks `min_seq` and `max_staleness_ms` of a header, and waits until they are met;
`SnapshotReads` reads the state of a snapshot instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

from shalekv.clock import Clock
from shalekv.errors import InvalidRequest, ObjectNotFound, SeqNotReached, TooStale
from shalekv.protocol.entry import Entry, KeyRange
from shalekv.read.engine import ReadEngine
from shalekv.read.scan import scan_slices
from shalekv.read.snapshot_views import SnapshotViews
from shalekv.read.version import OpenView, ReadView
from shalekv.server.replies.gets import EncodedHeaders, MakeReply, made_in_slices
from shalekv.server.service import Call
from shalekv.v1 import kv_pb2

# A call without a deadline waits for so long: a commit that is not visible then may never be.
SEQ_WAIT_MS_MAX = 30_000


class Freshness:
    """Checks that the state of an engine is as new as a read demands, or waits until it is."""

    def __init__(self, engine: ReadEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def check(self, header: kv_pb2.RequestHeader) -> int | None:
        """Return the staleness of the state in ms, or None if the read has to `wait`.

        The reply must report this value: it is measured once, because a later measurement could
        exceed `max_staleness_ms`. The state that is read after this call is at least as new.
        """
        if header.min_seq > self._engine.watermark.seq:
            return None
        staleness_ms = self._engine.staleness_ms
        return None if _is_too_stale(header, staleness_ms) else staleness_ms

    async def wait(self, header: kv_pb2.RequestHeader, call: Call) -> int:
        """Wait until the state is as new as demanded, and return its staleness as `check` does.

        Raises `SeqNotReached` and `TooStale`.
        """
        engine, min_seq = self._engine, header.min_seq
        with suppress(TimeoutError):  # not chained to our errors: it refers to this task
            async with asyncio.timeout(self._wait_ms(call) / 1_000):
                is_behind = header.min_seq > engine.watermark.seq and not engine.is_pushed
                if is_behind or _is_too_stale(header, engine.staleness_ms):
                    await engine.catch_up()
                await engine.watermark.wait_for(min_seq)
        if min_seq > engine.watermark.seq:
            raise SeqNotReached(min_seq=min_seq, seq=engine.watermark.seq)
        staleness_ms = engine.staleness_ms
        if _is_too_stale(header, staleness_ms):
            raise TooStale(staleness_ms=staleness_ms, max_staleness_ms=header.max_staleness_ms)
        return staleness_ms

    def _wait_ms(self, call: Call) -> float:
        left_ms = call.answer_within_ms(self._clock.monotonic_ms())
        return SEQ_WAIT_MS_MAX if left_ms is None else left_ms


def _is_too_stale(header: kv_pb2.RequestHeader, staleness_ms: int) -> bool:
    return 0 < header.max_staleness_ms < staleness_ms


class SnapshotReads:
    """Reads at a snapshot: the same replies from any serving process until the snapshot expires.

    All methods may raise `SnapshotNotFound` at any moment.
    """

    def __init__(self, views: SnapshotViews, headers: EncodedHeaders) -> None:
        """Read what `views` opens; `headers` are those of its replies."""
        self._views = views
        self._headers = headers

    async def open(self, request_header: kv_pb2.RequestHeader) -> OpenView:
        """Open the view of the snapshot that a request names. Its read level is ignored."""
        opened = await self._views.open(request_header.snapshot_id)
        min_seq = request_header.min_seq
        if min_seq > opened.view.seq:
            problem = f"is {min_seq}, and the snapshot reads at {opened.view.seq} for ever"
            raise InvalidRequest("header.min_seq", problem)
        return opened

    def header(self, view: ReadView) -> bytes:
        """Encode the header of a reply from this view. Its staleness is 0: a snapshot never
        ages.
        """
        return self._headers.encode(view.seq, view.wal_id, 0)

    async def look_up(
        self,
        request_header: kv_pb2.RequestHeader,
        keys: Sequence[bytes],
        make_reply: MakeReply,
    ) -> bytes:
        """Look the keys up, and make a reply of them, at the logical time of the snapshot."""
        opened = await self.open(request_header)
        view = opened.view
        known = {key: view.get(key) for key in keys}
        not_in_memory = [key for key, entry in known.items() if entry is None]
        if view.pinned is not None and not_in_memory:
            try:
                known.update(await view.pinned.find_many(not_in_memory))
            except ObjectNotFound as missing:
                raise await self._views.explain(missing, request_header.snapshot_id) from missing
        entries = [*map(known.get, keys)]
        return await made_in_slices(make_reply, self.header(view), entries, lambda: opened.now_ms)

    async def slices(
        self, opened: OpenView, keys: KeyRange, request: kv_pb2.ScanRequest
    ) -> AsyncGenerator[list[Entry], None]:
        """Yield the visible entries of a range, while the snapshot has not expired."""
        snapshot_id = request.header.snapshot_id
        found = scan_slices(
            opened.view,
            start=keys.start,
            end=keys.end,
            reverse=request.reverse,
            now_ms=opened.now_ms,
            wanted=entries_wanted(request),
        )
        try:
            async with aclosing(found):
                async for entries in found:
                    await self._views.check(snapshot_id)
                    yield entries
        except ObjectNotFound as missing:
            raise await self._views.explain(missing, snapshot_id) from missing


def entries_wanted(request: kv_pb2.ScanRequest) -> int:
    """Return how many entries a scan reads: one beyond its limit shows that more follow. 0: all."""
    return request.limit + 1 if request.limit else 0
