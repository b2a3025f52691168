"""What the writer answers to the calls of `shalekv.v1.KV`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar

from shalekv.clock import Clock
from shalekv.core.entry import Entry
from shalekv.engine.commit import Change, Receipt, changes_bytes
from shalekv.engine.scan import scan_slices
from shalekv.engine.waiting import fail
from shalekv.engine.writer_engine import WriterEngine
from shalekv.errors import DeadlinePassed, ReplyTooLarge, ShaleError
from shalekv.roles import requests
from shalekv.roles.requests import (
    LINEARIZABLE,
    MEMORY,
    UNCOMMITTED,
    DurabilityValue,
    LevelValue,
)
from shalekv.roles.scan_stream import ENTRY_FRAME_BYTES, scan_messages
from shalekv.roles.service import Answer, Call
from shalekv.settings import STREAM_MESSAGE_BYTES_MAX, LimitSettings
from shalekv.v1 import kv_pb2

NOT_FOUND_BYTES = 2  # of a result that holds nothing
WriteReplyT = TypeVar("WriteReplyT", kv_pb2.PutReply, kv_pb2.DeleteReply, kv_pb2.WriteReply)
ReadReplyT = TypeVar("ReadReplyT", kv_pb2.GetReply, kv_pb2.BatchGetReply)


class WriterKv:
    """Implements `roles.service.KvService` on a `WriterEngine`."""

    def __init__(self, engine: WriterEngine, limits: LimitSettings, clock: Clock) -> None:
        """The engine must be running for writes to be answered."""
        self._engine = engine
        self._limits = limits
        self._clock = clock
        manifest = engine.manifest.current
        self._database_id = manifest.database_id
        self._epoch = engine.manifest.own.epoch

    def get(self, request: kv_pb2.GetRequest, call: Call) -> Answer[kv_pb2.GetReply]:
        """The value of one key, at the newest state of the read level."""
        level = self._read_level(request.header, call)
        requests.check_key(request.key, "key")
        return self._read(level, lambda: self._get_reply(request.key, level))

    def batch_get(
        self, request: kv_pb2.BatchGetRequest, call: Call
    ) -> Answer[kv_pb2.BatchGetReply]:
        """The values of many keys at one moment."""
        level = self._read_level(request.header, call)
        requests.check_keys(request, self._limits)
        return self._read(level, lambda: self._batch_get_reply(request, level))

    def put(self, request: kv_pb2.PutRequest, call: Call) -> Answer[kv_pb2.PutReply]:
        """Set one key."""
        requests.check_header(request.header)
        changes = requests.put_changes(request, self._limits)
        return self._write(changes, request.durability, call, kv_pb2.PutReply)

    def delete(self, request: kv_pb2.DeleteRequest, call: Call) -> Answer[kv_pb2.DeleteReply]:
        """Delete one key."""
        requests.check_header(request.header)
        changes = requests.delete_changes(request)
        return self._write(changes, request.durability, call, kv_pb2.DeleteReply)

    def write(self, request: kv_pb2.WriteRequest, call: Call) -> Answer[kv_pb2.WriteReply]:
        """Apply many changes in one commit."""
        requests.check_header(request.header)
        changes = requests.write_changes(request, self._limits)
        return self._write(changes, request.durability, call, kv_pb2.WriteReply)

    async def scan(
        self, request: kv_pb2.ScanRequest, call: Call
    ) -> AsyncIterator[kv_pb2.ScanReply]:
        """Read a range at one sequence number and one logical time."""
        level = self._read_level(request.header, call)
        interval = requests.scan_interval(request)
        engine = self._engine
        if level == LINEARIZABLE:
            await engine.ownership.confirm()
        if level == UNCOMMITTED:
            view = await engine.newest_view()
        else:
            view = await engine.committed_view()
        slices = scan_slices(
            view,
            start=interval.start,
            end=interval.end,
            reverse=request.reverse,
            now_ms=engine.time.now_ms(),
        )
        messages = scan_messages(
            slices,
            request,
            self._header(view.seq, view.wal_id),
            message_bytes=self._limits.scan_message_bytes,
            clock=self._clock,
        )
        async with aclosing(messages):  # lets go of the view as soon as the caller is gone
            async for message in messages:
                yield message

    def _read_level(self, header: kv_pb2.RequestHeader, call: Call) -> LevelValue:
        level = requests.read_level(header)
        self._check_deadline(call)
        self._engine.check_serving()
        return level

    def _read(self, level: LevelValue, answer: Callable[[], ReadReplyT]) -> Answer[ReadReplyT]:
        if level == LINEARIZABLE:
            return self._read_confirmed(answer)
        return answer()

    async def _read_confirmed(self, answer: Callable[[], ReadReplyT]) -> ReadReplyT:
        await self._engine.ownership.confirm()
        return answer()

    def _get_reply(self, key: bytes, level: LevelValue) -> kv_pb2.GetReply:
        entry = self._lookup(key, level, self._engine.time.now_ms())
        header = self._read_header(level)
        if entry is None:
            return kv_pb2.GetReply(header=header)
        return kv_pb2.GetReply(
            header=header,
            found=True,
            value=entry.value,
            seq=entry.seq,
            expire_at_ms=entry.expire_at_ms,
        )

    def _batch_get_reply(
        self, request: kv_pb2.BatchGetRequest, level: LevelValue
    ) -> kv_pb2.BatchGetReply:
        now_ms = self._engine.time.now_ms()
        reply = kv_pb2.BatchGetReply(header=self._read_header(level))
        reply_bytes = 0
        for key in request.keys:
            entry = self._lookup(key, level, now_ms)
            reply_bytes += ENTRY_FRAME_BYTES + len(entry.value) if entry else NOT_FOUND_BYTES
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

    def _lookup(self, key: bytes, level: LevelValue, now_ms: int) -> Entry | None:
        """The version that a read at this level sees; None: the key has no value."""
        engine = self._engine
        is_newest = level == UNCOMMITTED
        entry = engine.newest(key) if is_newest else engine.committed(key)
        return entry if entry is not None and entry.is_visible(now_ms) else None

    def _write(
        self,
        changes: list[Change],
        wanted: int,
        call: Call,
        reply_type: type[WriteReplyT],
    ) -> Answer[WriteReplyT]:
        """Commit `changes`: at once if there is room for them, else when there is."""
        durability = requests.durability(wanted)
        self._check_deadline(call)
        size_bytes = changes_bytes(changes)
        if self._engine.admission.try_admit(size_bytes):
            return self._submit(changes, durability, reply_type)
        return self._submit_when_admitted(changes, size_bytes, durability, reply_type)

    async def _submit_when_admitted(
        self,
        changes: list[Change],
        size_bytes: int,
        durability: DurabilityValue,
        reply_type: type[WriteReplyT],
    ) -> WriteReplyT:
        await self._engine.admission.wait(size_bytes)
        answer = self._submit(changes, durability, reply_type)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def _submit(
        self,
        changes: list[Change],
        durability: DurabilityValue,
        reply_type: type[WriteReplyT],
    ) -> asyncio.Future[WriteReplyT] | WriteReplyT:
        """Order admitted changes. The future is this call's own: cancelling it harms nobody."""
        if durability == MEMORY:
            commit = self._engine.log.submit(changes, _ignore)
            return reply_type(header=self._header(commit.seq, None), durability=durability)
        future: asyncio.Future[WriteReplyT] = asyncio.get_running_loop().create_future()

        def settle(outcome: Receipt | ShaleError) -> None:
            if future.done():  # the caller has gone; the commit stands all the same
                return
            if isinstance(outcome, Receipt):
                header = self._header(outcome.seq, outcome.wal_id)
                future.set_result(reply_type(header=header, durability=durability))
            else:
                fail(future, outcome)

        self._engine.log.submit(changes, settle)
        return future

    def _check_deadline(self, call: Call) -> None:
        if call.deadline_ms is not None and call.deadline_ms <= self._clock.monotonic_ms():
            raise DeadlinePassed("the deadline had passed when the call arrived: nothing was done")

    def _read_header(self, level: LevelValue) -> kv_pb2.ReplyHeader:
        """The header of a read of single keys: nothing that it shows is newer."""
        if level == UNCOMMITTED:
            return self._header(self._engine.log.next_seq - 1, None)
        prefix = self._engine.prefix
        return self._header(prefix.landed_seq, prefix.wal_id)

    def _header(self, seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
        return kv_pb2.ReplyHeader(
            database_id=self._database_id,
            role=kv_pb2.ROLE_WRITER,
            epoch=self._epoch,
            seq=seq,
            wal_id=wal_id,
        )


def _ignore(_: Receipt | ShaleError) -> None:
    """What becomes of a write that was acknowledged from memory; the log reports its loss."""
