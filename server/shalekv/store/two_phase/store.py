"""A store with compare-and-swap in two phases, over one that has no conditional writes.

What stands where after any crash, and what each process does about it, is told in
`shalekv.protocol.two_phase`; the steps of a create in `shalekv.store.two_phase.store`.
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
from shalekv.protocol.two_phase import CreateRecord, Destination, SourceStatus, standing
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
    Recovered,
    StoredObject,
    Unknown,
    check_name,
    check_new_name,
    nothing_is_collected,
)
from shalekv.store.two_phase.records import Inserted, InsertUnknown, Occupied, RecordStore

# --- sources
# Names of sources: temporary objects of two-phase compare-and-swap.


UUID_VERSION = 4


def new_source(random: Random, destination: Destination, checksum: int) -> str:
    """A name that no attempt ever had: two that drew the same would destroy what one of them put.

    That is why the checksum of the object is in it as well (seed 000).
    """
    uuid = UUID(bytes=random.randbytes(UUID_BYTES), version=UUID_VERSION)
    return temporary_name(destination.name, uuid.bytes, checksum)


def no_source(random: Random, destination: Destination) -> str:
    """The same, for an object that nobody will ever put."""
    return new_source(random, destination, checksum=0)


# --- completing
# Completes the create of whoever entered its source into a record: helping, and recovery.


log = structlog.get_logger()


class Completion(enum.Enum):
    """What the completion of an open record came to."""

    DONE = "the destination is there, and the record says so"
    DEAD = "source and destination are both gone"
    CHANGED = "the record was taken over, or forgotten, meanwhile: look again"


class Completing:
    """Steps 3 to 5 of a create, for anybody's record and any number of times."""

    def __init__(self, plain: PlainStore, records: RecordStore) -> None:
        self._plain = plain
        self._records = records

    async def complete(self, record: CreateRecord) -> Completion:
        """Complete an open record. Raises `StoreUnavailable` and `StoreRefused`.

        To copy once more is harmless: as long as the record stands, its source is the one thing
        that is ever copied there, and it never changes.
        """
        try:
            await self._plain.copy(record.source, record.destination.name)
        except ObjectNotFound:
            # Looked for in this order: a source goes after its record is committed, and that is
            # after the destination is there. So what somebody else completes never looks dead.
            if not await self.is_there(record.destination):
                return Completion.DEAD
        except StoreUnavailable:
            # Some servers fail when the source goes while they copy it: then this is done.
            if await self._records.find(record.destination) != replace(record, is_committed=True):
                raise
            return Completion.DONE
        if not await self._records.commit(record):
            return Completion.CHANGED
        await self.discard(record.source)
        return Completion.DONE

    async def is_there(self, destination: Destination) -> bool:
        """Whether the destination has its object."""
        try:
            await self._plain.head(destination.name)
        except ObjectNotFound:
            return False
        return True

    async def discard(self, source: str) -> None:
        """Delete a source that no record will name any more (rule S).

        If that fails, the collector finds the source when it is old.
        """
        try:
            await self._plain.delete([source])
        except (StoreUnavailable, StoreRefused) as error:
            log.info("temporary object left to the collector", error=str(error))


# --- abandoning
# Deletes temporary objects: rule S of `shalekv.protocol.two_phase`.
#
# Whoever put one may have been stalled since then, and would go on in the very moment in which it
# is deleted: enter it into the record, and copy. So it is kept out while it is deleted, by a
# record that is committed or one that names a source which never was. When it is gone, nobody can
# copy it any more, and that record is withdrawn. Who wants the destination meanwhile takes it
# over.


ATTEMPTS_MAX = 4


class Abandoning:
    """Deletes temporary objects of one database."""

    def __init__(self, plain: PlainStore, records: RecordStore, random: Random) -> None:
        self._plain = plain
        self._records = records
        self._random = random
        self._completing = Completing(plain, records)

    async def delete(self, sources: Sequence[str]) -> None:
        """Delete them. Raises `StoreUnavailable`; then some may be deleted.

        One that a record names is what a crash has left: it is completed. REQUIRES: they have been
        seen, in a list: what is put later is not meant.
        """
        barriers = [await self._bar(source) for source in sources]
        await self._plain.delete(sources)
        for barrier in barriers:
            if barrier is not None:
                await self._records.withdraw(barrier)

    async def _bar(self, source: str) -> CreateRecord | None:
        """Keep `source` out of the record for good, or by a record that is returned."""
        parsed = parse_temporary_name(source)
        if parsed is None or not parsed.destination.isascii():
            return None  # we never put it
        destination = Destination(self._plain.url, parsed.destination)
        for _ in range(ATTEMPTS_MAX):
            record = await self._records.find(destination)
            match standing(record, source):
                case SourceStatus.OURS_DONE | SourceStatus.THEIRS_DONE:
                    return None
            completion = Completion.DEAD
            if record is not None:
                completion = await self._completing.complete(record)
            if completion is Completion.DONE:
                return None
            barrier = CreateRecord(destination, no_source(self._random, destination))
            if completion is Completion.DEAD and await self._enter(barrier, record):
                return barrier
        problem = f"the record of {destination.name} changed {ATTEMPTS_MAX} times under our hands"
        raise StoreUnavailable(self._plain.url, "delete", source, problem)

    async def _enter(self, barrier: CreateRecord, dead: CreateRecord | None) -> bool:
        if dead is None:
            return await self._records.insert(barrier) == Inserted()
        return await self._records.take_over(dead, barrier.source)


# --- recovering
# Recovery: completes what crashed creates have left, and forgets what was collected.
#
# It may run at any time, in any number of processes, while creates go on: whatever it does to a
# record, the record's owner could be doing in the same moment.


BATCH_RECORDS = 1_000


class Repair:
    """One recovery of one database."""

    def __init__(self, plain: PlainStore, records: RecordStore, is_collected: IsCollected) -> None:
        self._plain = plain
        self._records = records
        self._is_collected = is_collected
        self._completing = Completing(plain, records)

    async def recover(self) -> Recovered:
        """As `ObjectStore.recover` says. Who knows nothing of collected names sees open records."""
        completed = unfinished = 0
        async for record in self._records.list(self._plain.url, uncommitted_only=True):
            match await self._completing.complete(record):
                case Completion.DONE:
                    completed += 1
                case Completion.DEAD if self._is_collected(record.destination.name):
                    # Nobody can complete it, and nobody will miss it: so it can be forgotten.
                    await self._records.commit(record)
                case Completion.DEAD:
                    unfinished += 1
        forgotten = 0 if self._is_collected is nothing_is_collected else await self._forget()
        aborted = (await self._plain.recover(self._is_collected)).aborted
        return Recovered(completed, unfinished, forgotten, aborted)

    async def _forget(self) -> int:
        """Delete the records of objects that were collected and are gone."""
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
        """REQUIRES: all were seen committed before: an object that is made now is not missed."""
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
        """Which of these objects are there: one page of a list tells of a thousand."""
        if not folder:  # a list is of a folder
            return {name for name in names if await self._is_there(name)}
        first, last = min(names), max(names)
        there = set()
        # All that begins with a name comes after what the name itself begins with.
        async for info in self._plain.list(f"{folder}/", start_after=first[:-1]):
            if info.name > last:
                break
            there.add(info.name)
        return there.intersection(names)

    async def _is_there(self, name: str) -> bool:
        return await self._completing.is_there(Destination(self._plain.url, name))


# --- creating
# One create in two phases: the seed's five steps, and what to do when a rival is met on the way.
#
#     1  put the object under a temporary name, the source
#     2  insert a record: destination, source, not committed     it decides who wins
#     3  copy the source to the destination                      success is told after this
#     4  mark the record as committed
#     5  delete the source
#
# Anybody may take the steps 3 to 5 in the place of whoever has taken the second, at any time and
# at once with others. What a record says is read off the table in `shalekv.protocol.two_phase`;
# rule S, which stands there, is kept by putting a source anew for every chance to enter it.


# each of them lost to somebody who was quicker


@dataclass(frozen=True, slots=True)
class _Doubt:
    """The source may enter the record later: it must stay, and nothing is decided."""

    cause: str


@dataclass(frozen=True, slots=True)
class _Lost:
    """The source will never enter the record, of which this is known; None: it was gone."""

    record: CreateRecord | None


@dataclass(frozen=True, slots=True)
class _Again:
    """Another attempt may win: by taking `dead` over, or by an insert."""

    dead: CreateRecord | None


class Creating:
    """Creates one object. `new_source` draws a temporary name that nobody ever had."""

    def __init__(
        self,
        plain: PlainStore,
        records: RecordStore,
        destination: Destination,
        new_source: Callable[[], str],
    ) -> None:
        self._plain = plain
        self._records = records
        self._completing = Completing(plain, records)
        self._destination = destination
        self._new_source = new_source

    async def create(self, data: bytes, metadata: Mapping[str, str]) -> CreateOutcome:
        """As `ObjectStore.create` says. Whatever it raises, nothing was created."""
        dead: CreateRecord | None = None
        for _ in range(ATTEMPTS_MAX):
            outcome = await self._attempt(data, metadata, dead)
            if not isinstance(outcome, _Again):
                return outcome
            dead = outcome.dead
        problem = f"its record changed {ATTEMPTS_MAX} times under our hands"
        raise StoreUnavailable(self._plain.url, "create", self._destination.name, problem)

    async def _attempt(
        self, data: bytes, metadata: Mapping[str, str], dead: CreateRecord | None
    ) -> CreateOutcome | _Again:
        """REQUIRES: `dead` was read before this call, which puts the source (rule S)."""
        own = CreateRecord(self._destination, self._new_source())
        await self._plain.put(own.source, data, metadata)
        try:
            entered = await self._enter(own, dead)
            if isinstance(entered, _Lost):
                outcome = await self._give_way(entered.record)
                await self._completing.discard(own.source)
                return outcome
        except (StoreUnavailable, StoreRefused):
            await self._completing.discard(own.source)
            raise
        return Unknown(entered.cause) if entered is not None else await self._carry_out(own)

    async def _enter(self, own: CreateRecord, dead: CreateRecord | None) -> _Doubt | _Lost | None:
        """Step 2. None: the record is ours. What it raises says that the source never enters."""
        if dead is not None:
            return await self._take_over(own, dead)
        match await self._records.insert(own):
            case Inserted():
                return None
            case Occupied(record):
                return None if record.source == own.source else _Lost(record)
            case InsertUnknown(cause):
                return await self._resolve(own, cause)

    async def _take_over(self, own: CreateRecord, dead: CreateRecord) -> _Doubt | _Lost | None:
        try:
            is_ours = await self._records.take_over(dead, own.source)
        except StoreUnavailable as error:
            return await self._resolve(own, str(error))
        return None if is_ours else _Lost(await self._records.find(self._destination))

    async def _resolve(self, own: CreateRecord, cause: str) -> _Doubt | None:
        """After a lost reply: is the record ours?

        One that is not proves nothing: ours may have been there before and have been forgotten, or
        may still come. So the caller is told that it is unknown, which it is.
        """
        try:
            found = await self._records.find(self._destination)
        except (StoreUnavailable, StoreRefused) as error:
            return _Doubt(f"{cause}; {error}")
        is_ours = standing(found, own.source) in {SourceStatus.OURS, SourceStatus.OURS_DONE}
        return None if is_ours else _Doubt(cause)

    async def _give_way(self, record: CreateRecord | None) -> Exists | _Again:
        """Help whoever has the record, so that the object is there when we say so."""
        if record is None:
            return _Again(None)
        if record.is_committed:
            return Exists()
        match await self._completing.complete(record):
            case Completion.DONE:
                return Exists()
            case Completion.DEAD:
                return _Again(record)
            case Completion.CHANGED:
                return _Again(None)

    async def _carry_out(self, own: CreateRecord) -> CreateOutcome:
        """Steps 3 to 5. From here on the create may succeed without us: nothing is raised."""
        try:
            await self._plain.copy(own.source, own.destination.name)
        except ObjectNotFound:
            return await self._without_source(own)
        except (StoreUnavailable, StoreRefused) as error:
            return await self._without_answer(own, str(error))
        try:
            is_ours = await self._records.commit(own)
        except (StoreUnavailable, StoreRefused):
            return Created()  # the source has to stay for whoever commits in our place
        await self._completing.discard(own.source)
        return Created() if is_ours else Unknown("its record changed while it was copied")

    async def _without_source(self, own: CreateRecord) -> CreateOutcome:
        """Somebody has completed it in our place, or has deleted the source before step 2."""
        try:
            found = await self._records.find(own.destination)
            is_there = await self._completing.is_there(own.destination)
            match standing(found, own.source):
                case SourceStatus.OURS_DONE if is_there:
                    return Created()
                case SourceStatus.OURS if not is_there:
                    await self._records.withdraw(own)  # it is dead, and in everybody's way
        except (StoreUnavailable, StoreRefused) as error:
            return Unknown(str(error))
        # Also when the record is another's now: ours may have been the object before that.
        return Unknown(f"the temporary object {own.source} is gone")

    async def _without_answer(self, own: CreateRecord, cause: str) -> CreateOutcome:
        """The copy may land later. Somebody else may have completed it, and this made it fail."""
        try:
            found = await self._records.find(own.destination)
            is_done = standing(found, own.source) is SourceStatus.OURS_DONE
            if is_done and await self._completing.is_there(own.destination):
                return Created()
        except (StoreUnavailable, StoreRefused) as error:
            return Unknown(f"{cause}; {error}")
        return Unknown(cause)


# --- store


class TwoPhaseStore(ObjectStore):
    """`plain`, with a `create` that `records` decide. It owns both, and closes them.

    Lists show temporary objects too: a collector deletes them when they are old, which may be done
    at any time.
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
        """The store of the objects, for whoever checks whether it is fit."""
        return self._plain

    @property
    def records(self) -> RecordStore:
        """The records that decide, likewise."""
        return self._records

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        """As the interface says. It tries steps 4 and 5 before it returns; they may fail."""
        check_new_name(name)
        if parse_temporary_name(name) is not None:
            raise InvalidRequest("name", f"{name!r} is that of a temporary object")
        destination = Destination(self.url, name)
        draw = partial(new_source, self._runtime.random, destination, crc32c(data))
        return await Creating(self._plain, self._records, destination, draw).create(data, metadata)

    async def get(self, name: str) -> StoredObject:
        return await self._plain.get(name)

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        return await self._plain.get_range(name, offset, length)

    async def head(self, name: str) -> ObjectInfo:
        return await self._plain.head(name)

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        return self._plain.list(prefix, start_after=start_after)

    async def delete(self, names: Iterable[str]) -> None:
        """As the interface says: objects first, then their records.

        A crash in between leaves records that `recover` forgets. In the other order a stalled
        writer could insert its record again, and overwrite what is there.
        """
        doomed = tuple(names)
        for name in doomed:
            check_name(name)
        temporary = [name for name in doomed if parse_temporary_name(name) is not None]
        if temporary:
            await Abandoning(self._plain, self._records, self._runtime.random).delete(temporary)
        created = [name for name in dict.fromkeys(doomed) if parse_temporary_name(name) is None]
        if not created:
            return
        await self._plain.delete(created)
        destinations = [Destination(self.url, name) for name in created if name.isascii()]
        await self._records.delete_committed(destinations)

    async def now_ms(self) -> int:
        return await self._plain.now_ms()

    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        return await Repair(self._plain, self._records, is_collected).recover()

    async def close(self) -> None:
        try:
            await self._plain.close()
        finally:
            await self._records.close()
