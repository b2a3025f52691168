"""Writes on their way to the log, and their replies: admission, durability, idempotency."""

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
from shalekv.read.read_set import NOTHING_BELOW, ReadSet
from shalekv.server import requests
from shalekv.server.requests import (
    ARCHIVED,
    DURABLE,
    LINEARIZABLE,
    MEMORY,
    QUORUM,
    DurabilityValue,
)
from shalekv.server.service import Answer, Call
from shalekv.server.transactions import Order, ReplyForm, ReplyT
from shalekv.store.reachability import Reachability
from shalekv.v1 import kv_pb2
from shalekv.write.commit import (
    RECORD_BYTES,
    Claim,
    Commit,
    Receipt,
    Settled,
    changes_bytes,
)
from shalekv.write.engine import WriterEngine
from shalekv.write.idempotency import Pending, Remembered
from shalekv.write.pending_replies import still_unknown
from shalekv.write.wal import WriteAheadLog

# --- archived
# Replies that are given when what they tell of is in the object store.


async def archived_reply(slots: WriteAheadLog, answer: Awaitable[ReplyT]) -> ReplyT:
    """The answer, when the object that it names is in the store, and all before it."""
    try:
        reply = await answer
    finally:
        del answer  # its error would hold this frame
    wal_id = reply.header.wal_id if reply.header.HasField("wal_id") else None
    try:
        await slots.archive(wal_id)
    except ShaleError as error:
        raise OutcomeUnknown(
            "the write is durable, but whether it is in the object store is not known: "
            f"{error}. Read the key to find out, or write it again"
        ) from error
    return reply


# --- writes


WriteRequest: TypeAlias = (
    kv_pb2.PutRequest
    | kv_pb2.DeleteRequest
    | kv_pb2.DeleteRangeRequest
    | kv_pb2.WriteRequest
    | kv_pb2.TxnRequest
)
Header: TypeAlias = Callable[[int, int | None], kv_pb2.ReplyHeader]

_NO_NEEDS = Needs()
# Refusals that tell something of the database: it must still be ours when they are told.
_JUDGEMENTS = (ConditionFailed, NotACounter, CounterOverflow)


@dataclass(frozen=True, slots=True)
class _Write(Generic[ReplyT]):
    """One request, ready to be submitted."""

    form: ReplyForm[ReplyT]
    durability: DurabilityValue
    size_bytes: int
    submit: Callable[[Settled, Claim | None, ReadSet], Commit]
    needs: Needs
    is_confirmed: bool  # the database must still be ours when it is told that nothing was written
    # How it becomes files of the levels, instead of being submitted; None: it does not.
    load: Callable[[Settled, Claim | None], Awaitable[Commit]] | None
    key: bytes  # of idempotency; empty: none
    request_hash: bytes
    call: Call


@dataclass(frozen=True, slots=True)
class _Begun(Generic[ReplyT]):
    """A write on its way: `settle` completes `future`, which belongs to its call alone."""

    future: asyncio.Future[ReplyT]
    settle: Settled
    claim: Claim | None = None
    pending: Pending | None = None


class _Loose:
    """What the levels say of a write that waits its turn. It keeps nothing in memory meanwhile.

    A full memtable becomes smaller when nobody holds an older base, so who waits for room must not.
    """

    def __init__(self, below: ReadSet) -> None:
        self._below = replace(below, base=None)
        self._base = weakref.ref(below.base) if below.base is not None else None

    def held(self) -> ReadSet:
        """The same, held again; without a base if that is gone, and the answers with it."""
        return replace(self._below, base=self._base() if self._base is not None else None)


class Writing:
    """Submits writes to the log of a `WriterEngine`, and answers them."""

    def __init__(
        self, engine: WriterEngine, header: Header, clock: Clock, store: Reachability
    ) -> None:
        """`header` makes that of a reply, of a sequence number and a WAL id.

        Deadlines of calls are times of `clock`; `store` follows the reads that are asked of it.
        """
        self._store = store
        self._engine = engine
        self._clock = clock
        self._header = header
        self._turns = FifoLock()
        self._patience = engine.log.patience
        self._is_quorum = engine.log.is_quorum
        self._durable = QUORUM if self._is_quorum else DURABLE

    def commit(
        self,
        changes: Sequence[Change],
        request: WriteRequest,
        form: ReplyForm[ReplyT],
        call: Call,
    ) -> Answer[ReplyT]:
        """Commit changes, whatever is in the database; see `_answer` for the line of `call`.

        A large batch goes into files of its own, past the memtable.
        """
        engine = self._engine
        size_bytes = changes_bytes(changes)

        def submit(settle: Settled, claim: Claim | None, _below: ReadSet) -> Commit:
            return engine.log.submit(changes, settle, claim=claim)

        def load(settle: Settled, claim: Claim | None) -> Awaitable[Commit]:
            return engine.loads.write_batch(changes, settle, size_bytes=size_bytes, claim=claim)

        durability = requests.durability(request.durability, is_quorum=self._is_quorum)
        is_load = size_bytes > engine.skip_memtable_bytes
        if is_load and durability == MEMORY:
            durability = self._durable  # memory does not have it before
        key = request.header.idempotency_key
        write = _Write(
            form,
            durability,
            size_bytes + (RECORD_BYTES if key else 0),
            submit,
            Needs(record_key=record_key(key)) if key else _NO_NEEDS,
            is_confirmed=False,
            load=load if is_load else None,
            key=key,
            request_hash=_hash(request, form.kind) if key else b"",
            call=call,
        )
        return self._answer(write)

    def transact(
        self,
        order: Order,
        request: WriteRequest,
        form: ReplyForm[ReplyT],
        call: Call,
    ) -> Answer[ReplyT]:
        """Commit what a transaction decides to do; see `_answer` for the line of `call`."""
        log = self._engine.log
        durability = requests.durability(request.durability, is_quorum=self._is_quorum)
        is_confirmed = False
        if order.transaction.rests_on_state or form.kind is ReplyKind.TXN:
            is_confirmed = requests.condition_level(request.header) == LINEARIZABLE
            # Its reply tells of a state that is durable, so it can only be given then.
            durability = self._durable if durability == MEMORY else durability
        key = request.header.idempotency_key

        def submit(settle: Settled, claim: Claim | None, below: ReadSet) -> Commit:
            return log.transact(
                order.transaction, settle, size_bytes=order.size_bytes, below=below, claim=claim
            )

        write = _Write(
            form,
            durability,
            order.size_bytes + (RECORD_BYTES if key else 0),
            submit,
            order.transaction.needs(record_key(key) if key else b""),
            is_confirmed=is_confirmed,
            load=None,
            key=key,
            request_hash=_hash(request, form.kind) if key else b"",
            call=call,
        )
        return self._answer(write)

    def _answer(self, write: _Write[ReplyT]) -> Answer[ReplyT]:
        """Submit at once if all is known and there is room; a repeat gets the first reply.

        What has to be read first is overtaken by other writes, but not by those behind it in
        the line of the call.
        """
        engine, line = self._engine, write.call.line
        if write.key:
            known = engine.idempotency.find(write.key, write.request_hash)
            if known is not None:
                return self._repeat(write, known)
        engine.log.check_available()
        below = engine.below.now(write.needs)
        if below is None or line or write.load is not None:
            return self._submit_when_looked_up(write, FifoLock() if line is None else line)
        if not self._turns and engine.admission.try_admit(write.size_bytes):
            return self._submit(write, below)
        return self._submit_when_admitted(write, _Loose(below))

    async def _submit_when_looked_up(self, write: _Write[ReplyT], line: FifoLock) -> ReplyT:
        with line.take() as turn:
            loose = _Loose(await self._look_below(write))
            await turn
            answer = await self._admit_and_submit(write, loose)
        try:
            return answer if isinstance(answer, write.form.message) else await answer
        finally:
            del answer  # its error would hold this frame

    async def _submit_when_admitted(self, write: _Write[ReplyT], loose: _Loose) -> ReplyT:
        answer = await self._admit_and_submit(write, loose)
        try:
            return answer if isinstance(answer, write.form.message) else await answer
        finally:
            del answer  # its error would hold this frame

    async def _admit_and_submit(self, write: _Write[ReplyT], loose: _Loose) -> Answer[ReplyT]:
        """Submit a write as soon as there is room for it; what it returns is not awaited yet."""
        with self._turns.take() as turn:
            await self._admitted(write, turn)
            try:
                below = loose.held()
                while not self._engine.below.is_current(below, write.needs):
                    below = await self._look_below(write)
                known = None
                if write.key:  # a copy of the request may have come meanwhile, or long ago
                    idempotency = self._engine.idempotency
                    known = idempotency.find(write.key, write.request_hash, below.record)
            except (ShaleError, asyncio.CancelledError):
                below = NOTHING_BELOW  # the error keeps this frame, for as long as it is kept
                self._engine.admission.release(write.size_bytes)
                raise
            if known is not None:
                self._engine.admission.release(write.size_bytes)
                return self._repeat(write, known)
            if write.load is None:
                return self._submit(write, below)
            pending = self._begin(write)
        return await self._submit_load(write, write.load, pending)

    def _look_below(self, write: _Write[ReplyT]) -> Awaitable[ReadSet]:
        """Ask the levels before anything of a write is applied."""
        look = self._engine.below.look(write.needs)
        return requests.answer_in_time(look, write.call, self._clock, self._store)

    async def _admitted(self, write: _Write[ReplyT], turn: Waiter) -> None:
        """Wait for room, and until those have gone on who came before and got it, too."""
        admission = self._engine.admission
        await admission.wait(
            write.size_bytes, is_kept=write.load is None, within_ms=self._left_ms(write)
        )
        try:
            await turn
        except asyncio.CancelledError:
            admission.release(write.size_bytes)
            raise

    def _submit(self, write: _Write[ReplyT], below: ReadSet) -> Answer[ReplyT]:
        """Order an admitted write. Its future is this call's own: cancelling it harms nobody."""
        begun = self._begin(write)
        try:
            commit = write.submit(begun.settle, begun.claim, below)
        except ShaleError:
            if begun.claim is not None:
                self._engine.idempotency.abandon(begun.claim)
            raise
        if begun.pending is not None:
            begun.pending.commit = commit
        return self._reply_of(write, commit, begun.future)

    def _begin(self, write: _Write[ReplyT]) -> _Begun[ReplyT]:
        """Register an admitted write, so that a copy of it waits for this one."""
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
        load: Callable[[Settled, Claim | None], Awaitable[Commit]],
        begun: _Begun[ReplyT],
    ) -> Answer[ReplyT]:
        """Write the files of an admitted batch, and order the record that commits them."""
        try:
            commit = await load(begun.settle, begun.claim)
        except ShaleError as error:  # nothing was applied: this is told to copies as well
            begun.settle(error.with_traceback(None))  # whose frames refer to who is told
        except asyncio.CancelledError:
            begun.settle(Stopping("the call with this batch has ended: nothing was applied"))
            raise
        else:
            if begun.pending is not None:
                begun.pending.commit = commit
        self._patience.begin(begun.future, within_ms=self._left_ms(write))
        return self._answered(write, begun.future)

    def _repeat(self, write: _Write[ReplyT], known: Pending | Remembered) -> Answer[ReplyT]:
        """The answer to a request that is known already."""
        if isinstance(known, Remembered):
            reply = write.form.message.FromString(known.record.reply)
            reply.header.CopyFrom(self._header(known.seq, known.record.wal_id))
            return reply if write.durability != ARCHIVED else self._answered(write, _given(reply))
        self._check_hope()
        future: asyncio.Future[ReplyT] = asyncio.get_running_loop().create_future()
        known.waiting.append(self._settle(write, future))
        if known.commit is None:
            self._patience.begin(future, within_ms=self._left_ms(write))
            return future
        return self._reply_of(write, known.commit, future)

    def _reply_of(
        self, write: _Write[ReplyT], commit: Commit, future: asyncio.Future[ReplyT]
    ) -> Answer[ReplyT]:
        if write.durability == MEMORY:
            reply = write.form.reply(commit.decision, MEMORY)
            seq = commit.seq if commit.writes else self._engine.prefix.landed_seq
            reply.header.CopyFrom(self._header(seq, None))
            return reply
        self._patience.begin(future, within_ms=self._left_ms(write))
        answer = self._confirmed(future, commit) if write.is_confirmed else future
        return self._answered(write, answer)

    def _answered(self, write: _Write[ReplyT], answer: Awaitable[ReplyT]) -> Awaitable[ReplyT]:
        """The answer, when it is as durable as it was asked for."""
        if self._is_quorum and write.durability == ARCHIVED:
            return archived_reply(self._engine.slots, answer)
        return answer

    def _left_ms(self, write: _Write[ReplyT]) -> float | None:
        return write.call.answer_within_ms(self._clock.monotonic_ms())

    def _check_hope(self) -> None:
        """Nobody waits for a copy of his write that has been given up."""
        try:
            self._engine.log.check_available()
        except ShaleError as error:
            raise still_unknown() from error

    async def _confirmed(self, future: asyncio.Future[ReplyT], commit: Commit) -> ReplyT:
        """The reply, or the refusal; where nothing was written, once the database is ours still."""
        try:
            reply = await future
            if not commit.writes:
                await self._engine.ownership.confirm()
            return reply
        except _JUDGEMENTS as error:
            judgement = error
        finally:
            del future, commit  # their error would hold this frame
        try:  # not above: what ends the writer would keep each judgement that it stands behind
            await self._engine.ownership.confirm()
            raise judgement
        finally:
            del judgement

    def _settle(self, write: _Write[ReplyT], future: asyncio.Future[ReplyT]) -> Settled:
        form, durability = write.form, write.durability  # not the write: a repeat has it again

        def settle(outcome: Receipt | ShaleError) -> None:
            if not self._patience.end(future):  # the caller has gone; the commit stands anyway
                return
            if isinstance(outcome, Receipt):
                reply = form.reply(outcome.decision, durability)
                reply.header.CopyFrom(self._header(outcome.seq, outcome.wal_id))
                future.set_result(reply)
            else:
                fail(future, outcome)

        return settle

    def _claim(self, write: _Write[ReplyT]) -> Claim:
        def reply(decision: Decision | None) -> bytes:
            return write.form.reply(decision, write.durability).SerializeToString()

        return Claim(
            write.key,
            write.request_hash,
            self._engine.idempotency.expiry_ms(),
            write.form.kind,
            reply,
        )


async def _given(reply: ReplyT) -> ReplyT:
    return reply


def _hash(request: WriteRequest, kind: ReplyKind) -> bytes:
    """What tells a repeat from another request: the method, and all fields but the header.

    Fields are serialized in the order of their numbers, so it stays the same in later versions.
    """
    data = request.SerializeToString(deterministic=True)
    if request.HasField("header"):  # field 1: a tag, its length as a varint, and itself
        header_bytes = request.header.ByteSize()
        length_bytes = max(1, -(-header_bytes.bit_length() // 7))
        data = data[1 + length_bytes + header_bytes :]
    return hashlib.blake2b(bytes((kind,)) + data, digest_size=REQUEST_HASH_BYTES).digest()
