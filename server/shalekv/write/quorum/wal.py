"""The quorum WAL: groups become records of a quorum log, and records share WAL objects.

Records are ordered as their groups were taken. Groups are encoded concurrently, but a record is
appended only after all before it. Whether a record ends its object is decided when its group is
taken (see `protocol.quorum.proposer`). An object that no record ends in time is ended by an empty
record, which has a place in the same order.

This module also computes the objects of the archive (`object_bytes`). The bytes of an object are a
function of its records alone, so that any safekeeper may archive it, and the second one to do so
finds the bytes that it wanted to write (CE16). No setting, clock or random number is involved.
Therefore these rules may never change:

- One record with a payload: the object is the payload, byte for byte. Records without a payload
  leave no trace.
- Several records: the entries of all their SSTs, section by section, by key and then newest first.
  Every version stays, since watches report each commit.
- Name, database, epoch, nonce, write id and logical time are those of the last SST.
- There is no filter. Blocks have `MERGED_BLOCK_BYTES` before compression. Their codec is that of
  the first compressed block of the records; if there is none, blocks are not compressed.

Compression is done by a library, and another version of it may produce other bytes for the same
block. So objects whose bytes differ are also compared by their contents: see `same_contents`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import NamedTuple

import structlog

from shalekv.clock import NOW_MS, Clock
from shalekv.concurrency import FifoLock, Waiter
from shalekv.errors import BadStructure, CorruptObject, LogFull, ShaleError, Stopping, raise_if
from shalekv.format import names
from shalekv.format.block_frame import Codec, codec_of
from shalekv.format.footer import SstProperties, read_footer
from shalekv.format.sst import Sst, open_sst
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import NEVER_MS, Entry
from shalekv.protocol.fencing import Occupant, WriterId
from shalekv.protocol.membership import is_archived
from shalekv.protocol.quorum.proposer import Grouping, GroupingPolicy, Leader, ObjectPosition
from shalekv.protocol.quorum_records import Record
from shalekv.runtime import Runtime
from shalekv.settings import MIB, QuorumSettings
from shalekv.store.reachability import UNREACHABLE_AFTER_MS
from shalekv.v1 import kv_pb2
from shalekv.wording import Trouble
from shalekv.write.commit import WalContents
from shalekv.write.log_stats import note_encoded
from shalekv.write.quorum.ledger import Ledger
from shalekv.write.quorum.log import RETRY_AFTER_MS, MembershipFollower, QuorumLog, nobody_waits
from shalekv.write.wal import QuorumReport, encode_wal, is_small

log = structlog.get_logger()

MERGED_BLOCK_BYTES = 64 << 10

# The entries of each section, in the order in which `encode_sst` takes them.
SECTIONS: Sequence[Callable[[Sst], Iterator[Entry]]] = (
    Sst.entries,
    Sst.range_tombstones,
    Sst.system_entries,
    Sst.control_entries,
)
_KEY = itemgetter(0)  # of an Entry
_WRITTEN = attrgetter("properties", "footer.contents")
ARCHIVE_OBJECT_BYTES = 8 * MIB  # at most: a request of this size costs as much as a small one
OBJECTS_HELD_MIN = 4  # memory holds at least so many: one is written while others are archived


def object_bytes(name: str, records: Sequence[Record]) -> bytes:
    """Build the object `name` from these records: all of its records, in the order of the log.

    Takes some milliseconds for a megabyte: run it in a worker. Raises `CorruptObject` when a
    payload is no WAL object of this name, when two are of different databases, when sequence
    numbers do not rise from record to record, and when no record has a payload.
    """
    payloads = [record.payload for record in records if record.payload]
    if not payloads:
        raise BadStructure(name, 0, f"none of its {len(records)} records has a payload")
    last = open_sst(name, payloads[-1], database_id=None)
    if len(payloads) == 1:
        return payloads[0]
    database_id = last.properties.database_id
    ssts = [*(open_sst(name, each, database_id=database_id) for each in payloads[:-1]), last]
    _check_order(name, ssts)
    try:
        return encode_sst(
            last.properties,
            *(_merged(map(entries, ssts)) for entries in SECTIONS),
            block_bytes=MERGED_BLOCK_BYTES,
            codec=_codec(ssts),
        )
    except ValueError as error:
        raise BadStructure(name, 0, f"its records don't follow each other: {error}") from error


def last_properties(name: str, records: Iterable[Record]) -> SstProperties:
    """The properties of the object `name`, by its last records. Raises as `object_bytes`."""
    payloads = [record.payload for record in records if record.payload]
    if not payloads:
        raise BadStructure(name, 0, "none of its last records has a payload")
    data = payloads[-1]
    return read_footer(name, data, len(data), database_id=None).properties


def same_contents(name: str, one: bytes, other: bytes) -> bool:
    """Return whether two objects of this name are the same SST, although block encodings may
    differ.

    The write ids must be equal, so two objects made from different records differ. An object that
    cannot be decoded equals no other.
    """
    try:
        ssts = [open_sst(name, each, database_id=None) for each in (one, other)]
        first, second = ((_WRITTEN(sst), *map(list, _all_entries(sst))) for sst in ssts)
    except CorruptObject:
        return False
    return first == second


def _all_entries(sst: Sst) -> Iterable[Iterator[Entry]]:
    return (entries(sst) for entries in SECTIONS)


def _check_order(name: str, ssts: Iterable[Sst]) -> None:
    last_seq = 0
    for contents in (sst.footer.contents for sst in ssts if sst.footer.contents.entry_count):
        if contents.min_seq <= last_seq:
            problem = f"a record begins with sequence number {contents.min_seq}, behind {last_seq}"
            raise BadStructure(name, 0, problem)
        last_seq = contents.max_seq


def _merged(runs: Iterable[Iterator[Entry]]) -> list[Entry]:
    """Merge runs by key, and then newest first; later runs are newer."""
    newest_first = reversed([list(run) for run in runs])
    return sorted(chain.from_iterable(newest_first), key=_KEY)  # stable


def _codec(ssts: Iterable[Sst]) -> Codec:
    """The codec of the first block that is compressed."""
    for sst in ssts:
        for handle in sst.index:
            codec = codec_of(sst.data, handle.offset)
            if codec is not Codec.NONE:
                return codec
    return Codec.NONE


@dataclass(frozen=True, slots=True)
class GroupEncoding:
    """The parameters with which groups are encoded as SSTs."""

    database_id: bytes
    block_bytes: int
    codec: Codec
    now_ms: Callable[[], int]  # logical time, which every SST records


class _Ticket(NamedTuple):
    """The place of a record in the order of appends."""

    turn: Waiter  # done when all records before it were appended or given up
    position: ObjectPosition
    size_bytes: int


class ObjectBoundaries:
    """Assigns records to objects of the archive, and says when the open object has to end."""

    def __init__(self, policy: GroupingPolicy, clock: Clock) -> None:
        """REQUIRES: `begin` is called before `take`."""
        self._grouping = Grouping(policy, 0)
        self._clock = clock
        self._opened = asyncio.Event()  # set when an object is open
        self._hurry = asyncio.Event()  # set when the open object is to be ended before its time
        self._wanted_wal_id = -1  # a call waits until this object is in the archive

    def begin(self, next_wal_id: int) -> None:
        """Begin with this object."""
        self._grouping = replace(self._grouping, next_wal_id=next_wal_id)

    def take(self, size_bytes: int, *, is_load: bool) -> ObjectPosition:
        """Return the position of the next record; a load is alone in its object."""
        if is_load:
            position, self._grouping = self._grouping.take_alone()
        else:
            now_ms = self._clock.monotonic_ms()
            position, self._grouping = self._grouping.take(size_bytes, now_ms)
        if self._grouping.begun is not None:
            self._opened.set()
        return position

    def correct(self, wal_id: int, by_bytes: int) -> None:
        """Correct the size of the open object, once the encoded size of one of its groups is known.

        The size accounted when the group was taken is larger than that of its SST.
        """
        opened = self._grouping.begun
        if opened is not None and opened.wal_id == wal_id:
            corrected = replace(opened, size_bytes=max(0, opened.size_bytes + by_bytes))
            self._grouping = replace(self._grouping, begun=corrected)

    def end_early(self, wal_id: int) -> None:
        """Let the open object end before its time, if it is `wal_id` or one before that.

        A call waits until that object is archived. It does not end the open object itself, since it
        may be cancelled half way.
        """
        self._wanted_wal_id = max(self._wanted_wal_id, wal_id)
        self._hurry.set()

    def seal(self) -> bool:
        """End the open object. Returns whether there was one: then an empty record ends it."""
        sealed = self._grouping.seal()
        if sealed is None:
            return False
        _, self._grouping = sealed
        return True

    async def wait_due(self) -> None:
        """Wait until an object is open that has to end: its time is over, or a call wants it."""
        while True:
            due_ms = self._grouping.seal_due_ms
            if due_ms is None:
                self._opened.clear()
                await self._opened.wait()
                continue
            left_ms = due_ms - self._clock.monotonic_ms()
            if left_ms < NOW_MS or self._is_wanted:
                return
            self._hurry.clear()
            try:
                # At least 1 ms, else a rest left by rounding would be waited for in a loop.
                async with asyncio.timeout(max(1.0, left_ms) / 1_000):
                    await self._hurry.wait()
            except TimeoutError:
                pass

    @property
    def _is_wanted(self) -> bool:
        """Return whether a call waits for the object that is open to be archived."""
        opened = self._grouping.begun
        return opened is not None and opened.wal_id <= self._wanted_wal_id


class UnarchivedLimit:
    """Makes an append wait while too many bytes in memory are not archived.

    Appends are ordered, so at most one waits here; groups behind it fill the queue.
    """

    def __init__(self, ledger: Ledger, settings: QuorumSettings, clock: Clock) -> None:
        """The limit is `unarchived_log_bytes_max`."""
        self._ledger = ledger
        self._bytes_max = settings.unarchived_log_bytes_max
        self._timeout_ms = settings.quorum_timeout_ms
        self._clock = clock
        self._since_ms: float | None = None  # since when an append waits
        self.stalled = asyncio.Event()  # set after a timeout; cleared by the task that waits for it

    async def wait(self) -> None:
        """Wait until another record may be appended.

        After `quorum_timeout_ms` this sets the event `stalled`, and goes on waiting.
        """
        if not self._is_reached:
            return
        self._since_ms = self._clock.monotonic_ms()
        try:
            async with asyncio.timeout(self._timeout_ms / 1_000):
                await self._wait_archived()
        except TimeoutError:
            self.stalled.set()
            await self._wait_archived()
        finally:
            self._since_ms = None

    @property
    def refusal(self) -> LogFull | None:
        """The error to refuse writes with, if an append has waited for too long."""
        since_ms = self._since_ms
        if since_ms is None or self._clock.monotonic_ms() - since_ms < self._timeout_ms:
            return None
        return LogFull(
            f"{self._ledger.held.unarchived_bytes} bytes are not in the archive yet, and "
            f"unarchived_log_bytes_max is {self._bytes_max}: the safekeepers archive too slowly, "
            "or cannot reach the object store. Try again later",
            retry_after_ms=RETRY_AFTER_MS,
        )

    @property
    def trouble(self) -> Trouble | None:
        """`refusal`, as a reason why nothing is committed, with the time since when."""
        refusal, since_ms = self.refusal, self._since_ms
        if refusal is None or since_ms is None:
            return None
        return Trouble("log full", str(refusal), since_ms)

    @property
    def _is_reached(self) -> bool:
        return self._ledger.held.unarchived_bytes >= self._bytes_max

    async def _wait_archived(self) -> None:
        ledger = self._ledger
        while self._is_reached:
            ledger.archive_advanced.clear()
            await ledger.archive_advanced.wait()
            ledger.check_leading()


class QuorumWal:
    """The log of one writer, in safekeepers: implements `WriteAheadLog` and `Safekeepers`."""

    is_ordered = True
    storage_name = "a majority of the safekeepers"
    durability = kv_pb2.DURABILITY_QUORUM

    def __init__(
        self,
        quorum_log: QuorumLog,
        membership: MembershipFollower,
        encoding: GroupEncoding,
        settings: QuorumSettings,
        runtime: Runtime,
    ) -> None:
        """REQUIRES: `settings.archive_interval_ms` is set, and `begin` is called before `take`."""
        self._log = quorum_log
        self._ledger = quorum_log.ledger
        self._membership = membership
        self._encoding = encoding
        self._runtime = runtime
        object_bytes_max = settings.unarchived_log_bytes_max // OBJECTS_HELD_MIN
        policy = GroupingPolicy(
            settings.archive_interval_ms or 0, min(ARCHIVE_OBJECT_BYTES, object_bytes_max)
        )
        self._objects = ObjectBoundaries(policy, runtime.clock)
        self._limit = UnarchivedLimit(self._ledger, settings, runtime.clock)
        self._appends = FifoLock()  # of records, in the order in which their groups were taken
        self._tickets: dict[int, _Ticket] = {}  # of groups not created yet, by position
        self._taken_count = 0

    @property
    def own(self) -> WriterId:
        """The writer that was elected."""
        return self._ledger.own

    @property
    def leader(self) -> Leader:
        """The state of the log, and which member has which part of it."""
        return self._ledger.leader

    @property
    def refusal(self) -> ShaleError | None:
        """`QuorumUnavailable` or `LogFull` while nothing can be committed, or why the log ended."""
        return self._log.refusal or self._limit.refusal

    def begin(self, next_wal_id: int) -> None:
        self._objects.begin(next_wal_id)

    def take(self, size_bytes: int, *, is_load: bool) -> int:
        """Assign a WAL object to the next group: that of the group before, or the next one."""
        position = self._objects.take(size_bytes, is_load=is_load)
        self._tickets[self._taken_count] = _Ticket(self._appends.join(), position, size_bytes)
        self._taken_count += 1
        return position.wal_id

    async def create(
        self, wal_id: int, contents: WalContents, *, position: int, time_max_ms: int = NEVER_MS
    ) -> Occupant | None:
        """Append a record of `contents`, and return None when it is committed.

        Raises `Fenced`, or another error that ended the log; it is unknown then whether the record
        is committed.
        """
        ticket = self._tickets.pop(position)
        try:
            data = await self._encode(wal_id, contents, time_max_ms)
            note_encoded()
            self._objects.correct(wal_id, len(data) - ticket.size_bytes)
            await ticket.turn
            await self._limit.wait()
            record = self._ledger.append(ticket.position, data)
        finally:
            self._appends.leave(ticket.turn)
        await self._ledger.wait_committed(record.lsn)
        return None

    async def append_fence(self, wal_id: int) -> Record:
        """Append the first record of this epoch, alone in its object. It is not committed yet."""
        data = await self._encode(wal_id, WalContents())
        return self._ledger.append(ObjectPosition(wal_id, ends_object=True), data)

    def trouble(
        self, after_ms: float = UNREACHABLE_AFTER_MS, *, reads: Trouble | None = None
    ) -> Trouble | None:
        """The reason why nothing is committed, once that has lasted `quorum_timeout_ms`.

        `after_ms` is ignored, and so are `reads`: no record is written to the object store.
        """
        del after_ms, reads
        return self._log.trouble() or self._limit.trouble

    async def archive(self, wal_id: int | None = None) -> None:
        """Wait until an object, and all before it, are in the archive.

        None: the object of the last committed record. An open object is ended. Raises the error
        that ends the log, and `QuorumUnavailable`.
        """
        raise_if(self._log.refusal)
        wanted = self._ledger.committed_wal_id if wal_id is None else wal_id
        if wanted is None:
            return
        self._objects.end_early(wanted)
        await self._ledger.wait_archived(wanted)

    async def unarchived(self, wal_id: int) -> Sst | None:
        """Build an SST of the committed records of an object that is not known to be archived."""
        ledger = self._ledger
        if is_archived(wal_id, ledger.archived_wal_id):
            return None
        records = ledger.held.of_object(wal_id, ledger.committed_lsn)
        if not any(record.payload for record in records):
            return None
        name = names.wal_name(wal_id)
        data = await self._runtime.workers.run(object_bytes, name, records)
        return open_sst(name, data, database_id=self._encoding.database_id)

    def report(self) -> QuorumReport:
        return self._log.report()

    async def run(self, on_unavailable: Callable[[], None] = nobody_waits) -> None:
        """Follow members and the manifest, and end objects, until cancelled.

        Raises the error that ends the log.
        """
        following = partial(self._log.run, on_unavailable)
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(self._failing(following), name="quorum log"),
                tasks.create_task(self._seal_when_due(), name="end objects"),
                tasks.create_task(self._failing(self._membership.run), name="follow the members"),
                tasks.create_task(self._report_stalls(on_unavailable), name="report a full log"),
            ]
            try:
                await self._ledger.ended.wait()
            finally:  # nothing is archived any more, so calls that wait for it must fail
                self._ledger.fail(Stopping("this writer has stopped"))
                for task in others:
                    task.cancel()
        self._ledger.check_leading()

    async def _failing(self, run: Callable[[], Awaitable[None]]) -> None:
        """Run one part of the log; its failure ends the whole log."""
        try:
            await run()
        except ShaleError as error:
            self._ledger.fail(error)

    async def _report_stalls(self, on_unavailable: Callable[[], None]) -> None:
        while True:
            await self._limit.stalled.wait()
            self._limit.stalled.clear()
            on_unavailable()

    async def _encode(
        self, wal_id: int, contents: WalContents, time_max_ms: int = NEVER_MS
    ) -> bytes:
        encoding = self._encoding
        properties = SstProperties(
            name=names.wal_name(wal_id),
            database_id=encoding.database_id,
            writer_epoch=self.own.epoch,
            writer_nonce=self.own.nonce,
            write_id=self._runtime.random.randbytes(16),
            logical_time_ms=min(encoding.now_ms(), time_max_ms),
        )
        if is_small(contents, encoding.codec):
            return encode_wal(properties, contents, encoding.block_bytes, encoding.codec)
        run = self._runtime.workers.run
        return await run(encode_wal, properties, contents, encoding.block_bytes, encoding.codec)

    async def _seal_when_due(self) -> None:
        """End objects that no record has ended in time."""
        while self._ledger.failure is None:
            await self._objects.wait_due()
            await self._failing(self._seal)

    async def _seal(self) -> None:
        """End the open object, if there is one, and return when that is committed."""
        if not self._objects.seal():
            return
        with self._appends.take() as turn:
            await turn
            # If the groups before it were given up, its object was never begun.
            last = self._ledger.leader.log.last
            if last.wal_id is None or last.ends_object:
                return
            record = self._ledger.append(ObjectPosition(last.wal_id, ends_object=True), b"")
        await self._ledger.wait_committed(record.lsn)
