"""The log of a quorum as `GroupCommit` uses it: groups become records, and records share objects.

The order of records is that in which groups were taken: encoding may take place beside, but a
record is appended when all before it are. What ends an object is decided when a group is taken (see
`protocol.proposer`); an object that nothing ends in time gets an empty record for that, which
has a place in the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import NamedTuple

import structlog

from shalekv.clock import NOW_MS
from shalekv.concurrency import Waiter, new_waiter, tell
from shalekv.errors import BadStructure, CorruptObject, LogFull, ShaleError, Stopping
from shalekv.format import names
from shalekv.format.block_frame import Codec, codec_of
from shalekv.format.footer import SstProperties, read_footer
from shalekv.format.sst import Sst, open_sst
from shalekv.format.sst_writer import encode_sst
from shalekv.protocol.entry import Entry
from shalekv.protocol.membership import is_archived
from shalekv.protocol.opening import Occupant, WriterId
from shalekv.protocol.proposer import Grouping, GroupingPolicy, Leader, ObjectPosition
from shalekv.protocol.quorum_records import Record
from shalekv.runtime import Runtime
from shalekv.settings import QuorumSettings
from shalekv.store.reachability import UNREACHABLE_AFTER_MS
from shalekv.wording import Trouble
from shalekv.write.commit import WalContents
from shalekv.write.quorum.log import RETRY_AFTER_MS, QuorumLog, Reconfiguring
from shalekv.write.wal import QuorumReport, encode_wal, is_small

# --- objects
# The objects of the archive: what the records of one are as the bytes of one SST.
#
# The bytes are a function of the records alone, so that any safekeeper may archive, and whoever
# comes second finds what it wanted to write (CE16). No setting is asked, no clock, nothing is
# drawn. So these may never change:
#
# - one record with a payload: its payload, byte by byte. Records without one leave no trace.
# - several: the entries of all their SSTs, section by section, by key and then newest first; every
#   version stays, since watches are told of each commit.
# - name, database, epoch, nonce, write id and logical time are those of the last SST.
# - no filter. Blocks of `MERGED_BLOCK_BYTES` before compression, with the codec of the first block
#   of the records that is compressed; without one, nothing is.
#
# What compresses is a library, of which another version may find other bytes for the same block.
# So bytes that differ are compared once more by what they say: see `says_the_same`.


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


def object_bytes(name: str, records: Sequence[Record]) -> bytes:
    """The object `name`, which these records make: all of it, in the order of the log.

    Takes some milliseconds for a megabyte: run it in a worker. Raises `CorruptObject` when a
    payload is no WAL object of this name, when two are of different databases, when sequence
    numbers don't rise from record to record, and when there is nothing in them.
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
    """What the object `name` says of itself, by the last records of it. As `object_bytes`."""
    payloads = [record.payload for record in records if record.payload]
    if not payloads:
        raise BadStructure(name, 0, "none of its last records has a payload")
    data = payloads[-1]
    return read_footer(name, data, len(data), database_id=None).properties


def says_the_same(name: str, one: bytes, other: bytes) -> bool:
    """Whether two objects of this name are the same SST, in blocks that may be stored otherwise.

    The write id is a part of that: two that were not made from the same records differ. What can't
    be decoded is the same as nothing else.
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
    """By key, and then newest first; later runs are newer."""
    newest_first = reversed([list(run) for run in runs])
    return sorted(chain.from_iterable(newest_first), key=_KEY)  # stable


def _codec(ssts: Iterable[Sst]) -> Codec:
    """That of the first block that is compressed."""
    for sst in ssts:
        for handle in sst.index:
            codec = codec_of(sst.data, handle.offset)
            if codec is not Codec.NONE:
                return codec
    return Codec.NONE


# --- wal


log = structlog.get_logger()

OBJECTS_HELD_MIN = 4  # so many have room in memory: one is written while others are archived


@dataclass(frozen=True, slots=True)
class GroupEncoding:
    """How groups become SSTs."""

    database_id: bytes
    block_bytes: int
    codec: Codec
    now_ms: Callable[[], int]  # logical time, which every SST records


class _AppendTurn(NamedTuple):
    """The place of a record that is to be appended."""

    number: int
    place: ObjectPosition
    size_bytes: int


class QuorumWal:
    """The log of one writer, in safekeepers."""

    def __init__(
        self,
        quorum_log: QuorumLog,
        reconfiguring: Reconfiguring,
        encoding: GroupEncoding,
        settings: QuorumSettings,
        runtime: Runtime,
    ) -> None:
        """REQUIRES: `settings.archive_interval_ms` is set, and `begin` is called before `take`."""
        self._log = quorum_log
        self._ledger = quorum_log.ledger
        self._reconfiguring = reconfiguring
        self._encoding = encoding
        self._settings = settings
        self._runtime = runtime
        object_bytes_max = settings.held_log_bytes_max // OBJECTS_HELD_MIN
        self._policy = GroupingPolicy(
            settings.archive_interval_ms or 0, min(settings.archive_object_bytes, object_bytes_max)
        )
        self._grouping = Grouping(self._policy, 0)
        self._opened = asyncio.Event()  # an object is open
        self._wanted_wal_id = -1  # somebody waits until this object is in the archive
        self._hurry = asyncio.Event()  # that is not to wait for the end of its time
        self._taken: dict[int, _AppendTurn] = {}  # by groups that are not created yet, by position
        self._taken_count = 0
        self._turn_count = 0
        self._turn_now = 0
        self._waiting: dict[int, Waiter] = {}  # for their turn
        self._given_up: set[int] = set()  # before their turn came
        self._full_since_ms: float | None = None  # a record waits for room in memory

    @property
    def own(self) -> WriterId:
        """Who was elected."""
        return self._ledger.own

    @property
    def is_quorum(self) -> bool:
        """A majority has what is durable."""
        return True

    @property
    def leader(self) -> Leader:
        """What is known of the log, and who has which part of it."""
        return self._ledger.leader

    @property
    def parallel_max(self) -> int | None:
        """So many groups may be in flight."""
        return self._settings.parallel_appends

    @property
    def on_unavailable(self) -> Callable[[], None]:
        """Called when no majority has answered for `quorum_timeout_ms`."""
        return self._log.on_unavailable

    @on_unavailable.setter
    def on_unavailable(self, tell_waiting: Callable[[], None]) -> None:
        self._log.on_unavailable = tell_waiting

    def begin(self, next_wal_id: int) -> None:
        """The first group begins this object."""
        self._grouping = Grouping(self._policy, next_wal_id)

    def check_available(self) -> None:
        """Raise `QuorumUnavailable` or `LogFull` while nothing can be committed."""
        self._log.check_available()
        full = self._full()
        try:
            if full is not None:
                raise full
        finally:
            del full  # it holds this frame

    def _full(self) -> LogFull | None:
        """The refusal of writes while memory has had no room for a record for too long."""
        since_ms = self._full_since_ms
        if since_ms is None:
            return None
        if self._runtime.clock.monotonic_ms() - since_ms < self._settings.quorum_timeout_ms:
            return None
        return LogFull(
            f"{self._ledger.held.unarchived_bytes} bytes are not in the archive yet, and "
            f"held_log_bytes_max is {self._settings.held_log_bytes_max}: the safekeepers "
            "archive too slowly, or cannot reach the object store. Try again later",
            retry_after_ms=RETRY_AFTER_MS,
        )

    def take(self, size_bytes: int, *, is_load: bool) -> int:
        """The object of the next group: that of the one before, or the next."""
        if is_load:
            place, self._grouping = self._grouping.take_alone()
        else:
            now_ms = self._runtime.clock.monotonic_ms()
            place, self._grouping = self._grouping.take(size_bytes, now_ms)
        self._taken[self._taken_count] = self._next_turn(place, size_bytes)
        self._taken_count += 1
        if self._grouping.begun is not None:
            self._opened.set()
        return place.wal_id

    async def create(self, wal_id: int, contents: WalContents, *, position: int) -> Occupant | None:
        """Append a record of `contents`, and return when it is committed: there is no other end.

        Raises `Fenced` and what else ended the log: nobody knows then whether it is committed.
        """
        turn = self._taken.pop(position)
        try:
            data = await self._encode(wal_id, contents)
            self._correct(turn, len(data))
            await self._await_turn(turn.number)
            await self._await_room()
            record = self._ledger.append(turn.place, data)
        finally:
            self._end_turn(turn.number)
        await self._ledger.wait_committed(record.lsn)
        return None

    async def append_fence(self, wal_id: int) -> Record:
        """Append the first record of this epoch, alone in its object. It is not committed yet."""
        data = await self._encode(wal_id, WalContents())
        return self._ledger.append(ObjectPosition(wal_id, ends_object=True), data)

    async def archive(self, wal_id: int | None = None) -> None:
        """Return when an object is in the archive, and all before it.

        None: the one that holds the last committed record. One that is open is ended. Raises what
        ends the log, and `QuorumUnavailable`.
        """
        self._log.check_available()
        wanted = self._ledger.committed_wal_id if wal_id is None else wal_id
        if wanted is None:
            return
        # Not ended by this call, which may be given up: then nobody would end the object.
        self._wanted_wal_id = max(self._wanted_wal_id, wanted)
        self._hurry.set()
        await self._ledger.wait_archived(wanted)

    async def held(self, wal_id: int) -> Sst | None:
        """What is committed of an object that is not known to be in the archive."""
        ledger = self._ledger
        if is_archived(wal_id, ledger.archived_wal_id):
            return None
        records = ledger.held.of_object(wal_id, ledger.committed_lsn)
        if not any(record.payload for record in records):
            return None
        name = names.wal_name(wal_id)
        data = await self._runtime.workers.run(object_bytes, name, records)
        return open_sst(name, data, database_id=self._encoding.database_id)

    def report(self) -> QuorumReport | None:
        """How far each member is."""
        return self._log.report()

    def trouble(self, after_ms: float = UNREACHABLE_AFTER_MS) -> Trouble | None:
        """The reason why nothing is committed; it counts from `quorum_timeout_ms` on."""
        del after_ms
        trouble, full, since_ms = self._log.trouble(), self._full(), self._full_since_ms
        if trouble is not None or full is None or since_ms is None:
            return trouble
        return Trouble("log full", str(full), since_ms)

    async def run(self) -> None:
        """Follow members and the manifest, and end objects, until cancelled.

        Raises what ends the log.
        """
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(self._failing(self._log.run), name="quorum log"),
                tasks.create_task(self._seal_when_due(), name="end objects"),
                tasks.create_task(
                    self._failing(self._reconfiguring.run), name="follow the members"
                ),
            ]
            try:
                await self._ledger.ended.wait()
            finally:  # nobody archives any more, so who waits for that is told
                self._ledger.fail(Stopping("this writer has stopped"))
                for task in others:
                    task.cancel()
        self._ledger.check_leading()

    async def close(self) -> None:
        """Streams end with `run`; whoever made the links closes them."""

    async def _failing(self, run: Callable[[], Awaitable[None]]) -> None:
        """What ends one part of the log ends all of it."""
        try:
            await run()
        except ShaleError as error:
            self._ledger.fail(error)

    async def _encode(self, wal_id: int, contents: WalContents) -> bytes:
        encoding = self._encoding
        properties = SstProperties(
            name=names.wal_name(wal_id),
            database_id=encoding.database_id,
            writer_epoch=self.own.epoch,
            writer_nonce=self.own.nonce,
            write_id=self._runtime.random.randbytes(16),
            logical_time_ms=encoding.now_ms(),
        )
        if is_small(contents, encoding.codec):
            return encode_wal(properties, contents, encoding.block_bytes, encoding.codec)
        run = self._runtime.workers.run
        return await run(encode_wal, properties, contents, encoding.block_bytes, encoding.codec)

    def _correct(self, turn: _AppendTurn, size_bytes: int) -> None:
        """What was accounted for a group when it was taken is more than it takes as an SST."""
        opened = self._grouping.begun
        if opened is not None and opened.wal_id == turn.place.wal_id:
            corrected = opened.size_bytes + size_bytes - turn.size_bytes
            self._grouping = replace(
                self._grouping, begun=replace(opened, size_bytes=max(0, corrected))
            )

    def _next_turn(self, place: ObjectPosition, size_bytes: int) -> _AppendTurn:
        self._turn_count += 1
        return _AppendTurn(self._turn_count - 1, place, size_bytes)

    async def _await_turn(self, number: int) -> None:
        if number > self._turn_now:
            waiter = self._waiting[number] = new_waiter()
            await waiter

    def _end_turn(self, number: int) -> None:
        """It was appended, or never will be: others follow all the same."""
        self._waiting.pop(number, None)
        if number != self._turn_now:
            self._given_up.add(number)
            return
        self._turn_now += 1
        while self._turn_now in self._given_up:
            self._given_up.remove(self._turn_now)
            self._turn_now += 1
        waiter = self._waiting.get(self._turn_now)
        if waiter is not None:
            tell(waiter)

    async def _await_room(self) -> None:
        """Wait while too much is not archived; what waits behind this fills the queue.

        After `quorum_timeout_ms` nobody should wait with it any longer.
        """
        if self._ledger.held.unarchived_bytes < self._settings.held_log_bytes_max:
            return
        self._full_since_ms = self._runtime.clock.monotonic_ms()
        try:
            async with asyncio.timeout(self._settings.quorum_timeout_ms / 1_000):
                await self._room()
        except TimeoutError:
            self.on_unavailable()
            await self._room()
        finally:
            self._full_since_ms = None

    async def _room(self) -> None:
        ledger = self._ledger
        while ledger.held.unarchived_bytes >= self._settings.held_log_bytes_max:
            ledger.archive_moved.clear()
            await ledger.archive_moved.wait()
            ledger.check_leading()

    async def _seal(self) -> None:
        """End the object that is open, if there is one, and return when that is committed."""
        sealed = self._grouping.seal()
        if sealed is None:
            return
        place, self._grouping = sealed
        turn = self._next_turn(place, 0)
        try:
            await self._await_turn(turn.number)
            # Groups before it may have been given up: then its object was never begun.
            last = self._ledger.leader.log.last
            if last.wal_id is None or last.ends_object:
                return
            record = self._ledger.append(ObjectPosition(last.wal_id, ends_object=True), b"")
        finally:
            self._end_turn(turn.number)
        await self._ledger.wait_committed(record.lsn)

    async def _seal_when_due(self) -> None:
        """End objects that no record has ended in time."""
        clock = self._runtime.clock
        while self._ledger.failure is None:
            due_ms = self._grouping.seal_due_ms
            if due_ms is None:
                self._opened.clear()
                await self._opened.wait()
                continue
            left_ms = due_ms - clock.monotonic_ms()
            if left_ms < NOW_MS or self._is_wanted:
                await self._failing(self._seal)
                continue
            self._hurry.clear()
            try:
                # Not less: what rounding leaves would be waited for again and again.
                async with asyncio.timeout(max(1.0, left_ms) / 1_000):
                    await self._hurry.wait()
            except TimeoutError:
                pass

    @property
    def _is_wanted(self) -> bool:
        """Whether somebody waits for the object that is open."""
        opened = self._grouping.begun
        return opened is not None and opened.wal_id <= self._wanted_wal_id
