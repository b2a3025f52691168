"""Writes of the writer: from checked requests through admission to the log, and their replies.

`Writes` applies idempotency keys, waits for admission, submits changes and transactions to the log
of a `WriterEngine`, and completes each reply when the write is as durable as it was asked to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, cast

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
from shalekv.format.records import ReplyKind, record_key
from shalekv.protocol.transaction import Change, Needs, Puts, Transaction
from shalekv.read.read_set import EMPTY_READ_SET, ReadSet, UnpinnedReadSet
from shalekv.server import requests
from shalekv.server.replies.costs import NO_REQUESTS, cost_field, cost_of, sent_by_running_task
from shalekv.server.requests import (
    ARCHIVED,
    LINEARIZABLE,
    MEMORY,
    DurabilityValue,
    WriteRequest,
)
from shalekv.server.service import Answer, Call, MakeHeader
from shalekv.server.transactions import (
    ReplyBuilder,
    ReplyEncoder,
    ReplyT,
    SizedTransaction,
    hash_of_request,
)
from shalekv.store.reachability import Reachability
from shalekv.telemetry.activity import ADMISSION, READ_SET, TURN, StoreRequest, Wait
from shalekv.telemetry.costs import Costs
from shalekv.v1 import kv_pb2
from shalekv.write.commit import (
    RECORD_BYTES,
    Commit,
    GroupCharge,
    KeyedRequest,
    Receipt,
    changes_bytes,
)
from shalekv.write.engine import WriterEngine
from shalekv.write.group_commit import GroupCommit
from shalekv.write.idempotency import AppliedRequest, RequestInFlight, key_of_principal
from shalekv.write.pending_replies import PendingReplies, PendingReply, still_unknown

_NO_NEEDS = Needs()
_METHODS = {kind: f"KV.{kind.name.title().replace('_', '')}" for kind in ReplyKind}
_OPERATIONS = {kind: f"Session.{kind.name.lower()}" for kind in ReplyKind}
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
class _Settling:
    """Parts that the replies of all writes need when their commits are settled."""

    log: GroupCommit
    waiting: PendingReplies
    encoder: ReplyEncoder
    costs: Costs

    def charge(self, reply: _WriteReply[ReplyT], bill: GroupCharge) -> None:
        """Charge the call of `reply`, which is answered or not, with the requests of its group."""
        call, kind = reply.call, reply.builder.kind
        is_operation = call.end is not None  # of a session: unary calls end by themselves
        method = (_OPERATIONS if is_operation else _METHODS)[kind]
        self.costs.charge(method, call.principal, bill.key, bill.sent, bill.commit_count)


class _WriteReply(PendingReply[ReplyT]):
    """The reply of one write, which waits for its commit, and refers to it once it is submitted."""

    __slots__ = ("_settling", "builder", "call", "commit", "durability", "is_confirmed")

    def __init__(
        self,
        builder: ReplyBuilder[ReplyT],
        durability: DurabilityValue,
        call: Call,
        settling: _Settling,
        *,
        is_confirmed: bool = False,
    ) -> None:
        """`is_confirmed`: ownership is confirmed before replying that nothing was written."""
        # mypy does not put the type of a reply into the base class.
        super().__init__(builder.parse)  # type: ignore[arg-type]
        self.builder: ReplyBuilder[ReplyT] = builder
        self.durability = durability
        self.call = call
        self.is_confirmed = is_confirmed
        self.commit: Commit | None = None
        self._settling = settling

    @property
    def first_key(self) -> bytes:
        """Implement `PendingReply`."""
        entries = self.commit.entries if self.commit is not None else ()
        return entries[0].key if entries else b""

    def queued_behind(self) -> Sequence[StoreRequest] | None:
        """Implement `PendingReply`."""
        if self.commit is None or self.activity is not None:
            return None
        ahead = self._settling.log.oldest_in_flight
        return () if ahead is None else ahead.requests

    def cancel(self) -> bool:
        """Give up, and note the group that is waited for."""
        self._note_group()
        return super().cancel()

    def set_exception(self, error: ShaleError) -> None:
        """Complete the call with an error, and note the group that was waited for."""
        self._note_group()
        super().set_exception(error)

    def _note_group(self) -> None:
        if self.outcome is None and self.commit is not None:
            self.activity = self._settling.log.group_of(self.commit)

    def settle(self, outcome: Receipt | ShaleError) -> None:
        """Complete the reply with the outcome of the commit, unless the caller has gone."""
        settling = self._settling
        if isinstance(outcome, Receipt):
            if outcome.bill is not None:
                settling.charge(self, outcome.bill)
            if settling.waiting.end(self):
                self.activity = outcome.activity
                self._complete(settling.encoder.encode(self.builder, self.durability, outcome))
        elif settling.waiting.end(self):
            fail(self, outcome)


class _CostedReply(_WriteReply[ReplyT]):
    """The reply of a write that is to tell its cost: that of its group, and of its own requests."""

    __slots__ = ()

    def tell_cost(self, message: Any) -> None:
        """Put into a reply what the write has cost so far; it runs in the present task, if any."""
        message.header.cost.CopyFrom(self._cost(sent_by_running_task()))

    def _cost(self, own: Mapping[str, int]) -> kv_pb2.Cost:
        return cost_of(self._settling.costs.prices, own, self.activity)

    def _complete(self, outcome: bytes | BaseException) -> bool:
        if isinstance(outcome, bytes):  # by the log: the call has no requests of its own so far
            outcome += cost_field(self._cost(NO_REQUESTS))
        return super()._complete(outcome)

    def __await__(self) -> Generator[Any, None, ReplyT]:
        """Return the reply, with the cost of the task that waits."""
        try:
            message: Any = yield from super().__await__()
            self.tell_cost(message)
            return cast("ReplyT", message)
        finally:
            del self  # an error would hold this frame


@dataclass(slots=True)
class _Write(Generic[ReplyT]):
    """A checked write that may have to wait before it is submitted."""

    work: Puts | Sequence[Change] | Transaction
    reply: _WriteReply[ReplyT]
    size_bytes: int
    needs: Needs
    key: bytes  # idempotency key of the principal; empty: none
    chosen: bytes  # the key as the client has chosen it
    request_hash: bytes
    is_load: bool = False  # the changes are written to SST files, not to the memtable

    @property
    def admitted_bytes(self) -> int:
        """The size of the write with its idempotency record, if it has one."""
        return self.size_bytes + (RECORD_BYTES if self.key else 0)


class Writes:
    """Submits writes to the log of a `WriterEngine`, and makes their replies."""

    def __init__(
        self,
        engine: WriterEngine,
        header: MakeHeader,
        clock: Clock,
        store: Reachability,
        costs: Costs,
    ) -> None:
        """Create the write path of `engine`.

        Deadlines of calls are times of `clock`. `store` says what is wrong with the object store,
        for the errors of writes whose reads do not end in time. `costs` are charged with commits.
        """
        self._store = store
        self._engine = engine
        self._clock = clock
        self._settling = _Settling(
            engine.log, engine.log.pending_replies, ReplyEncoder(header), costs
        )
        self._header = header
        self._log, self._admission = engine.log, engine.log.admission
        self._queue = FifoLock()
        self._pending_replies = engine.log.pending_replies
        self._durable = engine.wal.durability
        self._direct_ingest_bytes = engine.direct_ingest_bytes

    def commit(
        self,
        changes: Puts | Sequence[Change],
        request: WriteRequest,
        builder: ReplyBuilder[ReplyT],
        call: Call,
    ) -> Answer[ReplyT]:
        """Commit changes that do not depend on the state of the database.

        A batch of more than `direct_ingest_bytes` is written to SST files of its own, and does not
        go through the memtable. Later writes of the same session do not overtake this one.
        """
        engine = self._engine
        chosen = key = b""
        new_reply: type[_WriteReply[ReplyT]] = _WriteReply
        if request.HasField("header"):
            header = request.header
            chosen = key = header.idempotency_key
            new_reply = _CostedReply if header.report_cost else _WriteReply
        size_bytes = changes_bytes(changes)
        is_load = size_bytes > self._direct_ingest_bytes
        durability = self._durable
        if request.durability:
            durability = requests.durability(request.durability, durability)
        if is_load and durability == MEMORY:
            durability = self._durable  # a load is not in memory before it is durable
        reply = new_reply(builder, durability, call, self._settling)
        request_hash, key_of_record, admitted_bytes = b"", b"", size_bytes
        if chosen:
            request_hash = hash_of_request(request, builder.kind)
            key = _key_of(call, chosen)
            key_of_record = record_key(key)
            admitted_bytes += RECORD_BYTES
        is_free = not (is_load or call.write_order or self._queue)
        if is_free and key:
            is_new = engine.idempotency.find(key, request_hash, chosen=chosen) is None
            is_free = is_new and engine.prefetch.lacks_record(key_of_record)
        if not (is_free and self._admission.try_admit(admitted_bytes)):
            needs = Needs(record_key=key_of_record) if key else _NO_NEEDS
            write = _Write(changes, reply, size_bytes, needs, key, chosen, request_hash, is_load)
            return self._answer(write)
        pending = self._begin(reply, key, request_hash) if key else None
        log = self._log
        if pending is None:
            commit = Commit(changes, log.next_seq, reply.settle, size_bytes=size_bytes)
        else:
            commit = Commit(
                changes, log.next_seq, pending.settle, size_bytes=size_bytes, keyed=pending.keyed
            )
        try:
            log.submit(commit)
        except ShaleError:
            self._abandon(pending)
            raise
        if durability != self._durable or pending is not None or call.deadline_ms is not None:
            return self._reply_of(reply, commit, pending)
        reply.commit = commit
        self._pending_replies.add(reply)
        return reply

    async def commit_later(
        self,
        prepare: Callable[[], Awaitable[Puts | Sequence[Change] | SizedTransaction]],
        request: WriteRequest,
        builder: ReplyBuilder[ReplyT],
        call: Call,
    ) -> ReplyT:
        """Commit what takes some time to prepare, as `commit` and `transact` do.

        Later writes of the same session do not overtake it.
        """
        write_order = FifoLock() if call.write_order is None else call.write_order
        with write_order.take() as turn:
            work = await prepare()
            with Wait(TURN):
                await turn
            call = replace(call, write_order=None)
            if isinstance(work, SizedTransaction):
                answer = self.transact(work, request, builder, call)
            else:
                answer = self.commit(work, request, builder, call)
            if not isinstance(answer, PendingReply | builder.message):
                answer = await answer  # it has not necessarily been submitted before
        try:
            return answer if isinstance(answer, builder.message) else await answer
        finally:
            del answer  # its error would hold this frame

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
        durability = requests.durability(request.durability, self._durable)
        is_confirmed = False
        if sized.transaction.depends_on_state or builder.kind is ReplyKind.TXN:
            is_confirmed = requests.condition_level(request.header) == LINEARIZABLE
            # The reply shows a durable state, so it has to wait until that state is durable.
            durability = self._durable if durability == MEMORY else durability
        new_reply: type[_WriteReply[ReplyT]] = _WriteReply
        if request.header.report_cost:
            new_reply = _CostedReply
        reply = new_reply(builder, durability, call, self._settling, is_confirmed=is_confirmed)
        chosen = request.header.idempotency_key
        key = _key_of(call, chosen) if chosen else b""
        needs = sized.transaction.needs(record_key(key) if key else b"")
        request_hash = hash_of_request(request, builder.kind) if key else b""
        return self._answer(
            _Write(sized.transaction, reply, sized.size_bytes, needs, key, chosen, request_hash)
        )

    def _answer(self, write: _Write[ReplyT]) -> Answer[ReplyT]:
        """Submit at once if the read set is known and admission is free; else wait for them.

        A repeat gets the reply of the first request. A write whose read set has to be fetched may
        be overtaken by other writes, but not by those behind it in the `write_order` of its call.
        """
        engine, write_order = self._engine, write.reply.call.write_order
        if write.key:
            known = engine.idempotency.find(write.key, write.request_hash, chosen=write.chosen)
            if known is not None:
                return self._repeat(write.reply, known)
        if not write.key or engine.prefetch.lacks_record(write.needs.record_key):
            engine.log.check_available()  # of a repeat that is in the levels it would be untrue
        read_set = engine.prefetch.known(write.needs)
        if read_set is None or write_order or write.is_load:
            return self._submit_in_order(write, write_order)
        if not self._queue and engine.admission.try_admit(write.admitted_bytes):
            return self._submit(write, read_set)
        return self._submit_when_admitted(write, UnpinnedReadSet(read_set))

    async def _submit_in_order(self, write: _Write[ReplyT], write_order: FifoLock | None) -> ReplyT:
        with (FifoLock() if write_order is None else write_order).take() as turn:
            unpinned = UnpinnedReadSet(await self._fetch_read_set(write))
            with Wait(TURN):
                await turn
            answer = await self._admit_and_submit(write, unpinned)
        try:
            return answer if isinstance(answer, write.reply.builder.message) else await answer
        finally:
            del answer, write  # the error would hold this frame, which would hold the error

    async def _submit_when_admitted(
        self, write: _Write[ReplyT], unpinned: UnpinnedReadSet
    ) -> ReplyT:
        answer = await self._admit_and_submit(write, unpinned)
        try:
            return answer if isinstance(answer, write.reply.builder.message) else await answer
        finally:
            del answer, write  # the error would hold this frame, which would hold the error

    async def _admit_and_submit(
        self, write: _Write[ReplyT], unpinned: UnpinnedReadSet
    ) -> Answer[ReplyT]:
        """Submit a write as soon as it is admitted; the caller awaits what this returns."""
        with self._queue.take() as turn:
            with Wait(ADMISSION):
                await self._admitted(write, turn)
            try:
                read_set = unpinned.pinned()
                while not self._engine.prefetch.is_current(read_set, write.needs):
                    read_set = await self._fetch_read_set(write)
                known = None
                if write.key:  # a copy of the request may have come meanwhile, or long ago
                    idempotency = self._engine.idempotency
                    known = idempotency.find(
                        write.key, write.request_hash, read_set.record, chosen=write.chosen
                    )
            except (ShaleError, asyncio.CancelledError):
                read_set = EMPTY_READ_SET  # the error refers to this frame, which must pin nothing
                self._engine.admission.release(write.admitted_bytes)
                raise
            if known is not None:
                self._engine.admission.release(write.admitted_bytes)
                return self._repeat(write.reply, known)
            if not write.is_load:
                return self._submit(write, read_set)
            pending = self._begin(write.reply, write.key, write.request_hash) if write.key else None
        return await self._submit_load(write, pending)

    async def _fetch_read_set(self, write: _Write[ReplyT]) -> ReadSet:
        """Read what a write needs from the levels, before anything of it is applied."""
        fetch = self._engine.prefetch.fetch(write.needs)
        explain = self._store.explain
        with Wait(READ_SET):
            return await requests.answer_in_time(fetch, write.reply.call, self._clock, explain)

    async def _admitted(self, write: _Write[ReplyT], turn: Waiter) -> None:
        """Wait for admission, in FIFO order."""
        admission = self._engine.admission
        await admission.wait(
            write.admitted_bytes, is_kept=not write.is_load, within_ms=self._left_ms(write.reply)
        )
        try:
            await turn
        except asyncio.CancelledError:
            admission.release(write.admitted_bytes)
            raise

    def _submit(self, write: _Write[ReplyT], read_set: ReadSet) -> Answer[ReplyT]:
        """Give an admitted write its place in the log."""
        log, reply = self._engine.log, write.reply
        pending = self._begin(reply, write.key, write.request_hash) if write.key else None
        settle, keyed = reply.settle, None
        if pending is not None:
            settle, keyed = pending.settle, pending.keyed
        try:
            if isinstance(write.work, Transaction):
                commit = log.transact(
                    write.work, settle, size_bytes=write.size_bytes, read_set=read_set, keyed=keyed
                )
            else:
                commit = Commit(
                    write.work, log.next_seq, settle, size_bytes=write.size_bytes, keyed=keyed
                )
                log.submit(commit)
        except ShaleError:
            self._abandon(pending)
            raise
        return self._reply_of(reply, commit, pending)

    def _begin(
        self, reply: _WriteReply[ReplyT], key: bytes, request_hash: bytes
    ) -> RequestInFlight:
        """Register an admitted write, so that copies of its request wait for this one."""
        idempotency, builder = self._engine.idempotency, reply.builder
        encode = partial(builder.encode, durability=reply.durability)
        keyed = KeyedRequest(key, request_hash, idempotency.expiry_ms(), builder.kind, encode)
        return idempotency.begin(keyed, reply.settle)

    def _abandon(self, pending: RequestInFlight | None) -> None:
        """Unregister a write that could not be submitted."""
        if pending is not None:
            self._engine.idempotency.abandon(pending.keyed)

    async def _submit_load(
        self, write: _Write[ReplyT], pending: RequestInFlight | None
    ) -> Answer[ReplyT]:
        """Write the files of an admitted batch, and then submit the record that commits them."""
        assert not isinstance(write.work, Transaction)
        reply, keyed = write.reply, None if pending is None else pending.keyed
        settle = reply.settle if pending is None else pending.settle
        try:
            commit = await self._engine.loads.write_batch(
                write.work, settle, size_bytes=write.size_bytes, keyed=keyed
            )
        except ShaleError as error:  # nothing was applied: copies of the request fail as well
            settle(error.with_traceback(None))  # its frames refer to the waiting futures
        except asyncio.CancelledError:
            settle(Stopping("the call with this batch has ended: nothing was applied"))
            raise
        else:
            if pending is not None:
                pending.commit = commit
        self._pending_replies.begin(reply, within_ms=self._left_ms(reply))
        return self._when_durable(reply, reply)

    def _repeat(
        self, reply: _WriteReply[ReplyT], known: RequestInFlight | AppliedRequest
    ) -> Answer[ReplyT]:
        """Answer a request whose idempotency key is known, as the first one was answered."""
        if isinstance(known, AppliedRequest):
            message = reply.builder.message.FromString(known.record.reply)
            message.header.CopyFrom(self._header(known.seq, known.record.wal_id))
            if isinstance(reply, _CostedReply):
                reply.tell_cost(message)
            is_ready = reply.durability != ARCHIVED
            return message if is_ready else self._when_durable(reply, _ready(message))
        self._check_available()
        known.waiting.append(reply.settle)
        if known.commit is None:
            self._pending_replies.begin(reply, within_ms=self._left_ms(reply))
            return reply
        return self._reply_of(reply, known.commit)

    def _reply_of(
        self, reply: _WriteReply[ReplyT], commit: Commit, pending: RequestInFlight | None = None
    ) -> Answer[ReplyT]:
        """Answer a write that was submitted as `commit`, and is registered as `pending`.

        With durability MEMORY it is answered at once, else when its commit is settled.
        """
        if pending is not None:
            pending.commit = commit
        reply.commit = commit
        if reply.durability == MEMORY:
            message = reply.builder.reply(commit.decision, MEMORY)
            seq = commit.seq if commit.writes else self._engine.watermark.landed_seq
            message.header.CopyFrom(self._header(seq, None))
            if isinstance(reply, _CostedReply):
                reply.tell_cost(message)
            return message
        self._pending_replies.begin(reply, within_ms=self._left_ms(reply))
        answer = self._confirmed(reply, commit) if reply.is_confirmed else reply
        return self._when_durable(reply, answer)

    def _when_durable(
        self, reply: _WriteReply[ReplyT], answer: Awaitable[ReplyT]
    ) -> Awaitable[ReplyT]:
        """Delay an answer until the write is as durable as it was asked to be."""
        if reply.durability == ARCHIVED:
            return archived_reply(self._engine.archive, answer)
        return answer

    def _left_ms(self, reply: _WriteReply[ReplyT]) -> float | None:
        if reply.call.deadline_ms is None:
            return None
        return reply.call.answer_within_ms(self._clock.monotonic_ms())

    def _check_available(self) -> None:
        """Fail a retry at once with `OutcomeUnknown` while the log is unavailable."""
        try:
            self._engine.log.check_available()
        except ShaleError as error:
            raise still_unknown() from error

    async def _confirmed(self, pending: PendingReply[ReplyT], commit: Commit) -> ReplyT:
        """Await the reply; confirm ownership before reporting that nothing was written.

        Refusals that depend on the state are treated alike.
        """
        try:
            reply = await pending
            if not commit.writes:
                await self._engine.ownership.confirm()
                if isinstance(pending, _CostedReply):
                    pending.tell_cost(reply)
            return reply
        except _STATE_REFUSALS as error:
            refusal = error
        finally:
            del pending, commit  # their error would hold this frame
        # Outside the handler: the error that ends the writer is kept for good, and would refer to
        # each refusal in whose handler it was raised.
        try:
            await self._engine.ownership.confirm()
            raise refusal
        finally:
            del refusal


async def _ready(reply: ReplyT) -> ReplyT:
    return reply


def _key_of(call: Call, chosen: bytes) -> bytes:
    return key_of_principal(chosen, call.principal, has_policy=bool(call.secret))
