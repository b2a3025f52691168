"""One member: the log of one database on this node, and what it has promised.

Messages are stepped by the pure acceptor strictly in the order in which they are taken; what a step
wants done goes to the disk in that order, and a reply is given when all before it is durable.
Taking a message does not wait for the sync of the one before: appends are pipelined, and one sync
answers many.

Streams are numbered here, in the order in which they are opened: rule CE10 rests on that.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from shalekv.errors import CorruptObject, LogDamaged, RecordTrimmed, ShaleError
from shalekv.format.wal_record import HEADER_BYTES
from shalekv.protocol import acceptor
from shalekv.protocol.acceptor import (
    AcceptorState,
    CommittedUpTo,
    Effect,
    Flush,
    Reply,
    Reset,
    Save,
    Truncate,
    Write,
)
from shalekv.protocol.quorum_records import (
    Append,
    LogEnd,
    LogHealth,
    Record,
    Refusal,
    ToAcceptor,
    ToProposer,
)
from shalekv.runtime import Runtime
from shalekv.server.safekeeper.log_objects import Archiving
from shalekv.settings import SafekeeperSettings
from shalekv.store.safekeeper_log.log import MemberLog
from shalekv.store.safekeeper_log.syncer import Syncer

# --- recent
# The end of a log in memory, so that tails and the filling of members rarely read the disk.
#
# It always holds what is not on the disk yet, and of the rest as much as fits, newest first.


# What a record takes beside its payload.
RECORD_BYTES = 200


class RecentRecords:
    """The last records of one log, without gaps up to its end."""

    def __init__(self, last_lsn: int, bytes_max: int) -> None:
        """Nothing of a log that ends with `last_lsn` is in memory yet."""
        self._records: dict[int, Record] = {}  # by lsn
        self._last_lsn = last_lsn
        self._flushed_lsn = last_lsn
        self._bytes_max = bytes_max
        self.held_bytes = 0

    @property
    def first_lsn(self) -> int:
        """From here on everything is here; behind the end of the log: nothing is."""
        return self._last_lsn - len(self._records) + 1

    def append(self, records: Iterable[Record]) -> None:
        """These are at the end of the log now. REQUIRES: they follow it."""
        for record in records:
            self._records[record.lsn] = record
            self._last_lsn = record.lsn
            self.held_bytes += _size(record)

    def flushed(self, lsn: int) -> None:
        """The disk has the records up to `lsn`: they may be dropped when there is no room."""
        self._flushed_lsn = max(self._flushed_lsn, lsn)
        while self.held_bytes > self._bytes_max and self.first_lsn <= self._flushed_lsn:
            self._drop_first()

    def truncate(self, last_lsn: int) -> None:
        """The log ends with `last_lsn` now."""
        for lsn in range(max(self.first_lsn, last_lsn + 1), self._last_lsn + 1):
            self.held_bytes -= _size(self._records.pop(lsn))
        self._last_lsn = last_lsn
        self._flushed_lsn = min(self._flushed_lsn, last_lsn)

    def reset(self, base_lsn: int) -> None:
        """The log is empty now, and goes on behind `base_lsn`."""
        self._records.clear()
        self.held_bytes = 0
        self._last_lsn = self._flushed_lsn = base_lsn

    def trim(self, base_lsn: int) -> None:
        """Records up to `base_lsn` are not in the log any more."""
        while self._records and self.first_lsn <= base_lsn:
            self._drop_first()

    def read(self, first_lsn: int, last_lsn: int, bytes_max: int) -> list[Record]:
        """Records from `first_lsn` on, at least one. REQUIRES: both are here."""
        taken: list[Record] = []
        size_bytes = 0
        for lsn in range(first_lsn, last_lsn + 1):
            record = self._records[lsn]
            size_bytes += _size(record)
            if taken and size_bytes > bytes_max:
                break
            taken.append(record)
        return taken

    def _drop_first(self) -> None:
        self.held_bytes -= _size(self._records.pop(self.first_lsn))


def _size(record: Record) -> int:
    return len(record.payload) + RECORD_BYTES


# --- member


log = structlog.get_logger()

# A commit point is not: on the disk it is a hint, which goes there with what comes next.
_WAITED_FOR = (Save, Truncate, Reset, Write, Flush)


class WriterStream(Protocol):
    """What a member tells a writer beside replies to what came on its stream."""

    def wake(self) -> None:
        """There may be tidings: see `LocalMember.tidings`."""

    def answer(self, reply: Awaitable[ToProposer | None], size_bytes: int) -> None:
        """Something of the writer's was taken that came another way; its reply is for here."""


@dataclass(slots=True)
class _NotArchiving:
    """Before its archiver has begun."""

    is_archiver: bool = False
    problem: str = ""


class LocalMember:
    """The log of one database. All methods are for the thread of the loop."""

    def __init__(
        self, member_log: MemberLog, syncer: Syncer, settings: SafekeeperSettings, runtime: Runtime
    ) -> None:
        """`member_log` was opened or created just now; nobody else writes to it."""
        self.identity = member_log.identity
        self.state: AcceptorState = member_log.recovered
        self.archiving: Archiving = _NotArchiving()
        self.archiver_id = b""  # whom the writer has appointed; empty: nobody
        self.writer_heard_ms: float | None = None  # when its leader was heard of last
        self.log = member_log
        self._syncer = syncer
        self._settings = settings
        self._runtime = runtime
        self._recent = RecentRecords(self.state.log.last.lsn, settings.recent_bytes_max)
        self._streams = 0
        self._writers: dict[int, WriterStream] = {}  # by stream
        self._cuts = 0  # of the log: what was flushed or read before them counts no more
        self._hints: list[CommittedUpTo] = []  # that the disk has not got yet; the last one counts
        self._is_disk_full = False
        self.is_room_wanted = False  # the log was too large for records since `note_looking`
        self._ended: ShaleError | None = None
        self._changed = asyncio.Event()  # set, and replaced, whenever more is committed

    # The protocol.

    def open_stream(self, writer: WriterStream | None = None) -> int:
        """The number of a stream that was opened just now. Raises what ended the member."""
        self._check_not_ended()
        self._streams += 1
        if writer is not None:
            self._writers[self._streams] = writer
        return self._streams

    async def take(self, stream: int, message: ToAcceptor) -> Awaitable[ToProposer | None]:
        """Step a message; await what is returned for its reply, None of appends of no records.

        To be called for one message of a stream after the other: they are stepped in that order,
        and their replies are to be sent in it. It waits for space on the disk at most, not for what
        is under way. Raises what ended the member: see `end`.
        """
        self._check_not_ended()
        has_room = not isinstance(message, Append) or await self._make_room(message.records)
        self._check_not_ended()
        before, committed_lsn = self.state, self.state.committed_lsn
        state, effects = acceptor.step(before, stream, message, has_room=has_room)
        self.state = state
        overtaken = acceptor.overtaken(before, state)
        if overtaken is not None and overtaken[0] != stream:
            self._tell(*overtaken)
        self._cuts += any(isinstance(effect, Truncate | Reset) for effect in effects)
        if state.leader == stream:
            self._hear(message)
        reply = self._carry_out(effects)
        if state.committed_lsn > committed_lsn:
            self._wake()
        return reply

    async def receive(self, stream: int, message: ToAcceptor) -> ToProposer | None:
        """The reply to a message: `take`, and wait for it."""
        return await (await self.take(stream, message))

    async def take_relayed(self, message: Append) -> bool:
        """Step an append that another member has passed on; whether it was taken.

        What was not is dropped: its writer sends it again. Raises what ended the member.
        """
        self._check_not_ended()
        has_room = await self._make_room(message.records)
        self._check_not_ended()
        writer = self._writers.get(self.state.leader or 0)
        stepped = acceptor.step_relayed(self.state, message, has_room=has_room)
        if stepped is None or writer is None:
            return False
        committed_lsn = self.state.committed_lsn
        self.state, effects = stepped
        reply = self._carry_out(effects)
        if any(isinstance(effect, Reply) for effect in effects):
            writer.answer(reply, sum(len(record.payload) for record in message.records))
        if self.state.committed_lsn > committed_lsn:
            self._wake()
        return True

    def tidings(self, stream: int, told_wal_id: int | None) -> ToProposer | None:
        """What the writer on `stream` is to hear unasked. REQUIRES: it has got `Joined`."""
        return acceptor.tidings(self.state, stream, told_wal_id)

    def disconnected(self, stream: int) -> None:
        """The stream has ended: nothing that comes on it counts any more."""
        self._writers.pop(stream, None)
        self.state = acceptor.disconnected(self.state, stream)

    # What is in the log.

    async def records(self, first_lsn: int, last_lsn: int, *, bytes_max: int) -> Sequence[Record]:
        """Records from `first_lsn` on, up to `last_lsn`, no more than fit into `bytes_max`.

        At least one, unless the log ends before `first_lsn`; fewer than fit where some are in
        memory, and those before on the disk. Raises `RecordTrimmed` when the first
        is only in the archive any more, `LogDamaged`, `CorruptObject`, and what ended the member.
        """
        while True:
            self.check_readable(first_lsn)
            cuts = self._cuts
            last_lsn = min(last_lsn, self.state.log.last.lsn)
            if first_lsn > last_lsn:
                return []
            if first_lsn >= self._recent.first_lsn:
                return self._recent.read(first_lsn, last_lsn, bytes_max)
            on_disk = min(last_lsn, self._recent.first_lsn - 1)
            try:
                found = await self._runtime.workers.run(
                    self.log.read, first_lsn, on_disk, bytes_max
                )
            except (CorruptObject, LogDamaged) as error:
                if cuts == self._cuts:
                    self._found_damaged(error)
                continue
            if cuts == self._cuts:  # else the log may have been cut meanwhile
                return found

    def first_of_object(self, wal_id: int) -> int:
        """The lsn of the first record of an object or of a later one; the next lsn if none does.

        Of records that are being written it may be one before. Raises `RecordTrimmed` when the
        object, or a part of it, is only in the archive any more, and `LogDamaged`.
        """
        base = self.state.log.base
        self.check_readable(base.lsn + 1)
        if wal_id < base.next_wal_id:
            raise RecordTrimmed(f"WAL object {wal_id} is in the archive alone, as all up to {base}")
        # What is not committed may be cut, and on the disk it may be there still.
        first_lsn = min(self.log.first_lsn_of(wal_id), self.state.committed_lsn + 1)
        return max(base.lsn + 1, first_lsn)

    async def wait_committed(self, beyond_lsn: int) -> int:
        """Wait until records behind `beyond_lsn` are committed; the lsn of the last one.

        Raises what ended the member.
        """
        while self.state.committed_lsn <= beyond_lsn:
            self._check_not_ended()
            await self._changed.wait()
        return self.state.committed_lsn

    async def wait_called(self, beyond_lsn: int, archiver_id: bytes) -> None:
        """Wait until more is committed, another than `archiver_id` appointed, or room wanted.

        Raises what ended the member.
        """
        while self.state.committed_lsn <= beyond_lsn and self.archiver_id == archiver_id:
            self._check_not_ended()
            if self.is_room_wanted:
                return
            await self._changed.wait()

    # Archiving.

    def note_looking(self) -> None:
        """Somebody looks into the archive: what is there may be trimmed then."""
        self.is_room_wanted = False

    async def note_archived(self, wal_id: int, base: LogEnd) -> None:
        """All objects up to `wal_id` were seen in the archive; trim the log up to `base`.

        REQUIRES: `base` is a committed record that ends an object up to `wal_id`, or the base of
        the log: then nothing is trimmed. A log in which it is not any more is left alone.
        """
        shape = self.state.log
        if base.lsn not in shape or shape.epoch_at(base.lsn) != base.epoch:
            return
        self.state = acceptor.archived(self.state, wal_id, base)
        for writer in self._writers.values():
            writer.wake()
        if base.lsn > shape.base.lsn:
            self._recent.trim(base.lsn)
            await self._syncer.trim(self.log, base)

    @property
    def unarchived_bytes(self) -> int:
        """In the log and not trimmed."""
        return self.log.size_bytes

    @property
    def full_problem(self) -> str:
        """Why nothing is appended; empty: there is room."""
        if self.unarchived_bytes >= self._settings.unarchived_bytes_max:
            bound = self._settings.unarchived_bytes_max
            return f"{self.unarchived_bytes} bytes are not in the archive, and {bound} are allowed"
        return "the disk is full" if self._is_disk_full else ""

    # The end.

    def end(self, error: ShaleError) -> None:
        """Answer with `error` from now on; what was taken comes to its end."""
        self._ended = error
        self._wake()

    async def settle(self) -> None:
        """Wait until all that was taken is durable."""
        await self._submit([Flush()])

    def _hear(self, message: ToAcceptor) -> None:
        """A message of the leader has come."""
        self.writer_heard_ms = self._runtime.clock.monotonic_ms()
        if isinstance(message, Append) and message.archiver_id != self.archiver_id:
            self.archiver_id = message.archiver_id
            self._wake()

    async def _make_room(self, records: Sequence[Record]) -> bool:
        while True:
            new = [record for record in records if record.lsn > self.state.log.last.lsn]
            if not new:
                return True
            size_bytes = sum(len(record.payload) + HEADER_BYTES for record in new)
            if self.unarchived_bytes + size_bytes > self._settings.unarchived_bytes_max:
                self._want_room()
                return False
            if self.log.has_room(new):
                self._is_disk_full = False
                return True
            # By the time it is there, what came another way may have taken it.
            self._is_disk_full = not await self._syncer.make_room(self.log, new)
            if self._is_disk_full:
                return False

    def _want_room(self) -> None:
        """Much of what fills the log may be archived, and nobody has looked since."""
        if not self.is_room_wanted:
            self.is_room_wanted = True
            self._wake()

    def _carry_out(self, effects: Sequence[Effect]) -> Future[ToProposer | None]:
        """Do what a step says; the future is done when its reply may be sent."""
        reply: Future[ToProposer | None] = asyncio.get_running_loop().create_future()
        message: ToProposer | None = None
        for effect in effects:
            match effect:
                case Reply():
                    message = effect.message
                case Write():
                    self._recent.append(effect.records)
                case Truncate():
                    self._recent.truncate(effect.last.lsn)
                case Reset():
                    self._recent.reset(effect.base.lsn)
        if any(isinstance(effect, _WAITED_FOR) for effect in effects):
            self._submit(effects).add_done_callback(self._when_durable(reply, message))
        else:
            self._hints += [effect for effect in effects if isinstance(effect, CommittedUpTo)][-1:]
            reply.set_result(message)
        return reply

    def _submit(self, effects: Sequence[Effect]) -> Future[int]:
        """Queue what is to be done on the disk, after what was queued before."""
        hints, self._hints = self._hints[-1:], []
        on_disk = [effect for effect in effects if not isinstance(effect, Reply)]
        return self._syncer.submit(self.log, [*hints, *on_disk])

    def _when_durable(
        self, reply: Future[ToProposer | None], message: ToProposer | None
    ) -> Callable[[Future[int]], None]:
        cuts = self._cuts

        def tell(durable: Future[int]) -> None:
            if durable.cancelled():
                reply.cancel()
                return
            error = durable.exception()
            if error is None and cuts == self._cuts:
                self._note_flushed(durable.result())
            if reply.done():  # whoever asked has gone
                return
            if error is None:
                reply.set_result(message)
            else:
                reply.set_exception(error)
                reply.exception()  # it was told, even if nobody waits for it any more

        return tell

    def _tell(self, stream: int, refusal: Refusal) -> None:
        """Tell a writer, who did not ask, that it is not followed any more."""
        writer = self._writers.get(stream)
        if writer is not None:
            told: Future[ToProposer | None] = asyncio.get_running_loop().create_future()
            told.set_result(refusal)
            writer.answer(told, 0)

    def _found_damaged(self, error: ShaleError) -> None:
        """The disk has not kept what was written to it."""
        self._check_not_ended()  # or its files are gone for a good reason
        if self.state.health is LogHealth.DAMAGED:
            return
        database_id = self.identity.database_id.hex()
        log.error("records were lost", database_id=database_id, problem=str(error))
        self.state, effects = acceptor.damaged(self.state)
        for effect in effects:
            if isinstance(effect, Reply) and isinstance(effect.message, Refusal):
                self._tell(effect.stream, effect.message)
        _ = self._submit(effects)  # nobody waits for it

    def _note_flushed(self, lsn: int) -> None:
        self._recent.flushed(lsn)
        state, effects = acceptor.flushed(self.state, lsn)
        if effects:
            database_id = self.identity.database_id.hex()
            log.info("a log that had lost records is whole again", database_id=database_id, lsn=lsn)
            self.state = state
            _ = self._submit(effects)  # nobody waits for it

    def check_readable(self, lsn: int) -> None:
        """Raise why this record can't be read here, now or ever: as `records` does."""
        self._check_not_ended()
        if self.state.health is LogHealth.DAMAGED:
            raise LogDamaged("records were lost here: this member waits until it is filled again")
        base = self.state.log.base
        if lsn <= base.lsn:
            problem = f"record {lsn} is in the archive alone: the log begins behind {base.lsn}"
            raise RecordTrimmed(problem)

    def _check_not_ended(self) -> None:
        if self._ended is not None:
            raise self._ended.with_traceback(None)  # or it would grow with each call

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
