"""How new the state must be that a read sees: `min_seq` and `max_staleness_ms` of its header."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from shalekv.clock import Clock
from shalekv.errors import InvalidRequest, ObjectNotFound, SeqNotReached, TooStale
from shalekv.protocol.entry import Entry, KeyRange
from shalekv.read.engine import ReadEngine
from shalekv.read.scan import scan_slices
from shalekv.read.snapshot_views import SnapshotViews
from shalekv.read.version import OpenView, ReadView
from shalekv.server.service import Call
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2


class Freshness:
    """Waits until the state of an engine is as new as a read demands."""

    def __init__(self, engine: ReadEngine, limits: LimitSettings, clock: Clock) -> None:
        """Calls without a deadline wait for `limits.seq_wait_ms_max`."""
        self._engine = engine
        self._limits = limits
        self._clock = clock

    def judge(self, header: kv_pb2.RequestHeader) -> int | None:
        """The staleness of the state, which the reply must tell; None: the read has to `reach`.

        It is measured once. Measured again for the reply, later, it could exceed what was judged;
        what is read after this call is at least as new.
        """
        if header.min_seq > self._engine.prefix.seq:
            return None
        staleness_ms = self._engine.staleness_ms
        return None if _is_too_stale(header, staleness_ms) else staleness_ms

    async def reach(self, header: kv_pb2.RequestHeader, call: Call) -> int:
        """Return the staleness, as `judge` does, when the state is as new as demanded.

        Raises `SeqNotReached` and `TooStale`.
        """
        engine, min_seq = self._engine, header.min_seq
        with suppress(TimeoutError):  # it holds this task, and so must not stand behind ours
            async with asyncio.timeout(self._wait_ms(call) / 1_000):
                is_behind = header.min_seq > engine.prefix.seq and not engine.is_told
                if is_behind or _is_too_stale(header, engine.staleness_ms):
                    await engine.catch_up()
                await engine.prefix.cover(min_seq)
        if min_seq > engine.prefix.seq:
            raise SeqNotReached(min_seq=min_seq, seq=engine.prefix.seq)
        staleness_ms = engine.staleness_ms
        if _is_too_stale(header, staleness_ms):
            raise TooStale(staleness_ms=staleness_ms, max_staleness_ms=header.max_staleness_ms)
        return staleness_ms

    def _wait_ms(self, call: Call) -> float:
        left_ms = call.answer_within_ms(self._clock.monotonic_ms())
        return self._limits.seq_wait_ms_max if left_ms is None else left_ms


def _is_too_stale(header: kv_pb2.RequestHeader, staleness_ms: int) -> bool:
    return 0 < header.max_staleness_ms < staleness_ms


# --- snapshot_reads
# Reads at a snapshot, in any serving process: the same answers everywhere, as long as it lives.


ReplyT = TypeVar("ReplyT", bound=Message)
Lookup: TypeAlias = Callable[[bytes], Entry | None]
Header: TypeAlias = Callable[[int, int | None], kv_pb2.ReplyHeader]


class SnapshotReads:
    """Reads of what `SnapshotViews` opens. All may raise `SnapshotNotFound`, at any moment."""

    def __init__(self, views: SnapshotViews, header: Header) -> None:
        """`header` makes that of a reply, of a sequence number and a WAL id."""
        self._views = views
        self._header = header

    async def open(self, asked: kv_pb2.RequestHeader) -> OpenView:
        """The state of the snapshot that a request names; its read level says nothing here."""
        opened = await self._views.open(asked.snapshot_id)
        if asked.min_seq > opened.view.seq:
            problem = f"is {asked.min_seq}, and the snapshot reads at {opened.view.seq} for ever"
            raise InvalidRequest("header.min_seq", problem)
        return opened

    def header(self, view: ReadView) -> kv_pb2.ReplyHeader:
        """The header of a reply that tells of the view: a snapshot does not grow old."""
        header = self._header(view.seq, view.wal_id)
        header.staleness_ms = 0
        return header

    async def look_up(
        self,
        asked: kv_pb2.RequestHeader,
        keys: Sequence[bytes],
        answer: Callable[[Lookup, kv_pb2.ReplyHeader, int], ReplyT],
    ) -> ReplyT:
        """What `answer` makes of the versions of these keys, a header, and the time of reading."""
        opened = await self.open(asked)
        view = opened.view
        known = {key: view.get(key) for key in keys}
        below = [key for key, entry in known.items() if entry is None]
        if view.held is not None and below:
            try:
                known.update(await view.held.find_many(below))
            except ObjectNotFound as missing:
                raise await self._views.explain(missing, asked.snapshot_id) from missing
        return answer(known.get, self.header(view), opened.now_ms)

    async def slices(
        self, snapshot_id: bytes, opened: OpenView, keys: KeyRange, *, reverse: bool
    ) -> AsyncGenerator[list[Entry], None]:
        """The visible entries of a range; before each slice the snapshot must still be there."""
        found = scan_slices(
            opened.view, start=keys.start, end=keys.end, reverse=reverse, now_ms=opened.now_ms
        )
        try:
            async with aclosing(found):
                async for entries in found:
                    await self._views.check(snapshot_id)
                    yield entries
        except ObjectNotFound as missing:
            raise await self._views.explain(missing, snapshot_id) from missing
