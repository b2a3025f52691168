"""Reads of the writer and of readers, `Get`, `BatchGet`, `Count` and `Scan`: any `ReadEngine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

from shalekv.errors import ObjectNotFound, SnapshotNotFound
from shalekv.protocol.entry import Entry
from shalekv.read.engine import ReadEngine
from shalekv.read.lookup import UNREAD
from shalekv.read.version import PinnedVersion
from shalekv.runtime import Runtime
from shalekv.server import requests
from shalekv.server.freshness import Freshness, SnapshotReads
from shalekv.server.replies.gets import (
    RESULTS_AT_ONCE,
    EncodedHeaders,
    MakeReply,
    batch_get_reply,
    get_reply,
    get_reply_without_value,
    made_in_slices,
)
from shalekv.server.requests import COMMITTED, LINEARIZABLE, UNCOMMITTED, AnswerT, check_deadline
from shalekv.server.scans import OpenViews, Scans
from shalekv.server.service import Answer, Call, MakeHeader
from shalekv.settings import LimitSettings
from shalekv.store.reachability import Reachability
from shalekv.telemetry.prices import PriceList
from shalekv.v1 import kv_pb2

RETRIES_MAX = 3  # of a read whose version of the levels was deleted: each reads a newer version
LOOKUPS_AT_ONCE = 128  # keys looked up in the levels before other tasks may run: some ms
Retry: TypeAlias = Callable[[], Awaitable[bytes]]


class _Read(NamedTuple):
    """A read of some keys, after its demands on freshness were checked."""

    keys: Sequence[bytes]
    make_reply: MakeReply
    staleness_ms: int  # of the state when it was checked
    call: Call


class _State(NamedTuple):
    """The state that a read shows, which stays the same while blocks of the levels are fetched."""

    header: bytes
    pinned: PinnedVersion  # has what memory drops meanwhile
    now_ms: int


class Reads:
    """Answers the reads of one `ReadEngine`."""

    def __init__(
        self,
        engine: ReadEngine,
        views: OpenViews,
        limits: LimitSettings,
        runtime: Runtime,
        *,
        header: MakeHeader,
        store: Reachability,
        prices: PriceList,
    ) -> None:
        """Create the reads of `engine`.

        `store` says what is wrong with the object store, for the errors of reads that do not end in
        time; `prices` are those of its requests.
        """
        self._engine = engine
        self._store = store
        self._limits = limits
        self._clock = runtime.clock
        self._headers = EncodedHeaders(engine, header, prices)
        self._freshness = Freshness(engine, runtime.clock)
        self._snapshots = SnapshotReads(engine.snapshots, self._headers)
        self.scans = Scans(
            engine,
            views,
            limits,
            runtime.clock,
            freshness=self._freshness,
            snapshots=self._snapshots,
            headers=self._headers,
            store=store,
        )

    def get(self, request: kv_pb2.GetRequest, call: Call) -> Answer[bytes]:
        """Read one key in the newest state of the read level; returns a serialized GetReply."""
        header = request.header if request.HasField("header") else None
        staleness_ms = self._check(header, call)
        key = requests.check_key(request.key, "key")
        make_reply: MakeReply = get_reply_without_value if request.omit_value else get_reply
        if header is not None and header.report_cost:
            make_reply = self._headers.telling_cost(make_reply)
        if staleness_ms is not None:
            engine = self._engine
            prefix, pinned = engine.watermark, engine.pinned
            encoded = self._headers.encode(prefix.seq, prefix.wal_id, staleness_ms)
            found = engine.committed(key) or pinned.find_now(key)
            if found is not UNREAD:
                return make_reply(encoded, (found,), engine.now_ms)
            read = _Read((key,), make_reply, staleness_ms, call)
            state = _State(encoded, pinned, engine.now_ms())
            return self._read_levels(read, state, read.keys, {}, self._retry(read, RETRIES_MAX))
        return self._read_keys(request.header, call, (key,), make_reply)

    def batch_get(self, request: kv_pb2.BatchGetRequest, call: Call) -> Answer[bytes]:
        """Read many keys in one state; returns a serialized BatchGetReply."""
        header = request.header
        self._check(header, call)
        keys = requests.check_keys(request, self._limits)
        make_reply: MakeReply = batch_get_reply
        if header.report_cost:
            make_reply = self._headers.telling_cost(make_reply)
        return self._read_keys(header, call, keys, make_reply)

    def count(self, request: kv_pb2.CountRequest, call: Call) -> Awaitable[bytes]:
        """Count the keys of a range in one state; returns a serialized CountReply."""
        self._check(request.header, call)
        return self.scans.count(request, request.header.read_level or COMMITTED, call)

    def scan(self, request: kv_pb2.ScanRequest, call: Call) -> AsyncIterator[bytes]:
        """Read a range at one sequence number and one logical time; yields serialized replies."""
        self._check(request.header, call)
        return self.scans.scan(request, request.header.read_level or COMMITTED, call)

    def _check(self, header: kv_pb2.RequestHeader | None, call: Call) -> int | None:
        """Check a read. Return the staleness of the durable prefix in ms if it can be read now.

        None: the read asks for another state, or has to wait; see `_read_keys`.
        """
        level = COMMITTED if header is None else requests.read_level(header)
        if call.deadline_ms is not None:
            check_deadline(call, self._clock)
        engine = self._engine
        engine.check_serving()
        if level != COMMITTED or not engine.watermark.is_whole:
            return None
        if header is None:
            return engine.staleness_ms
        return None if header.snapshot_id else self._freshness.check(header)

    def _read_keys(
        self,
        header: kv_pb2.RequestHeader,
        call: Call,
        keys: Sequence[bytes],
        make_reply: MakeReply,
    ) -> Answer[bytes]:
        """Read the state that the header asks for, which `_check` has checked."""
        if header.snapshot_id:
            return self._snapshots.look_up(header, keys, make_reply)
        staleness_ms = self._freshness.check(header)
        if staleness_ms is None:
            return self._read_when_fresh(header, call, keys, make_reply)
        return self._read(header, _Read(keys, make_reply, staleness_ms, call))

    async def _read_when_fresh(
        self,
        header: kv_pb2.RequestHeader,
        call: Call,
        keys: Sequence[bytes],
        make_reply: MakeReply,
    ) -> bytes:
        """Wait until the state is as new as the header demands, then read."""
        staleness_ms = await self._freshness.wait(header, call)
        found = self._read(header, _Read(keys, make_reply, staleness_ms, call))
        return found if isinstance(found, bytes) else await found

    def _read(self, header: kv_pb2.RequestHeader, read: _Read) -> Answer[bytes]:
        """Read the newest state of the level.

        The reply is ready at once unless the level is LINEARIZABLE, a block of an SST is needed, or
        WAL objects have landed behind a gap. A read shows a prefix of the log, as a scan does: it
        waits until the gap is closed. Otherwise two reads that each saw one of two commits would
        show an order that never was (I14).
        """
        engine, level = self._engine, header.read_level
        if level == LINEARIZABLE:
            return self._read_confirmed(read)
        if level == UNCOMMITTED:
            newest = [*map(engine.newest, read.keys)]
            return self._look_up(read, newest, engine.newest_seq, None, None)
        if not engine.watermark.is_whole:
            return self._read_view(read)
        return self._read_prefix(read, RETRIES_MAX)

    async def _read_confirmed(self, read: _Read) -> bytes:
        await self._in_time(self._engine.confirm(), read.call)
        return await self._read_view(read)

    def _in_time(self, answer: Awaitable[AnswerT], call: Call) -> Awaitable[AnswerT]:
        return requests.answer_in_time(answer, call, self._clock, self._store.explain)

    async def _read_view(self, read: _Read, retries_left: int = RETRIES_MAX) -> bytes:
        engine = self._engine
        if engine.watermark.is_whole:
            found = self._read_prefix(read, retries_left)
        else:
            view = await engine.committed_view()
            retry = self._retry(read, retries_left)
            in_memory = [*map(view.get, read.keys)]
            found = self._look_up(read, in_memory, view.seq, view.wal_id, retry)
        return found if isinstance(found, bytes) else await found

    def _read_prefix(self, read: _Read, retries_left: int) -> Answer[bytes]:
        """Read the durable prefix. REQUIRES: nothing has landed behind a gap."""
        engine, prefix = self._engine, self._engine.watermark
        retry = self._retry(read, retries_left)
        in_memory = engine.memtable.get_many(read.keys)
        return self._look_up(read, in_memory, prefix.seq, prefix.wal_id, retry)

    def _retry(self, read: _Read, retries_left: int) -> Retry | None:
        """Return a retry in a newer version of the levels, for a read that loses its version.

        It loses it when objects of the version are deleted. None: no retries are left.
        """
        if not retries_left:
            return None
        return lambda: self._read_view(read, retries_left - 1)

    def _look_up(
        self,
        read: _Read,
        in_memory: list[Entry | None],
        seq: int,
        wal_id: int | None,
        retry: Retry | None,
    ) -> Answer[bytes]:
        """Look those of the keys up in the levels that have no entry `in_memory`."""
        keys, make_reply, staleness_ms, _ = read
        header = self._headers.encode(seq, wal_id, staleness_ms)
        engine = self._engine
        pinned = engine.pinned
        is_known = pinned.version.is_empty or all(in_memory)
        if is_known and len(keys) <= RESULTS_AT_ONCE:
            return make_reply(header, in_memory, engine.now_ms)
        known = dict(zip(keys, in_memory, strict=True))
        unread: list[bytes] = []
        if not is_known:
            unread = [key for key, entry in known.items() if entry is None]
            if len(unread) <= LOOKUPS_AT_ONCE:
                unread = pinned.add_found_now(unread, known)
        if unread or len(keys) > RESULTS_AT_ONCE:
            state = _State(header, pinned, engine.now_ms())
            return self._read_levels(read, state, unread, known, retry)
        return make_reply(header, [*map(known.get, keys)], engine.now_ms)

    async def _read_levels(
        self,
        read: _Read,
        state: _State,
        unread: Sequence[bytes],
        known: dict[bytes, Entry | None],
        retry: Retry | None,
    ) -> bytes:
        """Look the keys that are `unread` up in the levels, and make the reply."""
        try:
            await self._in_time(_add_found(state.pinned, unread, known), read.call)
        except ObjectNotFound as gone:
            reason = await self._engine.explain(gone, state.pinned)
            if retry is None or not isinstance(reason, SnapshotNotFound):
                raise reason from gone
            return await retry()
        entries = [*map(known.get, read.keys)]
        return await made_in_slices(read.make_reply, state.header, entries, lambda: state.now_ms)


async def _add_found(
    pinned: PinnedVersion, keys: Sequence[bytes], known: dict[bytes, Entry | None]
) -> None:
    """Add to `known` what the levels have of the keys: first what is at hand, then the rest."""
    if len(keys) == 1:
        known[keys[0]] = await pinned.find(keys[0])
        return
    if len(keys) > LOOKUPS_AT_ONCE:
        left = []
        for first in range(0, len(keys), LOOKUPS_AT_ONCE):
            left += pinned.add_found_now(keys[first : first + LOOKUPS_AT_ONCE], known)
            await asyncio.sleep(0)
        keys = left
    if keys:
        known.update(await pinned.find_many(keys))
