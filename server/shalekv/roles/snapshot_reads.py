"""Reads at a snapshot, in any serving process: the same answers everywhere, as long as it lives."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from shalekv.core.key_range import KeyRange
from shalekv.engine.view import OpenView, View
from shalekv.errors import InvalidRequest, ObjectNotFound
from shalekv.protocol.entry import Entry
from shalekv.read.scan import scan_slices
from shalekv.read.snapshot_views import SnapshotViews
from shalekv.v1 import kv_pb2

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

    def header(self, view: View) -> kv_pb2.ReplyHeader:
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
