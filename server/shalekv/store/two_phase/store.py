"""A store with compare-and-swap in two phases, over one that has no conditional writes.

A create takes five steps:

    1  put the object under a temporary name, the source
    2  insert a record: destination, source, not committed     this decides who wins
    3  copy the source to the destination                      the create has succeeded after this
    4  mark the record as committed
    5  delete the source

Any process may take the steps 3 to 5 in the place of the one that has taken step 2, at any time
and concurrently with others. `shalekv.protocol.two_phase` has the table of decisions: what may be
stored after any crash, and what each process does about it. It also describes rule S: no source is
deleted while a process may still copy it. For this, every attempt to enter a source into the record
(step 2) puts a new source.

A record is *open* until it is committed. It is *dead* when it is open, and source and destination
are both gone: then it cannot be completed, and another create takes it over.

`TwoPhaseCreate` runs the five steps, `RecordCompleter` the last three of them for any record,
`SourceDeleter` deletes temporary objects, and `Repair` completes what crashes have left.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from uuid import UUID

import structlog

from shalekv.errors import InvalidRequest, ObjectNotFound, StoreRefused, StoreUnavailable
from shalekv.format.coding import crc32c
from shalekv.format.names import UUID_BYTES, parse_temporary_name, temporary_name
from shalekv.protocol.manifest import CasMode
from shalekv.protocol.two_phase import CreateRecord, Destination, SourceStatus, source_status
from shalekv.runtime import Runtime
from shalekv.store.api import (
    NO_METADATA,
    Created,
    CreateOutcome,
    Exists,
    IsCollected,
    ObjectInfo,
    ObjectStore,
    PlainStore,
    Repaired,
    StoredObject,
    Unknown,
    check_name,
    check_new_name,
    nothing_is_collected,
)
from shalekv.store.two_phase.records import Inserted, InsertUnknown, Occupied, RecordStore

log = structlog.get_logger()

UUID_VERSION = 4
ATTEMPTS_MAX = 4  # each of them lost to another process that was quicker
BATCH_RECORDS = 1_000


def new_source(random: Random, destination: Destination, checksum: int) -> str:
    """Draw a name for a source, which no other attempt may ever have.

    Two attempts with the same name would overwrite each other's source. Therefore the name has the
    checksum of the object in addition to a random UUID.
    """
    uuid = UUID(bytes=random.randbytes(UUID_BYTES), version=UUID_VERSION)
    return temporary_name(destination.name, uuid.bytes, checksum)


def no_source(random: Random, destination: Destination) -> str:
    """Draw the name of a source that no process will ever put."""
    return new_source(random, destination, checksum=0)


class Completion(enum.Enum):
    """Outcome of the completion of an open record."""

    DONE = "the destination exists, and the record is committed"
    DEAD = "source and destination are both gone"
    CHANGED = "the record was taken over or deleted meanwhile: read it again"


class RecordCompleter:
    """Takes the steps 3 to 5 of a create, for the record of any process, any number of times."""

    def __init__(self, plain: PlainStore, records: RecordStore) -> None:
        self._plain = plain
        self._records = records

    async def complete(self, record: CreateRecord) -> Completion:
        """Complete an open record. Raises `StoreUnavailable` and `StoreRefused`.

        Copying once more is harmless: as long as the record exists, only its source is ever copied
        to the destination, and the source never changes.
        """
        try:
            await self._plain.copy(record.source, record.destination.name)
        except ObjectNotFound:
            # The destination is checked after the source: a source is deleted after its record was
            # committed, which is after the destination exists. So a record that another process
            # completes never appears dead.
            if not await self.is_there(record.destination):
                return Completion.DEAD
        except StoreUnavailable:
            # Some servers fail when the source is deleted while they copy it: then another process
            # has completed the record.
            if await self._records.find(record.destination) != replace(record, is_committed=True):
                raise
            return Completion.DONE
        if not await self._records.commit(record):
            return Completion.CHANGED
        await self.discard(record.source)
        return Completion.DONE

    async def is_there(self, destination: Destination) -> bool:
        """Return whether the object exists."""
        try:
            await self._plain.head(destination.name)
        except ObjectNotFound:
            return False
        return True

    async def discard(self, source: str) -> None:
        """Delete a source that no record can name any more (rule S).

        If that fails, the collector deletes the source when it is old.
        """
        try:
            await self._plain.delete([source])
        except (StoreUnavailable, StoreRefused) as error:
            log.info("temporary object left to the collector", error=str(error))


class SourceDeleter:
    """Deletes temporary objects of one database by rule S of `shalekv.protocol.two_phase`.

    The process that put a source may have stalled since then, and continue at the moment of the
    deletion: enter the source into the record, and copy it. So the source is kept out of the
    record during its deletion: the record either is committed, or is a barrier, which names a
    source that never existed. Once the source is gone, no process can copy it, and the barrier is
    withdrawn. A process that wants to create the destination meanwhile takes the barrier over.
    """

    def __init__(self, plain: PlainStore, records: RecordStore, random: Random) -> None:
        self._plain = plain
        self._records = records
        self._random = random
        self._completer = RecordCompleter(plain, records)

    async def delete(self, sources: Sequence[str]) -> None:
        """Delete sources. Raises `StoreUnavailable`; some may be deleted then.

        A source that a record names was left by a crash: its create is completed first. REQUIRES:
        a list has shown the sources; sources that are put later are not covered.
        """
        barriers = [await self._block(source) for source in sources]
        await self._plain.delete(sources)
        for barrier in barriers:
            if barrier is not None:
                await self._records.withdraw(barrier)

    async def _block(self, source: str) -> CreateRecord | None:
        """Keep `source` out of the record; return the barrier, or None if it is committed."""
        parsed = parse_temporary_name(source)
        if parsed is None or not parsed.destination.isascii():
            return None  # not a source of ours
        destination = Destination(self._plain.url, parsed.destination)
        for _ in range(ATTEMPTS_MAX):
            record = await self._records.find(destination)
            match source_status(record, source):
                case SourceStatus.OURS_DONE | SourceStatus.THEIRS_DONE:
                    return None
            completion = Completion.DEAD
            if record is not None:
                completion = await self._completer.complete(record)
            if completion is Completion.DONE:
                return None
            barrier = CreateRecord(destination, no_source(self._random, destination))
            if completion is Completion.DEAD and await self._enter(barrier, record):
                return barrier
        problem = f"the record of {destination.name} changed {ATTEMPTS_MAX} times during the delete"
        raise StoreUnavailable(self._plain.url, "delete", source, problem)

    async def _enter(self, barrier: CreateRecord, dead: CreateRecord | None) -> bool:
        if dead is None:
            return await self._records.insert(barrier) == Inserted()
        return await self._records.take_over(dead, barrier.source)


class Repair:
    """Completes creates that crashed half-way, and deletes records of collected objects.

    It may run at any time, in any number of processes, beside creates: each change that it makes
    to a record is one that the owner of the record could make at the same moment.
    """

    def __init__(self, plain: PlainStore, records: RecordStore, is_collected: IsCollected) -> None:
        self._plain = plain
        self._records = records
        self._is_collected = is_collected
        self._completer = RecordCompleter(plain, records)

    async def run(self) -> Repaired:
        """Repair as `ObjectStore.repair` says.

        Without an `is_collected` of the caller, only open records are read.
        """
        completed = unfinished = 0
        async for record in self._records.list(self._plain.url, uncommitted_only=True):
            match await self._completer.complete(record):
                case Completion.DONE:
                    completed += 1
                case Completion.DEAD if self._is_collected(record.destination.name):
                    # It cannot be completed, and nothing needs the object: once committed, the
                    # record can be deleted.
                    await self._records.commit(record)
                case Completion.DEAD:
                    unfinished += 1
        forgotten = 0 if self._is_collected is nothing_is_collected else await self._forget()
        aborted = (await self._plain.repair(self._is_collected)).aborted
        return Repaired(completed, unfinished, forgotten, aborted)

    async def _forget(self) -> int:
        """Delete the records of objects that were collected and no longer exist."""
        forgotten = 0
        batch: list[CreateRecord] = []
        async for record in self._records.list(self._plain.url, uncommitted_only=False):
            if record.is_committed and self._is_collected(record.destination.name):
                batch.append(record)
            if len(batch) == BATCH_RECORDS:
                forgotten += await self._forget_gone(batch)
                batch = []
        return forgotten + (await self._forget_gone(batch) if batch else 0)

    async def _forget_gone(self, batch: list[CreateRecord]) -> int:
        """Delete those of the records whose objects do not exist; return how many.

        REQUIRES: all were read before this call, as committed and with collected names. Nothing
        needs an object that is created under such a name later.
        """
        by_folder: dict[str, list[CreateRecord]] = defaultdict(list)
        for record in batch:
            by_folder[record.destination.name.rpartition("/")[0]].append(record)
        gone = []
        for folder, records in by_folder.items():
            there = await self._there(folder, [record.destination.name for record in records])
            gone += [r.destination for r in records if r.destination.name not in there]
        if gone:
            await self._records.delete_committed(gone)
        return len(gone)

    async def _there(self, folder: str, names: list[str]) -> set[str]:
        """Return which of these objects exist; one page of a list answers for a thousand."""
        if not folder:  # only folders can be listed
            return {name for name in names if await self._is_there(name)}
        first, last = min(names), max(names)
        there = set()
        # A name sorts after each of its own prefixes.
        async for info in self._plain.list(f"{folder}/", start_after=first[:-1]):
            if info.name > last:
                break
            there.add(info.name)
        return there.intersection(names)

    async def _is_there(self, name: str) -> bool:
        return await self._completer.is_there(Destination(self._plain.url, name))


@dataclass(frozen=True, slots=True)
class _Undecided:
    """The source may enter the record later: it must stay, and the outcome is unknown."""

    cause: str


@dataclass(frozen=True, slots=True)
class _Lost:
    """The source can never enter the record. `record` is the one that was found, if any."""

    record: CreateRecord | None


@dataclass(frozen=True, slots=True)
class _Retry:
    """Another attempt may win: by a take-over of the `dead` record, or by an insert."""

    dead: CreateRecord | None


class TwoPhaseCreate:
    """Creates one object. `new_source` draws a temporary name that was never used before."""

    def __init__(
        self,
        plain: PlainStore,
        records: RecordStore,
        destination: Destination,
        new_source: Callable[[], str],
    ) -> None:
        self._plain = plain
        self._records = records
        self._completer = RecordCompleter(plain, records)
        self._destination = destination
        self._new_source = new_source

    async def run(self, data: bytes, metadata: Mapping[str, str]) -> CreateOutcome:
        """Create as `ObjectStore.create`. If this raises, nothing was created."""
        dead: CreateRecord | None = None
        for _ in range(ATTEMPTS_MAX):
            outcome = await self._attempt(data, metadata, dead)
            if not isinstance(outcome, _Retry):
                return outcome
            dead = outcome.dead
        problem = f"its record changed {ATTEMPTS_MAX} times during the create"
        raise StoreUnavailable(self._plain.url, "create", self._destination.name, problem)

    async def _attempt(
        self, data: bytes, metadata: Mapping[str, str], dead: CreateRecord | None
    ) -> CreateOutcome | _Retry:
        """Try once, with a new source.

        REQUIRES: `dead` was read before this call, which puts the source (rule S).
        """
        own = CreateRecord(self._destination, self._new_source())
        await self._plain.put(own.source, data, metadata)
        try:
            entered = await self._enter(own, dead)
            if isinstance(entered, _Lost):
                outcome = await self._help_rival(entered.record)
                await self._completer.discard(own.source)
                return outcome
        except (StoreUnavailable, StoreRefused):
            await self._completer.discard(own.source)
            raise
        return Unknown(entered.cause) if entered is not None else await self._carry_out(own)

    async def _enter(
        self, own: CreateRecord, dead: CreateRecord | None
    ) -> _Undecided | _Lost | None:
        """Take step 2. None: the record is ours. If this raises, the source can never enter it."""
        if dead is not None:
            return await self._take_over(own, dead)
        match await self._records.insert(own):
            case Inserted():
                return None
            case Occupied(record):
                return None if record.source == own.source else _Lost(record)
            case InsertUnknown(cause):
                return await self._resolve_record(own, cause)

    async def _take_over(self, own: CreateRecord, dead: CreateRecord) -> _Undecided | _Lost | None:
        try:
            is_ours = await self._records.take_over(dead, own.source)
        except StoreUnavailable as error:
            return await self._resolve_record(own, str(error))
        return None if is_ours else _Lost(await self._records.find(self._destination))

    async def _resolve_record(self, own: CreateRecord, cause: str) -> _Undecided | None:
        """After a lost reply: read whether the record is ours.

        Another record proves nothing: ours may have existed before and have been deleted since, or
        may still be inserted. So the outcome is unknown then.
        """
        try:
            found = await self._records.find(self._destination)
        except (StoreUnavailable, StoreRefused) as error:
            return _Undecided(f"{cause}; {error}")
        is_ours = source_status(found, own.source) in {SourceStatus.OURS, SourceStatus.OURS_DONE}
        return None if is_ours else _Undecided(cause)

    async def _help_rival(self, record: CreateRecord | None) -> Exists | _Retry:
        """Complete the record of a rival, so that the object exists when this returns `Exists`."""
        if record is None:
            return _Retry(None)
        if record.is_committed:
            return Exists()
        match await self._completer.complete(record):
            case Completion.DONE:
                return Exists()
            case Completion.DEAD:
                return _Retry(record)
            case Completion.CHANGED:
                return _Retry(None)

    async def _carry_out(self, own: CreateRecord) -> CreateOutcome:
        """Take the steps 3 to 5. From here on others may complete the create: this never raises."""
        try:
            await self._plain.copy(own.source, own.destination.name)
        except ObjectNotFound:
            return await self._resolve_missing_source(own)
        except (StoreUnavailable, StoreRefused) as error:
            return await self._resolve_copy(own, str(error))
        try:
            is_ours = await self._records.commit(own)
        except (StoreUnavailable, StoreRefused):
            return Created()  # the source must stay for the process that commits in our place
        await self._completer.discard(own.source)
        return Created() if is_ours else Unknown("its record changed while it was copied")

    async def _resolve_missing_source(self, own: CreateRecord) -> CreateOutcome:
        """Find the outcome when the source is gone.

        Another process has completed the create in our place, or has deleted the source before
        step 2.
        """
        try:
            found = await self._records.find(own.destination)
            is_there = await self._completer.is_there(own.destination)
            match source_status(found, own.source):
                case SourceStatus.OURS_DONE if is_there:
                    return Created()
                case SourceStatus.OURS if not is_there:
                    await self._records.withdraw(own)  # it is dead, and would block other creates
        except (StoreUnavailable, StoreRefused) as error:
            return Unknown(str(error))
        # Also when the record is a rival's now: our object may have existed before that.
        return Unknown(f"the temporary object {own.source} is gone")

    async def _resolve_copy(self, own: CreateRecord, cause: str) -> CreateOutcome:
        """Find the outcome when the copy was not answered; it may still take effect later.

        Another process may have completed the create, which can make our copy fail.
        """
        try:
            found = await self._records.find(own.destination)
            is_done = source_status(found, own.source) is SourceStatus.OURS_DONE
            if is_done and await self._completer.is_there(own.destination):
                return Created()
        except (StoreUnavailable, StoreRefused) as error:
            return Unknown(f"{cause}; {error}")
        return Unknown(cause)


class TwoPhaseStore(ObjectStore):
    """The store `plain` with a `create` that `records` decide. It owns both, and closes them.

    Lists show temporary objects too: a collector deletes them when they are old. Deleting them is
    safe at any time.
    """

    cas_mode = CasMode.TWO_PHASE

    def __init__(self, plain: PlainStore, records: RecordStore, runtime: Runtime) -> None:
        self.url = plain.url
        self.sent = plain.sent
        records.sent = plain.sent
        self._plain = plain
        self._records = records
        self._runtime = runtime

    @property
    def plain(self) -> PlainStore:
        """The store of the objects, for checks of the store."""
        return self._plain

    @property
    def records(self) -> RecordStore:
        """The records that decide, for checks of the store."""
        return self._records

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        """Create as `ObjectStore.create`. The steps 4 and 5 are tried first, and may fail."""
        check_new_name(name)
        if parse_temporary_name(name) is not None:
            raise InvalidRequest("name", f"{name!r} is that of a temporary object")
        destination = Destination(self.url, name)
        draw = partial(new_source, self._runtime.random, destination, crc32c(data))
        create = TwoPhaseCreate(self._plain, self._records, destination, draw)
        return await create.run(data, metadata)

    async def get(self, name: str) -> StoredObject:
        return await self._plain.get(name)

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        return await self._plain.get_range(name, offset, length)

    async def head(self, name: str) -> ObjectInfo:
        return await self._plain.head(name)

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        return self._plain.list(prefix, start_after=start_after)

    async def delete(self, names: Iterable[str]) -> None:
        """Delete objects first, then their records.

        A crash in between leaves records that `repair` deletes. In the other order a stalled
        writer could insert its record again, and overwrite an existing object.
        """
        doomed = tuple(names)
        for name in doomed:
            check_name(name)
        temporary = [name for name in doomed if parse_temporary_name(name) is not None]
        if temporary:
            await SourceDeleter(self._plain, self._records, self._runtime.random).delete(temporary)
        created = [name for name in dict.fromkeys(doomed) if parse_temporary_name(name) is None]
        if not created:
            return
        await self._plain.delete(created)
        destinations = [Destination(self.url, name) for name in created if name.isascii()]
        await self._records.delete_committed(destinations)

    async def now_ms(self) -> int:
        return await self._plain.now_ms()

    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Repaired:
        return await Repair(self._plain, self._records, is_collected).run()

    async def close(self) -> None:
        try:
            await self._plain.close()
        finally:
            await self._records.close()
