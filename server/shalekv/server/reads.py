"""What any serving process answers to `Get`, `BatchGet` and `Scan`."""

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
from shalekv.server.freshness import Freshness, SnapshotReads
from shalekv.server.requests import (
    LINEARIZABLE,
    UNCOMMITTED,
    AnswerT,
    LevelValue,
    check_deadline,
)
from shalekv.server.scans import Scans
from shalekv.server.service import Answer, Call
from shalekv.settings import STREAM_MESSAGE_BYTES_MAX, LimitSettings
from shalekv.store.reachability import Reachability
from shalekv.v1 import kv_pb2

NOT_FOUND_BYTES = 2  # of a result that holds nothing
LOST_TREES_MAX = 3  # that a read of some keys survives: it begins again in a newer one
ReadReplyT = TypeVar("ReadReplyT", kv_pb2.GetReply, kv_pb2.BatchGetReply)
Lookup: TypeAlias = Callable[[bytes], Entry | None]  # the version of a key in one state
# A reply from the versions of keys, a header, and the time by which values have expired.
Reading: TypeAlias = Callable[[Lookup, kv_pb2.ReplyHeader, int], ReadReplyT]
Again: TypeAlias = Callable[[], Awaitable[ReadReplyT]]
Header: TypeAlias = Callable[[int, int | None], kv_pb2.ReplyHeader]


class _Read(NamedTuple, Generic[ReadReplyT]):
    """A read of some keys, whose freshness was judged."""

    keys: Sequence[bytes]
    answer: Reading[ReadReplyT]
    staleness_ms: int  # of the state when it was judged
    call: Call


class Reads:
    """Reads of a `ReadEngine`."""

    def __init__(
        self,
        engine: ReadEngine,
        limits: LimitSettings,
        runtime: Runtime,
        *,
        header: Header,
        store: Reachability,
    ) -> None:
        """`header` makes that of a reply, of a sequence number and a WAL id.

        `store` follows the reads that are asked of the store.
        """
        self._engine = engine
        self._store = store
        self._limits = limits
        self._clock = runtime.clock
        self._header = header
        self._freshness = Freshness(engine, limits, runtime.clock)
        self._snapshots = SnapshotReads(engine.snapshots, header)
        self.scans = Scans(
            engine,
            limits,
            runtime.clock,
            runtime.random,
            freshness=self._freshness,
            snapshots=self._snapshots,
            header=header,
        )

    def get(self, request: kv_pb2.GetRequest, call: Call) -> Answer[kv_pb2.GetReply]:
        """The value of one key, at the newest state of the read level."""
        level = self._read_level(request.header, call)
        requests.check_key(request.key, "key")
        answer = partial(_get_reply, request.key)
        return self._read_keys(request.header, call, level, (request.key,), answer)

    def batch_get(
        self, request: kv_pb2.BatchGetRequest, call: Call
    ) -> Answer[kv_pb2.BatchGetReply]:
        """The values of many keys at one moment."""
        level = self._read_level(request.header, call)
        requests.check_keys(request, self._limits)
        answer = partial(_batch_get_reply, request)
        return self._read_keys(request.header, call, level, request.keys, answer)

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
        answer: Reading[ReadReplyT],
    ) -> Answer[ReadReplyT]:
        if header.snapshot_id:
            return self._snapshots.look_up(header, keys, answer)
        staleness_ms = self._freshness.judge(header)
        if staleness_ms is None:
            return self._read_fresh(header, call, level, keys, answer)
        return self._read(level, _Read(keys, answer, staleness_ms, call))

    async def _read_fresh(
        self,
        header: kv_pb2.RequestHeader,
        call: Call,
        level: LevelValue,
        keys: Sequence[bytes],
        answer: Reading[ReadReplyT],
    ) -> ReadReplyT:
        """Answer when the state is as new as the header demands."""
        staleness_ms = await self._freshness.reach(header, call)
        found = self._read(level, _Read(keys, answer, staleness_ms, call))
        return await found if isinstance(found, Awaitable) else found

    def _read(self, level: LevelValue, read: _Read[ReadReplyT]) -> Answer[ReadReplyT]:
        """Answer from the newest state of the level: at once if it is there and known to be ours.

        A read shows a prefix of the log, as a scan does. While objects land out of order it waits
        for those before what has landed: two reads that saw one and not the other would show an
        order of commits that never was (I14).
        """
        engine = self._engine
        if level == LINEARIZABLE:
            return self._read_confirmed(read)
        if level == UNCOMMITTED:
            return self._look_up(read, engine.newest, engine.newest_seq, None, None)
        if not engine.prefix.is_whole:
            return self._read_view(read)
        return self._read_whole(read, LOST_TREES_MAX)

    async def _read_confirmed(self, read: _Read[ReadReplyT]) -> ReadReplyT:
        await self._in_time(self._engine.confirm(), read.call)
        return await self._read_view(read)

    def _in_time(self, answer: Awaitable[AnswerT], call: Call) -> Awaitable[AnswerT]:
        return requests.answer_in_time(answer, call, self._clock, self._store)

    async def _read_view(
        self, read: _Read[ReadReplyT], trees_left: int = LOST_TREES_MAX
    ) -> ReadReplyT:
        engine = self._engine
        if engine.prefix.is_whole:
            found = self._read_whole(read, trees_left)
        else:
            view = await engine.committed_view()
            again = self._again(read, trees_left)
            found = self._look_up(read, view.get, view.seq, view.wal_id, again)
        return await found if isinstance(found, Awaitable) else found

    def _read_whole(self, read: _Read[ReadReplyT], trees_left: int) -> Answer[ReadReplyT]:
        engine, prefix = self._engine, self._engine.prefix
        again = self._again(read, trees_left)
        return self._look_up(read, engine.committed, prefix.seq, prefix.wal_id, again)

    def _again(self, read: _Read[ReadReplyT], trees_left: int) -> Again[ReadReplyT] | None:
        """How to read once more, in another tree, if this one was lost while it was read."""
        if not trees_left:
            return None
        return lambda: self._read_view(read, trees_left - 1)

    def _look_up(
        self,
        read: _Read[ReadReplyT],
        in_memory: Lookup,
        seq: int,
        wal_id: int | None,
        again: Again[ReadReplyT] | None,
    ) -> Answer[ReadReplyT]:
        """Answer from memory, and from the levels for keys of which memory does not speak.

        The levels are those of this moment: what memory lets go of later is in them.
        """
        keys, answer, staleness_ms, call = read
        header = self._header(seq, wal_id)
        header.staleness_ms = staleness_ms
        held = self._engine.held
        if held.tree.is_empty:
            return answer(in_memory, header, self._engine.time.now_ms())
        known = {key: in_memory(key) for key in keys}
        below = [key for key, entry in known.items() if entry is None and held.may_hold(key)]
        if not below:
            return answer(known.get, header, self._engine.time.now_ms())
        told = partial(self._answer, answer, header)
        return self._read_below(held, below, known, told, again, call)

    async def _read_below(
        self,
        held: PinnedVersion,
        keys: Sequence[bytes],
        known: dict[bytes, Entry | None],
        answer: Callable[[Lookup], ReadReplyT],
        again: Again[ReadReplyT] | None,
        call: Call,
    ) -> ReadReplyT:
        try:
            known.update(await self._in_time(held.find_many(keys), call))
        except ObjectNotFound as missing:
            reason = await self._engine.explain(missing, held)
            if again is None or not isinstance(reason, SnapshotNotFound):
                raise reason from missing
            return await again()
        return answer(known.get)

    def _answer(
        self, answer: Reading[ReadReplyT], header: kv_pb2.ReplyHeader, lookup: Lookup
    ) -> ReadReplyT:
        return answer(lookup, header, self._engine.time.now_ms())


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
