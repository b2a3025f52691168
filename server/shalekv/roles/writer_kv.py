"""What the writer answers to the calls of `shalekv.v1.KV`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from shalekv.core.entry import Entry
from shalekv.core.transaction import RESULT_FRAME_BYTES
from shalekv.engine.levels.held_tree import HeldTree
from shalekv.engine.writer_engine import WriterEngine
from shalekv.errors import DeadlinePassed, ObjectNotFound, ReplyTooLarge
from shalekv.roles import reply_form, requests, transactions
from shalekv.roles.requests import LINEARIZABLE, UNCOMMITTED, LevelValue
from shalekv.roles.scans import Scans
from shalekv.roles.service import Answer, Call
from shalekv.roles.writing import Writing
from shalekv.runtime import Runtime
from shalekv.settings import STREAM_MESSAGE_BYTES_MAX, LimitSettings
from shalekv.v1 import kv_pb2

NOT_FOUND_BYTES = 2  # of a result that holds nothing
ReadReplyT = TypeVar("ReadReplyT", kv_pb2.GetReply, kv_pb2.BatchGetReply)
Lookup: TypeAlias = Callable[[bytes], Entry | None]  # the version of a key in one state
Reading: TypeAlias = Callable[[Lookup, kv_pb2.ReplyHeader], ReadReplyT]


class WriterKv:
    """Implements `roles.service.KvService` on a `WriterEngine`."""

    def __init__(self, engine: WriterEngine, limits: LimitSettings, runtime: Runtime) -> None:
        """The engine must be running for writes to be answered."""
        self._engine = engine
        self._limits = limits
        self._clock = runtime.clock
        self._database_id = engine.manifest.current.database_id
        self._epoch = engine.manifest.own.epoch
        self._writing = Writing(engine, self._header)
        self.scans = Scans(engine, limits, runtime.clock, runtime.random, header=self._header)

    def get(self, request: kv_pb2.GetRequest, call: Call) -> Answer[kv_pb2.GetReply]:
        """The value of one key, at the newest state of the read level."""
        level = self._read_level(request.header, call)
        requests.check_key(request.key, "key")
        return self._read(level, (request.key,), partial(self._get_reply, request.key))

    def batch_get(
        self, request: kv_pb2.BatchGetRequest, call: Call
    ) -> Answer[kv_pb2.BatchGetReply]:
        """The values of many keys at one moment."""
        level = self._read_level(request.header, call)
        requests.check_keys(request, self._limits)
        return self._read(level, request.keys, partial(self._batch_get_reply, request))

    def put(self, request: kv_pb2.PutRequest, call: Call) -> Answer[kv_pb2.PutReply]:
        """Set one key."""
        self._check_write(request.header, call)
        if request.HasField("precondition"):
            order = transactions.put_order(request, self._limits)
            return self._writing.transact(order, request, reply_form.PUT, call.line)
        change = requests.put_change(request, self._limits, self._engine.time.now_ms)
        return self._writing.commit([change], request, reply_form.PUT, call.line)

    def delete(self, request: kv_pb2.DeleteRequest, call: Call) -> Answer[kv_pb2.DeleteReply]:
        """Delete one key."""
        self._check_write(request.header, call)
        if request.HasField("precondition"):
            order = transactions.delete_order(request)
            return self._writing.transact(order, request, reply_form.DELETE, call.line)
        change = requests.delete_change(request)
        return self._writing.commit([change], request, reply_form.DELETE, call.line)

    def delete_range(
        self, request: kv_pb2.DeleteRangeRequest, call: Call
    ) -> Answer[kv_pb2.DeleteRangeReply]:
        """Delete all keys of a range."""
        self._check_write(request.header, call)
        order = transactions.delete_range_order(request)
        return self._writing.transact(order, request, reply_form.DELETE_RANGE, call.line)

    def write(self, request: kv_pb2.WriteRequest, call: Call) -> Answer[kv_pb2.WriteReply]:
        """Apply many changes in one commit."""
        self._check_write(request.header, call)
        changes = requests.write_changes(request, self._limits, self._engine.time.now_ms)
        if changes is None:
            order = transactions.write_order(request, self._limits)
            return self._writing.transact(order, request, reply_form.WRITE, call.line)
        return self._writing.commit(changes, request, reply_form.WRITE, call.line)

    def txn(self, request: kv_pb2.TxnRequest, call: Call) -> Answer[kv_pb2.TxnReply]:
        """Compare, then read and change, in one commit."""
        self._check_write(request.header, call)
        order = transactions.txn_order(request, self._limits)
        return self._writing.transact(order, request, reply_form.TXN, call.line)

    def scan(self, request: kv_pb2.ScanRequest, call: Call) -> AsyncIterator[kv_pb2.ScanReply]:
        """Read a range at one sequence number and one logical time."""
        level = self._read_level(request.header, call)
        return self.scans.scan(request, level)

    def _check_write(self, header: kv_pb2.RequestHeader, call: Call) -> None:
        requests.check_header(header)
        self._check_deadline(call)

    def _read_level(self, header: kv_pb2.RequestHeader, call: Call) -> LevelValue:
        level = requests.read_level(header)
        self._check_deadline(call)
        self._engine.check_serving()
        return level

    def _read(
        self, level: LevelValue, keys: Sequence[bytes], answer: Reading[ReadReplyT]
    ) -> Answer[ReadReplyT]:
        """Answer from the newest state of the level: at once if it is there and known to be ours.

        A read shows a prefix of the log, as a scan does. While objects land out of order it waits
        for those before what has landed: two reads that saw one and not the other would show an
        order of commits that never was (I14).
        """
        engine = self._engine
        if level == LINEARIZABLE:
            return self._read_confirmed(keys, answer)
        if level == UNCOMMITTED:
            return self._look_up(keys, answer, engine.newest, engine.log.next_seq - 1, None)
        if not engine.prefix.is_whole:
            return self._read_view(keys, answer)
        prefix = engine.prefix
        return self._look_up(keys, answer, engine.committed, prefix.seq, prefix.wal_id)

    async def _read_confirmed(
        self, keys: Sequence[bytes], answer: Reading[ReadReplyT]
    ) -> ReadReplyT:
        await self._engine.ownership.confirm()
        return await self._read_view(keys, answer)

    async def _read_view(self, keys: Sequence[bytes], answer: Reading[ReadReplyT]) -> ReadReplyT:
        engine, prefix = self._engine, self._engine.prefix
        if prefix.is_whole:
            found = self._look_up(keys, answer, engine.committed, prefix.seq, prefix.wal_id)
        else:
            view = await engine.committed_view()
            found = self._look_up(keys, answer, view.get, view.seq, view.wal_id)
        return await found if isinstance(found, Awaitable) else found

    def _look_up(
        self,
        keys: Sequence[bytes],
        answer: Reading[ReadReplyT],
        in_memory: Lookup,
        seq: int,
        wal_id: int | None,
    ) -> Answer[ReadReplyT]:
        """Answer from memory, and from the levels for keys of which memory does not speak.

        The levels are those of this moment: what memory lets go of later is in them.
        """
        header = self._header(seq, wal_id)
        held = self._engine.levels.current
        if held.tree.is_empty:
            return answer(in_memory, header)
        known = {key: in_memory(key) for key in keys}
        below = [key for key, entry in known.items() if entry is None and held.may_hold(key)]
        if not below:
            return answer(known.get, header)
        return self._read_below(held, below, known, lambda lookup: answer(lookup, header))

    async def _read_below(
        self,
        held: HeldTree,
        keys: Sequence[bytes],
        known: dict[bytes, Entry | None],
        answer: Callable[[Lookup], ReadReplyT],
    ) -> ReadReplyT:
        try:
            known.update(await held.find_many(keys))
        except ObjectNotFound as missing:
            raise await self._engine.explain(missing, held) from missing
        return answer(known.get)

    def _get_reply(self, key: bytes, lookup: Lookup, header: kv_pb2.ReplyHeader) -> kv_pb2.GetReply:
        entry = lookup(key)
        if entry is None or not entry.is_visible(self._engine.time.now_ms()):
            return kv_pb2.GetReply(header=header)
        return kv_pb2.GetReply(
            header=header,
            found=True,
            value=entry.value,
            seq=entry.seq,
            expire_at_ms=entry.expire_at_ms,
        )

    def _batch_get_reply(
        self, request: kv_pb2.BatchGetRequest, lookup: Lookup, header: kv_pb2.ReplyHeader
    ) -> kv_pb2.BatchGetReply:
        now_ms = self._engine.time.now_ms()
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

    def _check_deadline(self, call: Call) -> None:
        if call.deadline_ms is not None and call.deadline_ms <= self._clock.monotonic_ms():
            raise DeadlinePassed("the deadline had passed when the call arrived: nothing was done")

    def _header(self, seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
        return kv_pb2.ReplyHeader(
            database_id=self._database_id,
            role=kv_pb2.ROLE_WRITER,
            epoch=self._epoch,
            seq=seq,
            wal_id=wal_id,
        )
