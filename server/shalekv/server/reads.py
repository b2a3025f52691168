"""Reads of the writer and of readers: `Get`, `BatchGet` and `Scan`, for any `ReadEngine`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from shalekv.errors import ObjectNotFound, ReplyTooLarge, SnapshotNotFound
from shalekv.protocol.entry import Entry
from shalekv.protocol.transaction import RESULT_FRAME_BYTES
from shalekv.read.engine import ReadEngine
from shalekv.read.version import PinnedVersion
from shalekv.runtime import Runtime
from shalekv.server import requests
from shalekv.server.freshness import Freshness, Lookup, SnapshotReads
from shalekv.server.requests import (
    LINEARIZABLE,
    UNCOMMITTED,
    AnswerT,
    LevelValue,
    check_deadline,
)
from shalekv.server.scans import OpenViews, Scans
from shalekv.server.service import Answer, Call, MakeHeader
from shalekv.settings import STREAM_MESSAGE_BYTES_MAX, LimitSettings
from shalekv.store.reachability import Reachability
from shalekv.v1 import kv_pb2

NOT_FOUND_BYTES = 2  # size of an empty result in a reply
RETRIES_MAX = 3  # of a read whose version of the levels was deleted: each reads a newer version
ReadReplyT = TypeVar("ReadReplyT", kv_pb2.GetReply, kv_pb2.BatchGetReply)
# Makes a reply from a lookup, a header, and the logical time in ms by which values expire.
MakeReply: TypeAlias = Callable[[Lookup, kv_pb2.ReplyHeader, int], ReadReplyT]
Retry: TypeAlias = Callable[[], Awaitable[ReadReplyT]]


class _Read(NamedTuple, Generic[ReadReplyT]):
    """A read of some keys, after its demands on freshness were checked."""

    keys: Sequence[bytes]
    make_reply: MakeReply[ReadReplyT]
    staleness_ms: int  # of the state when it was checked
    call: Call


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
    ) -> None:
        """Create the reads of `engine`.

        `store` says what is wrong with the object store, for the errors of reads that do not end in
        time.
        """
        self._engine = engine
        self._store = store
        self._limits = limits
        self._clock = runtime.clock
        self._header = header
        self._freshness = Freshness(engine, runtime.clock)
        self._snapshots = SnapshotReads(engine.snapshots, header)
        self.scans = Scans(
            engine,
            views,
            limits,
            runtime.clock,
            freshness=self._freshness,
            snapshots=self._snapshots,
            header=header,
        )

    def get(self, request: kv_pb2.GetRequest, call: Call) -> Answer[kv_pb2.GetReply]:
        """Read one key in the newest state of the read level."""
        level = self._read_level(request.header, call)
        requests.check_key(request.key, "key")
        make_reply = partial(_get_reply, request.key)
        return self._read_keys(request.header, call, level, (request.key,), make_reply)

    def batch_get(
        self, request: kv_pb2.BatchGetRequest, call: Call
    ) -> Answer[kv_pb2.BatchGetReply]:
        """Read many keys in one state."""
        level = self._read_level(request.header, call)
        requests.check_keys(request, self._limits)
        make_reply = partial(_batch_get_reply, request)
        return self._read_keys(request.header, call, level, request.keys, make_reply)

    def scan(self, request: kv_pb2.ScanRequest, call: Call) -> AsyncIterator[kv_pb2.ScanReply]:
        """Read a range at one sequence number and one logical time."""
        level = self._read_level(request.header, call)
        return self.scans.scan(request, level, call)

    def _read_level(self, header: kv_pb2.RequestHeader, call: Call) -> LevelValue:
        level = requests.read_level(header)
        check_deadline(call, self._clock)
        self._engine.check_serving()
        return level

    def _read_keys(
        self,
        header: kv_pb2.RequestHeader,
        call: Call,
        level: LevelValue,
        keys: Sequence[bytes],
        make_reply: MakeReply[ReadReplyT],
    ) -> Answer[ReadReplyT]:
        if header.snapshot_id:
            return self._snapshots.look_up(header, keys, make_reply)
        staleness_ms = self._freshness.check(header)
        if staleness_ms is None:
            return self._read_when_fresh(header, call, level, keys, make_reply)
        return self._read(level, _Read(keys, make_reply, staleness_ms, call))

    async def _read_when_fresh(
        self,
        header: kv_pb2.RequestHeader,
        call: Call,
        level: LevelValue,
        keys: Sequence[bytes],
        make_reply: MakeReply[ReadReplyT],
    ) -> ReadReplyT:
        """Wait until the state is as new as the header demands, then read."""
        staleness_ms = await self._freshness.wait(header, call)
        found = self._read(level, _Read(keys, make_reply, staleness_ms, call))
        return await found if isinstance(found, Awaitable) else found

    def _read(self, level: LevelValue, read: _Read[ReadReplyT]) -> Answer[ReadReplyT]:
        """Read the newest state of the level.

        The reply is ready at once unless the level is LINEARIZABLE, a block of an SST is needed, or
        WAL objects have landed behind a gap. A read shows a prefix of the log, as a scan does: it
        waits until the gap is closed. Otherwise two reads that each saw one of two commits would
        show an order that never was (I14).
        """
        engine = self._engine
        if level == LINEARIZABLE:
            return self._read_confirmed(read)
        if level == UNCOMMITTED:
            return self._look_up(read, engine.newest, engine.newest_seq, None, None)
        if not engine.watermark.is_whole:
            return self._read_view(read)
        return self._read_prefix(read, RETRIES_MAX)

    async def _read_confirmed(self, read: _Read[ReadReplyT]) -> ReadReplyT:
        await self._in_time(self._engine.confirm(), read.call)
        return await self._read_view(read)

    def _in_time(self, answer: Awaitable[AnswerT], call: Call) -> Awaitable[AnswerT]:
        return requests.answer_in_time(answer, call, self._clock, self._store)

    async def _read_view(
        self, read: _Read[ReadReplyT], retries_left: int = RETRIES_MAX
    ) -> ReadReplyT:
        engine = self._engine
        if engine.watermark.is_whole:
            found = self._read_prefix(read, retries_left)
        else:
            view = await engine.committed_view()
            retry = self._retry(read, retries_left)
            found = self._look_up(read, view.get, view.seq, view.wal_id, retry)
        return await found if isinstance(found, Awaitable) else found

    def _read_prefix(self, read: _Read[ReadReplyT], retries_left: int) -> Answer[ReadReplyT]:
        """Read the durable prefix. REQUIRES: nothing has landed behind a gap."""
        engine, prefix = self._engine, self._engine.watermark
        retry = self._retry(read, retries_left)
        return self._look_up(read, engine.committed, prefix.seq, prefix.wal_id, retry)

    def _retry(self, read: _Read[ReadReplyT], retries_left: int) -> Retry[ReadReplyT] | None:
        """Return a retry in a newer version of the levels, for a read that loses its version.

        It loses it when objects of the version are deleted. None: no retries are left.
        """
        if not retries_left:
            return None
        return lambda: self._read_view(read, retries_left - 1)

    def _look_up(
        self,
        read: _Read[ReadReplyT],
        in_memory: Lookup,
        seq: int,
        wal_id: int | None,
        retry: Retry[ReadReplyT] | None,
    ) -> Answer[ReadReplyT]:
        """Look the keys up in memory, and in the levels those that memory does not have.

        The version of the levels is the current one, so it has what memory drops during the read.
        """
        keys, make_reply, staleness_ms, call = read
        header = self._header(seq, wal_id)
        header.staleness_ms = staleness_ms
        pinned = self._engine.pinned
        if pinned.version.is_empty:
            return make_reply(in_memory, header, self._engine.time.now_ms())
        known = {key: in_memory(key) for key in keys}
        missing = [key for key, entry in known.items() if entry is None and pinned.may_hold(key)]
        if not missing:
            return make_reply(known.get, header, self._engine.time.now_ms())
        finish = partial(self._reply_now, make_reply, header)
        return self._read_levels(pinned, missing, known, finish, retry, call)

    async def _read_levels(
        self,
        pinned: PinnedVersion,
        keys: Sequence[bytes],
        known: dict[bytes, Entry | None],
        finish: Callable[[Lookup], ReadReplyT],
        retry: Retry[ReadReplyT] | None,
        call: Call,
    ) -> ReadReplyT:
        try:
            known.update(await self._in_time(pinned.find_many(keys), call))
        except ObjectNotFound as missing:
            reason = await self._engine.explain(missing, pinned)
            if retry is None or not isinstance(reason, SnapshotNotFound):
                raise reason from missing
            return await retry()
        return finish(known.get)

    def _reply_now(
        self, make_reply: MakeReply[ReadReplyT], header: kv_pb2.ReplyHeader, lookup: Lookup
    ) -> ReadReplyT:
        return make_reply(lookup, header, self._engine.time.now_ms())


def _get_reply(
    key: bytes, lookup: Lookup, header: kv_pb2.ReplyHeader, now_ms: int
) -> kv_pb2.GetReply:
    entry = lookup(key)
    if entry is None or not entry.is_visible(now_ms):
        return kv_pb2.GetReply(header=header)
    return kv_pb2.GetReply(
        header=header,
        found=True,
        value=entry.value,
        seq=entry.seq,
        expire_at_ms=entry.expire_at_ms,
    )


def _batch_get_reply(
    request: kv_pb2.BatchGetRequest, lookup: Lookup, header: kv_pb2.ReplyHeader, now_ms: int
) -> kv_pb2.BatchGetReply:
    reply = kv_pb2.BatchGetReply(header=header)
    reply_bytes = 0
    for key in request.keys:
        entry = lookup(key)
        if entry is not None and not entry.is_visible(now_ms):
            entry = None
        reply_bytes += RESULT_FRAME_BYTES + len(entry.value) if entry else NOT_FOUND_BYTES
        if reply_bytes > STREAM_MESSAGE_BYTES_MAX:
            message = (
                f"the results for these {len(request.keys)} keys pass the "
                f"{STREAM_MESSAGE_BYTES_MAX} bytes of one reply: ask for fewer keys at once"
            )
            raise ReplyTooLarge(message)
        if entry is None:
            reply.results.add()
        else:
            reply.results.add(
                found=True, value=entry.value, seq=entry.seq, expire_at_ms=entry.expire_at_ms
            )
    return reply
