"""Writes of the writer: from checked requests through admission to the log, and their replies.

`Writes` applies idempotency keys, waits for admission, submits changes and transactions to the log
of a `WriterEngine`, and completes each reply when the write is as durable as it was asked to be.
"""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias

from shalekv.clock import Clock
from shalekv.concurrency import FifoLock, Waiter, fail
from shalekv.errors import (
    ConditionFailed,
    CounterOverflow,
    NotACounter,
    OutcomeUnknown,
    ShaleError,
    Stopping,
)
from shalekv.format.records import REQUEST_HASH_BYTES, ReplyKind, record_key
from shalekv.protocol.transaction import Change, Decision, Needs
from shalekv.read.read_set import EMPTY_READ_SET, ReadSet
from shalekv.server import requests
from shalekv.server.requests import (
    ARCHIVED,
    LINEARIZABLE,
    MEMORY,
    DurabilityValue,
)
from shalekv.server.service import Answer, Call, MakeHeader
from shalekv.server.transactions import ReplyBuilder, ReplyT, SizedTransaction
from shalekv.store.reachability import Reachability
from shalekv.v1 import kv_pb2
from shalekv.write.commit import (
    RECORD_BYTES,
    Claim,
    Commit,
    OnSettled,
    Receipt,
    changes_bytes,
)
from shalekv.write.engine import WriterEngine
from shalekv.write.idempotency import Pending, Remembered
from shalekv.write.pending_replies import still_unknown

WriteRequest: TypeAlias = (
    kv_pb2.PutRequest
    | kv_pb2.DeleteRequest
    | kv_pb2.DeleteRangeRequest
    | kv_pb2.WriteRequest
    | kv_pb2.TxnRequest
)

_NO_NEEDS = Needs()
# Refusals that depend on the state of the database: they are only sent after the writer has
# confirmed that it still owns it.
_STATE_REFUSALS = (ConditionFailed, NotACounter, CounterOverflow)


async def archived_reply(
    archive: Callable[[int | None], Awaitable[None]], answer: Awaitable[ReplyT]
) -> ReplyT:
    """Await the reply, and then until its WAL object and all before it are in the object store.

    Raises `OutcomeUnknown` if it is durable, and it is not known whether it was archived.
    """
    try:
        reply = await answer
    finally:
        del answer  # its error would hold this frame
    wal_id = reply.header.wal_id if reply.header.HasField("wal_id") else None
    try:
        await archive(wal_id)
    except ShaleError as error:
        raise OutcomeUnknown(
            "the write is durable, but whether it is in the object store is not known: "
            f"{error}. Read the key to find out, or write it again"
        ) from error
    return reply


@dataclass(frozen=True, slots=True)
class _Write(Generic[ReplyT]):
    """One checked write, ready to be submitted."""

    builder: ReplyBuilder[ReplyT]
    durability: DurabilityValue
    size_bytes: int
    submit: Callable[[OnSettled, Claim | None, ReadSet], Commit]
    needs: Needs
    is_confirmed: bool  # confirm ownership before replying that nothing was written
    # Writes the changes to SST files, in place of `submit`; None: they go through the memtable.
    load: Callable[[OnSettled, Claim | None], Awaitable[Commit]] | None
    key: bytes  # idempotency key; empty: none
    request_hash: bytes
    call: Call


@dataclass(frozen=True, slots=True)
class _Begun(Generic[ReplyT]):
    """A registered write: `settle` completes `future`, which belongs to its call alone."""

    future: asyncio.Future[ReplyT]
    settle: OnSettled
    claim: Claim | None = None
    pending: Pending | None = None


class _UnpinnedReadSet:
    """Read set of a write that waits for admission; it does not hold its version token.

    A full memtable shrinks only when no older version token is held, so a write that waits for
    the memtable to shrink must not hold one.
    """

    def __init__(self, read_set: ReadSet) -> None:
        self._read_set = replace(read_set, token=None)
        self._token = weakref.ref(read_set.token) if read_set.token is not None else None

    def pinned(self) -> ReadSet:
        """Return the read set, with its token; without one, and so outdated, if it is gone."""
        return replace(self._read_set, token=self._token() if self._token is not None else None)


class Writes:
    """Submits writes to the log of a `WriterEngine`, and makes their replies."""

    def __init__(
        self, engine: WriterEngine, header: MakeHeader, clock: Clock, store: Reachability
    ) -> None:
        """Create the write path of `engine`.

        Deadlines of calls are times of `clock`. `store` says what is wrong with the object store,
        for the errors of writes whose reads do not end in time.
        """
        self._store = store
        self._engine = engine
        self._clock = clock
        self._header = header
        self._queue = FifoLock()
        self._pending_replies = engine.log.pending_replies
        self._durable = engine.wal.durability

    def commit(
        self,
        changes: Sequence[Change],
        request: WriteRequest,
        builder: ReplyBuilder[ReplyT],
        call: Call,
    ) -> Answer[ReplyT]:
        """Commit changes that do not depend on the state of the database.

        A batch of more than `direct_ingest_bytes` is written to SST files of its own, and does not
        go through the memtable. Later writes of the same session do not overtake this one.
        """
        engine = self._engine
        size_bytes = changes_bytes(changes)

        def submit(settle: OnSettled, claim: Claim | None, _read_set: ReadSet) -> Commit:
            return engine.log.submit(changes, settle, claim=claim)

        def load(settle: OnSettled, claim: Claim | None) -> Awaitable[Commit]:
            return engine.loads.write_batch(changes, settle, size_bytes=size_bytes, claim=claim)

        durability = requests.durability(request.durability, self._durable)
        is_load = size_bytes > engine.direct_ingest_bytes
        if is_load and durability == MEMORY:
            durability = self._durable  # a load is not in memory before it is durable
        key = request.header.idempotency_key
        write = _Write(
            builder,
            durability,
            size_bytes + (RECORD_BYTES if key else 0),
            submit,
            Needs(record_key=record_key(key)) if key else _NO_NEEDS,
            is_confirmed=False,
            load=load if is_load else None,
            key=key,
            request_hash=_request_hash(request, builder.kind) if key else b"",
            call=call,
        )
        return self._answer(write)

    def transact(
        self,
        sized: SizedTransaction,
        request: WriteRequest,
        builder: ReplyBuilder[ReplyT],
        call: Call,
    ) -> Answer[ReplyT]:
        """Commit what a transaction decides.

        Later writes of the same session do not overtake it.
        """
        log = self._engine.log
        durability = requests.durability(request.durability, self._durable)
        is_confirmed = False
        if sized.transaction.depends_on_state or builder.kind is ReplyKind.TXN:
            is_confirmed = requests.condition_level(request.header) == LINEARIZABLE
            # The reply shows a durable state, so it has to wait until that state is durable.
            durability = self._durable if durability == MEMORY else durability
        key = request.header.idempotency_key

        def submit(settle: OnSettled, claim: Claim | None, read_set: ReadSet) -> Commit:
            return log.transact(
                sized.transaction,
                settle,
                size_bytes=sized.size_bytes,
                read_set=read_set,
                claim=claim,
            )

        write = _Write(
            builder,
            durability,
            sized.size_bytes + (RECORD_BYTES if key else 0),
            submit,
            sized.transaction.needs(record_key(key) if key else b""),
            is_confirmed=is_confirmed,
            load=None,
            key=key,
            request_hash=_request_hash(request, builder.kind) if key else b"",
            call=call,
        )
        return self._answer(write)

    def _answer(self, write: _Write[ReplyT]) -> Answer[ReplyT]:
        """Submit at once if the read set is known and admission is free; else wait for them.

        A repeat gets the reply of the first request. A write whose read set has to be fetched may
        be overtaken by other writes, but not by those behind it in the `write_order` of its call.
        """
        engine, write_order = self._engine, write.call.write_order
        if write.key:
            known = engine.idempotency.find(write.key, write.request_hash)
            if known is not None:
                return self._repeat(write, known)
        engine.log.check_available()
        read_set = engine.prefetch.known(write.needs)
        if read_set is None or write_order or write.load is not None:
            return self._submit_in_order(write, write_order)
        if not self._queue and engine.admission.try_admit(write.size_bytes):
            return self._submit(write, read_set)
        return self._submit_when_admitted(write, _UnpinnedReadSet(read_set))

    async def _submit_in_order(self, write: _Write[ReplyT], write_order: FifoLock | None) -> ReplyT:
        with (FifoLock() if write_order is None else write_order).take() as turn:
            unpinned = _UnpinnedReadSet(await self._fetch_read_set(write))
            await turn
            answer = await self._admit_and_submit(write, unpinned)
        try:
            return answer if isinstance(answer, write.builder.message) else await answer
        finally:
            del answer  # its error would hold this frame

    async def _submit_when_admitted(
        self, write: _Write[ReplyT], unpinned: _UnpinnedReadSet
    ) -> ReplyT:
        answer = await self._admit_and_submit(write, unpinned)
        try:
            return answer if isinstance(answer, write.builder.message) else await answer
        finally:
            del answer  # its error would hold this frame

    async def _admit_and_submit(
        self, write: _Write[ReplyT], unpinned: _UnpinnedReadSet
    ) -> Answer[ReplyT]:
        """Submit a write as soon as it is admitted; the caller awaits what this returns."""
        with self._queue.take() as turn:
            await self._admitted(write, turn)
            try:
                read_set = unpinned.pinned()
                while not self._engine.prefetch.is_current(read_set, write.needs):
                    read_set = await self._fetch_read_set(write)
                known = None
                if write.key:  # a copy of the request may have come meanwhile, or long ago
                    idempotency = self._engine.idempotency
                    known = idempotency.find(write.key, write.request_hash, read_set.record)
            except (ShaleError, asyncio.CancelledError):
                read_set = EMPTY_READ_SET  # the error refers to this frame, which must pin nothing
                self._engine.admission.release(write.size_bytes)
                raise
            if known is not None:
                self._engine.admission.release(write.size_bytes)
                return self._repeat(write, known)
            if write.load is None:
                return self._submit(write, read_set)
            begun = self._begin(write)
        return await self._submit_load(write, write.load, begun)

    def _fetch_read_set(self, write: _Write[ReplyT]) -> Awaitable[ReadSet]:
        """Read what a write needs from the levels, before anything of it is applied."""
        fetch = self._engine.prefetch.fetch(write.needs)
        return requests.answer_in_time(fetch, write.call, self._clock, self._store)

    async def _admitted(self, write: _Write[ReplyT], turn: Waiter) -> None:
        """Wait for admission, in FIFO order."""
        admission = self._engine.admission
        await admission.wait(
            write.size_bytes, is_kept=write.load is None, within_ms=self._left_ms(write)
        )
        try:
            await turn
        except asyncio.CancelledError:
            admission.release(write.size_bytes)
            raise

    def _submit(self, write: _Write[ReplyT], read_set: ReadSet) -> Answer[ReplyT]:
        """Give an admitted write its place in the log.

        Its future belongs to this call alone, so cancelling it affects no other call.
        """
        begun = self._begin(write)
        try:
            commit = write.submit(begun.settle, begun.claim, read_set)
        except ShaleError:
            if begun.claim is not None:
                self._engine.idempotency.abandon(begun.claim)
            raise
        if begun.pending is not None:
            begun.pending.commit = commit
        return self._reply_of(write, commit, begun.future)

    def _begin(self, write: _Write[ReplyT]) -> _Begun[ReplyT]:
        """Register an admitted write, so that copies of its request wait for this one."""
        future: asyncio.Future[ReplyT] = asyncio.get_running_loop().create_future()
        settle = self._settle(write, future)
        if not write.key:
            return _Begun(future, settle)
        claim = self._claim(write)
        pending = self._engine.idempotency.begin(claim, settle)
        return _Begun(future, pending.settle, claim, pending)

    async def _submit_load(
        self,
        write: _Write[ReplyT],
        load: Callable[[OnSettled, Claim | None], Awaitable[Commit]],
        begun: _Begun[ReplyT],
    ) -> Answer[ReplyT]:
        """Write the files of an admitted batch, and then submit the record that commits them."""
        try:
            commit = await load(begun.settle, begun.claim)
        except ShaleError as error:  # nothing was applied: copies of the request fail as well
            begun.settle(error.with_traceback(None))  # its frames refer to the waiting futures
        except asyncio.CancelledError:
            begun.settle(Stopping("the call with this batch has ended: nothing was applied"))
            raise
        else:
            if begun.pending is not None:
                begun.pending.commit = commit
        self._pending_replies.begin(begun.future, within_ms=self._left_ms(write))
        return self._when_durable(write, begun.future)

    def _repeat(self, write: _Write[ReplyT], known: Pending | Remembered) -> Answer[ReplyT]:
        """Answer a request whose idempotency key is known, as the first one was answered."""
        if isinstance(known, Remembered):
            reply = write.builder.message.FromString(known.record.reply)
            reply.header.CopyFrom(self._header(known.seq, known.record.wal_id))
            return (
                reply if write.durability != ARCHIVED else self._when_durable(write, _ready(reply))
            )
        self._check_available()
        future: asyncio.Future[ReplyT] = asyncio.get_running_loop().create_future()
        known.waiting.append(self._settle(write, future))
        if known.commit is None:
            self._pending_replies.begin(future, within_ms=self._left_ms(write))
            return future
        return self._reply_of(write, known.commit, future)

    def _reply_of(
        self, write: _Write[ReplyT], commit: Commit, future: asyncio.Future[ReplyT]
    ) -> Answer[ReplyT]:
        if write.durability == MEMORY:
            reply = write.builder.reply(commit.decision, MEMORY)
            seq = commit.seq if commit.writes else self._engine.watermark.landed_seq
            reply.header.CopyFrom(self._header(seq, None))
            return reply
        self._pending_replies.begin(future, within_ms=self._left_ms(write))
        answer = self._confirmed(future, commit) if write.is_confirmed else future
        return self._when_durable(write, answer)

    def _when_durable(self, write: _Write[ReplyT], answer: Awaitable[ReplyT]) -> Awaitable[ReplyT]:
        """Delay an answer until the write is as durable as it was asked to be."""
        if write.durability == ARCHIVED:
            return archived_reply(self._engine.archive, answer)
        return answer

    def _left_ms(self, write: _Write[ReplyT]) -> float | None:
        return write.call.answer_within_ms(self._clock.monotonic_ms())

    def _check_available(self) -> None:
        """Fail a retry at once with `OutcomeUnknown` while the log is unavailable."""
        try:
            self._engine.log.check_available()
        except ShaleError as error:
            raise still_unknown() from error

    async def _confirmed(self, future: asyncio.Future[ReplyT], commit: Commit) -> ReplyT:
        """Await the reply; confirm ownership before reporting that nothing was written.

        Refusals that depend on the state are treated alike.
        """
        try:
            reply = await future
            if not commit.writes:
                await self._engine.ownership.confirm()
            return reply
        except _STATE_REFUSALS as error:
            refusal = error
        finally:
            del future, commit  # their error would hold this frame
        # Outside the handler: the error that ends the writer is kept for good, and would refer to
        # each refusal in whose handler it was raised.
        try:
            await self._engine.ownership.confirm()
            raise refusal
        finally:
            del refusal

    def _settle(self, write: _Write[ReplyT], future: asyncio.Future[ReplyT]) -> OnSettled:
        # `settle` must not refer to `write`: each repeat would keep a copy of the changes alive.
        builder, durability = write.builder, write.durability

        def settle(outcome: Receipt | ShaleError) -> None:
            if not self._pending_replies.end(future):  # the caller has gone: nothing to complete
                return
            if isinstance(outcome, Receipt):
                reply = builder.reply(outcome.decision, durability)
                reply.header.CopyFrom(self._header(outcome.seq, outcome.wal_id))
                future.set_result(reply)
            else:
                fail(future, outcome)

        return settle

    def _claim(self, write: _Write[ReplyT]) -> Claim:
        def reply(decision: Decision | None) -> bytes:
            return write.builder.reply(decision, write.durability).SerializeToString()

        return Claim(
            write.key,
            write.request_hash,
            self._engine.idempotency.expiry_ms(),
            write.builder.kind,
            reply,
        )


async def _ready(reply: ReplyT) -> ReplyT:
    return reply


def _request_hash(request: WriteRequest, kind: ReplyKind) -> bytes:
    """Hash the method and all fields but the header, to tell a repeat from another request.

    Fields are serialized in the order of their numbers, so the hash of a request is the same in
    later versions.
    """
    data = request.SerializeToString(deterministic=True)
    if request.HasField("header"):  # field 1: a tag, its length as a varint, and itself
        header_bytes = request.header.ByteSize()
        length_bytes = max(1, -(-header_bytes.bit_length() // 7))
        data = data[1 + length_bytes + header_bytes :]
    return hashlib.blake2b(bytes((kind,)) + data, digest_size=REQUEST_HASH_BYTES).digest()
