"""Local member: the log of one database on this node, with its promise, driven by the acceptor.

Messages are stepped by the pure acceptor strictly in the order in which they are taken. The effects
of the steps go to the disk in that order, and a reply is sent when all effects before it are
durable. Taking a message does not wait for the sync of the one before: appends are pipelined, and
one sync serves many.

Streams are numbered here, in the order in which they are opened, on which rule CE10 depends.

The end of the log is kept in memory as well, so that tails and the refilling of members rarely read
the disk (`RecentRecords`).
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from shalekv.errors import CorruptObject, LogDamaged, RecordTrimmed, ShaleError, raise_if
from shalekv.format.quorum.member_files import MemberIdentity
from shalekv.format.wal_record import HEADER_BYTES
from shalekv.protocol.quorum import acceptor
from shalekv.protocol.quorum.acceptor import (
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
from shalekv.server.safekeeper.log_objects import ArchiverStatus
from shalekv.settings import SafekeeperSettings
from shalekv.store.safekeeper_log.log import MemberLog
from shalekv.store.safekeeper_log.syncer import Syncer

RECORD_BYTES = 200  # memory of a record beside its payload
# Effects that a reply waits for. A commit point is none: on the disk it is a hint, which is written
# with the next effects.
_AWAITED_EFFECTS = (Save, Truncate, Reset, Write, Flush)

log = structlog.get_logger()


class RecentRecords:
    """The last records of one log in memory, without gaps up to its end.

    It always has the records that are not on the disk yet, and as many others as fit, the newest.
    """

    def __init__(self, last_lsn: int, bytes_max: int) -> None:
        """Begin without records, for a log that ends with `last_lsn`."""
        self._records: dict[int, Record] = {}  # by lsn
        self._last_lsn = last_lsn
        self._flushed_lsn = last_lsn
        self._bytes_max = bytes_max
        self.held_bytes = 0
        # Count of truncations and resets: flushes and reads that began before the last are void.
        self.cuts = 0

    @property
    def first_lsn(self) -> int:
        """LSN of the first record in memory; that behind the end of the log if there is none."""
        return self._last_lsn - len(self._records) + 1

    def append(self, records: Iterable[Record]) -> None:
        """Add records that were appended to the log. REQUIRES: they follow its end."""
        for record in records:
            self._records[record.lsn] = record
            self._last_lsn = record.lsn
            self.held_bytes += _size(record)

    def flushed(self, lsn: int) -> None:
        """Note that records up to `lsn` are on the disk, and drop those that do not fit."""
        self._flushed_lsn = max(self._flushed_lsn, lsn)
        while self.held_bytes > self._bytes_max and self.first_lsn <= self._flushed_lsn:
            self._drop_first()

    def truncate(self, last_lsn: int) -> None:
        """Note that the log ends with `last_lsn` now."""
        self.cuts += 1
        for lsn in range(max(self.first_lsn, last_lsn + 1), self._last_lsn + 1):
            self.held_bytes -= _size(self._records.pop(lsn))
        self._last_lsn = last_lsn
        self._flushed_lsn = min(self._flushed_lsn, last_lsn)

    def reset(self, base_lsn: int) -> None:
        """Note that the log is empty now, and goes on behind `base_lsn`."""
        self.cuts += 1
        self._records.clear()
        self.held_bytes = 0
        self._last_lsn = self._flushed_lsn = base_lsn

    def trim(self, base_lsn: int) -> None:
        """Drop records up to `base_lsn`, which are not in the log any more."""
        while self._records and self.first_lsn <= base_lsn:
            self._drop_first()

    def read(self, first_lsn: int, last_lsn: int, bytes_max: int) -> list[Record]:
        """Return records from `first_lsn` on, at least one. REQUIRES: both ends are in memory."""
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


class WriterStream(Protocol):
    """Stream to a writer, for messages that do not answer a message of the same stream."""

    def wake(self) -> None:
        """Check `LocalMember.notification`, which may have something to send."""

    def answer(self, reply: Awaitable[ToProposer | None], size_bytes: int) -> None:
        """Send the reply to a message of the writer that came by a relay."""


@dataclass(slots=True)
class _IdleArchiver:
    """Status of an archiver that has not begun."""

    is_archiver: bool = False
    problem: str = ""


class WriterStreams:
    """The streams of one member, by number, and those of them that reach a writer."""

    def __init__(self) -> None:
        """Begin without streams."""
        self._last = 0
        self._writers: dict[int, WriterStream] = {}

    def open(self, writer: WriterStream | None) -> int:
        """Number a new stream."""
        self._last += 1
        if writer is not None:
            self._writers[self._last] = writer
        return self._last

    def close(self, stream: int) -> None:
        """Forget a stream that has ended."""
        self._writers.pop(stream, None)

    def writer(self, stream: int | None) -> WriterStream | None:
        """Return the writer that this stream reaches, if it is open."""
        return None if stream is None else self._writers.get(stream)

    def notify(self, stream: int, refusal: Refusal) -> None:
        """Notify a writer that this member does not follow it any more."""
        writer = self._writers.get(stream)
        if writer is not None:
            reply: Future[ToProposer | None] = asyncio.get_running_loop().create_future()
            reply.set_result(refusal)
            writer.answer(reply, 0)

    def wake(self) -> None:
        """Have all of them check `LocalMember.notification`."""
        for writer in self._writers.values():
            writer.wake()


class LogDisk:
    """The disk of one log: what is written to it, and the space for more."""

    def __init__(self, member_log: MemberLog, syncer: Syncer, *, bytes_max: int) -> None:
        """`bytes_max` limits the log: the bytes that are not known to be in the archive."""
        self.log = member_log
        # Records were refused, because the log was too large, since this was cleared.
        self.is_space_wanted = False
        self._syncer = syncer
        self._bytes_max = bytes_max
        self._hints: list[CommittedUpTo] = []  # not on the disk yet; only the last one counts
        self._is_full = False

    @property
    def full_problem(self) -> str:
        """Reason for refusing records; empty: there is space."""
        size_bytes, bound = self.log.size_bytes, self._bytes_max
        if size_bytes >= bound:
            return f"{size_bytes} bytes are not in the archive, and {bound} are allowed"
        return "the disk is full" if self._is_full else ""

    def exceeds(self, records: Sequence[Record]) -> bool:
        """Return whether the log would be too large with these records."""
        size_bytes = sum(len(record.payload) + HEADER_BYTES for record in records)
        return self.log.size_bytes + size_bytes > self._bytes_max

    def has_space(self, records: Sequence[Record]) -> bool:
        """Return whether space for these records is allocated."""
        if not self.log.has_space(records):
            return False
        self._is_full = False
        return True

    async def make_space(self, records: Sequence[Record]) -> bool:
        """Allocate space for records; False: the disk is full."""
        self._is_full = not await self._syncer.make_space(self.log, records)
        return not self._is_full

    def delay(self, effects: Sequence[Effect]) -> None:
        """Keep effects that need not be durable until others are submitted."""
        self._hints += [effect for effect in effects if isinstance(effect, CommittedUpTo)][-1:]

    def submit(self, effects: Sequence[Effect]) -> Future[int]:
        """Queue effects for the disk, behind those that were queued before."""
        hints, self._hints = self._hints[-1:], []
        on_disk = [effect for effect in effects if not isinstance(effect, Reply)]
        return self._syncer.submit(self.log, [*hints, *on_disk])

    async def trim(self, base: LogEnd) -> None:
        """Trim the log, after everything submitted before."""
        await self._syncer.trim(self.log, base)


class LocalMember:
    """The log of one database. All methods must be called in the thread of the event loop."""

    def __init__(
        self, member_log: MemberLog, syncer: Syncer, settings: SafekeeperSettings, runtime: Runtime
    ) -> None:
        """REQUIRES: `member_log` was just opened or created, and nothing else writes to it."""
        self.state: AcceptorState = member_log.recovered
        self.archiver_status: ArchiverStatus = _IdleArchiver()
        self.archiver_id = b""  # the member that the writer has appointed; empty: none
        self._disk = LogDisk(member_log, syncer, bytes_max=settings.unarchived_bytes_max)
        self._runtime = runtime
        self._recent = RecentRecords(self.state.log.last.lsn, settings.recent_bytes_max)
        self._streams = WriterStreams()
        self._ended: ShaleError | None = None
        self._changed = asyncio.Event()  # set, and replaced, whenever more is committed

    @property
    def log(self) -> MemberLog:
        """The files of this member."""
        return self._disk.log

    @property
    def identity(self) -> MemberIdentity:
        """The database and the id of this member."""
        return self.log.identity

    # The protocol.

    def open_stream(self, writer: WriterStream | None = None) -> int:
        """Number a new stream. Raises the error of `end`."""
        self._check_not_ended()
        return self._streams.open(writer)

    async def take(self, stream: int, message: ToAcceptor) -> Awaitable[ToProposer | None]:
        """Step a message, and return an awaitable of its reply.

        The reply is None for an append without records. Call this for one message of a stream after
        the other: they are stepped in that order, and their replies must be sent in it. It waits
        for space on the disk if need be, but not for earlier messages to become durable. Raises the
        error of `end`.
        """
        self._check_not_ended()
        has_space = not isinstance(message, Append) or await self._make_space(message.records)
        self._check_not_ended()
        before, committed_lsn = self.state, self.state.committed_lsn
        state, effects = acceptor.step(before, stream, message, has_space=has_space)
        self.state = state
        overtaken = acceptor.overtaken(before, state)
        if overtaken is not None and overtaken[0] != stream:
            self._streams.notify(*overtaken)
        if state.leader == stream:
            self._note_archiver(message)
        reply = self._carry_out(effects)
        if state.committed_lsn > committed_lsn:
            self._wake()
        return reply

    async def receive(self, stream: int, message: ToAcceptor) -> ToProposer | None:
        """Take a message, and wait for its reply."""
        return await (await self.take(stream, message))

    async def take_relayed(self, message: Append) -> bool:
        """Step an append that another member has relayed; returns False if it was dropped.

        The writer sends a dropped append again. Raises the error of `end`.
        """
        self._check_not_ended()
        has_space = await self._make_space(message.records)
        self._check_not_ended()
        writer = self._streams.writer(self.state.leader)
        stepped = acceptor.step_relayed(self.state, message, has_space=has_space)
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

    def notification(self, stream: int, reported_wal_id: int | None) -> ToProposer | None:
        """Return a message for the writer on `stream` that answers none of its messages.

        `reported_wal_id` is the archived WAL id that the writer knows. REQUIRES: it has received
        `Joined`.
        """
        return acceptor.archive_notification(self.state, stream, reported_wal_id)

    def disconnected(self, stream: int) -> None:
        """Note that a stream has ended: its messages do not count any more."""
        self._streams.close(stream)
        self.state = acceptor.disconnected(self.state, stream)

    # Reading the log.

    async def records(self, first_lsn: int, last_lsn: int, *, bytes_max: int) -> Sequence[Record]:
        """Read records from `first_lsn` to `last_lsn`, at most `bytes_max` but at least one.

        Returns none if the log ends before `first_lsn`, and fewer than fit if the first ones are on
        the disk and the others in memory. Raises `RecordTrimmed` when the first one is only in the
        archive, `LogDamaged`, `CorruptObject`, and the error of `end`.
        """
        while True:
            self.check_readable(first_lsn)
            cuts = self._recent.cuts
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
                if cuts == self._recent.cuts:
                    self._found_damaged(error)
                continue
            if cuts == self._recent.cuts:  # else the log was cut meanwhile: read again
                return found

    def first_of_object(self, wal_id: int) -> int:
        """Return the LSN of the first record of a WAL object, or of a later one.

        That behind the end of the log if there is none. While records are being written it may be
        an earlier one. Raises `RecordTrimmed` when the object, or a part of it, is only in the
        archive, and `LogDamaged`.
        """
        base = self.state.log.base
        self.check_readable(base.lsn + 1)
        if wal_id < base.next_wal_id:
            raise RecordTrimmed(f"WAL object {wal_id} is in the archive alone, as all up to {base}")
        # Uncommitted records may be cut, and may still be on the disk then.
        first_lsn = min(self.log.first_lsn_of(wal_id), self.state.committed_lsn + 1)
        return max(base.lsn + 1, first_lsn)

    async def wait_committed(self, beyond_lsn: int) -> int:
        """Wait until records behind `beyond_lsn` are committed, and return the last such LSN.

        Raises the error of `end`.
        """
        while self.state.committed_lsn <= beyond_lsn:
            self._check_not_ended()
            await self._changed.wait()
        return self.state.committed_lsn

    async def wait_for_work(self, beyond_lsn: int, archiver_id: bytes) -> None:
        """Wait until an archiver may have work.

        That is when records behind `beyond_lsn` are committed, the appointed archiver is not
        `archiver_id`, or `is_space_wanted`. Raises the error of `end`.
        """
        while self.state.committed_lsn <= beyond_lsn and self.archiver_id == archiver_id:
            self._check_not_ended()
            if self.is_space_wanted:
                return
            await self._changed.wait()

    # ArchiverStatus.

    @property
    def is_space_wanted(self) -> bool:
        """Return whether records were refused since `clear_space_wanted`, as the log was too
        large.
        """
        return self._disk.is_space_wanted

    def clear_space_wanted(self) -> None:
        """Clear `is_space_wanted`, because the archive is about to be polled for a trim."""
        self._disk.is_space_wanted = False

    async def note_archived(self, wal_id: int, base: LogEnd) -> None:
        """Note that all objects up to `wal_id` were seen in the archive; trim the log up to `base`.

        REQUIRES: `base` is the end of a committed object up to `wal_id`, or the base of the log:
        then nothing is trimmed. Nothing is done if the log does not contain `base` any more.
        """
        shape = self.state.log
        if not shape.holds(base):
            return
        self.state = acceptor.archived(self.state, wal_id, base)
        self._streams.wake()
        if base.lsn > shape.base.lsn:
            self._recent.trim(base.lsn)
            await self._disk.trim(base)

    @property
    def unarchived_bytes(self) -> int:
        """Size of the log, which is all that was not trimmed."""
        return self.log.size_bytes

    @property
    def full_problem(self) -> str:
        """Reason for refusing records; empty: there is space."""
        return self._disk.full_problem

    # The end.

    def end(self, error: ShaleError) -> None:
        """Refuse everything with `error` from now on; messages that were taken are completed."""
        self._ended = error
        self._wake()

    async def settle(self) -> None:
        """Wait until the effects of all messages taken are durable."""
        await self._disk.submit([Flush()])

    def _note_archiver(self, message: ToAcceptor) -> None:
        """Note the archiver that a message of the leader appoints."""
        if isinstance(message, Append) and message.archiver_id != self.archiver_id:
            self.archiver_id = message.archiver_id
            self._wake()

    async def _make_space(self, records: Sequence[Record]) -> bool:
        while True:
            new = [record for record in records if record.lsn > self.state.log.last.lsn]
            if not new:
                return True
            if self._disk.exceeds(new):
                self._want_space()
                return False
            if self._disk.has_space(new):
                return True
            # Checked again afterwards: a relayed message may have taken the space meanwhile.
            if not await self._disk.make_space(new):
                return False

    def _want_space(self) -> None:
        """Have the archiver poll: objects that fill the log may have been archived since."""
        if not self.is_space_wanted:
            self._disk.is_space_wanted = True
            self._wake()

    def _carry_out(self, effects: Sequence[Effect]) -> Future[ToProposer | None]:
        """Carry out the effects of a step; the future is completed when its reply may be sent."""
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
        if any(isinstance(effect, _AWAITED_EFFECTS) for effect in effects):
            self._disk.submit(effects).add_done_callback(self._when_durable(reply, message))
        else:
            self._disk.delay(effects)
            reply.set_result(message)
        return reply

    def _when_durable(
        self, reply: Future[ToProposer | None], message: ToProposer | None
    ) -> Callable[[Future[int]], None]:
        cuts = self._recent.cuts

        def finish(durable: Future[int]) -> None:
            if durable.cancelled():
                reply.cancel()
                return
            error = durable.exception()
            if error is None and cuts == self._recent.cuts:
                self._note_flushed(durable.result())
            if reply.done():  # the caller has gone
                return
            if error is None:
                reply.set_result(message)
            else:
                reply.set_exception(error)
                reply.exception()  # marks it as retrieved, in case the caller goes before

        return finish

    def _found_damaged(self, error: ShaleError) -> None:
        """Note that the disk has lost records that were written to it."""
        self._check_not_ended()  # the files of a member that has ended may be gone
        if self.state.health is LogHealth.DAMAGED:
            return
        database_id = self.identity.database_id.hex()
        log.error("records were lost", database_id=database_id, problem=str(error))
        self.state, effects = acceptor.damaged(self.state)
        for effect in effects:
            if isinstance(effect, Reply) and isinstance(effect.message, Refusal):
                self._streams.notify(effect.stream, effect.message)
        _ = self._disk.submit(effects)  # nobody waits for it

    def _note_flushed(self, lsn: int) -> None:
        self._recent.flushed(lsn)
        state, effects = acceptor.flushed(self.state, lsn)
        if effects:
            database_id = self.identity.database_id.hex()
            log.info("a log that had lost records is whole again", database_id=database_id, lsn=lsn)
            self.state = state
            _ = self._disk.submit(effects)  # nothing waits for these

    def check_readable(self, lsn: int) -> None:
        """Raise as `records` does if the record with this LSN cannot be read, now or ever."""
        self._check_not_ended()
        if self.state.health is LogHealth.DAMAGED:
            raise LogDamaged("records were lost here: this member waits until it is filled again")
        base = self.state.log.base
        if lsn <= base.lsn:
            problem = f"record {lsn} is in the archive alone: the log begins behind {base.lsn}"
            raise RecordTrimmed(problem)

    def _check_not_ended(self) -> None:
        raise_if(self._ended)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
