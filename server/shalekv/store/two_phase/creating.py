"""One create in two phases: the seed's five steps, and what to do when a rival is met on the way.

    1  put the object under a temporary name, the source
    2  insert a record: destination, source, not committed     it decides who wins
    3  copy the source to the destination                      success is told after this
    4  mark the record as committed
    5  delete the source

Anybody may take the steps 3 to 5 in the place of whoever has taken the second, at any time and
at once with others. What a record says is read off the table in `shalekv.protocol.two_phase`; rule S,
which stands there, is kept by putting a source anew for every chance to enter it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shalekv.errors import ObjectNotFound, StoreRefused, StoreUnavailable
from shalekv.protocol.two_phase import Destination, Record, Standing, standing
from shalekv.store.api import Created, CreateOutcome, Exists, PlainStore, Unknown
from shalekv.store.two_phase.completing import Completing, Completion
from shalekv.store.two_phase.records import Inserted, InsertUnknown, Occupied, RecordStore

ATTEMPTS_MAX = 4  # each of them lost to somebody who was quicker


@dataclass(frozen=True, slots=True)
class _Doubt:
    """The source may enter the record later: it must stay, and nothing is decided."""

    cause: str


@dataclass(frozen=True, slots=True)
class _Lost:
    """The source will never enter the record, of which this is known; None: it was gone."""

    record: Record | None


@dataclass(frozen=True, slots=True)
class _Again:
    """Another attempt may win: by taking `dead` over, or by an insert."""

    dead: Record | None


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
        dead: Record | None = None
        for _ in range(ATTEMPTS_MAX):
            outcome = await self._attempt(data, metadata, dead)
            if not isinstance(outcome, _Again):
                return outcome
            dead = outcome.dead
        problem = f"its record changed {ATTEMPTS_MAX} times under our hands"
        raise StoreUnavailable(self._plain.url, "create", self._destination.name, problem)

    async def _attempt(
        self, data: bytes, metadata: Mapping[str, str], dead: Record | None
    ) -> CreateOutcome | _Again:
        """REQUIRES: `dead` was read before this call, which puts the source (rule S)."""
        own = Record(self._destination, self._new_source())
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

    async def _enter(self, own: Record, dead: Record | None) -> _Doubt | _Lost | None:
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

    async def _take_over(self, own: Record, dead: Record) -> _Doubt | _Lost | None:
        try:
            is_ours = await self._records.take_over(dead, own.source)
        except StoreUnavailable as error:
            return await self._resolve(own, str(error))
        return None if is_ours else _Lost(await self._records.find(self._destination))

    async def _resolve(self, own: Record, cause: str) -> _Doubt | None:
        """After a lost reply: is the record ours?

        One that is not proves nothing: ours may have been there before and have been forgotten, or
        may still come. So the caller is told that it is unknown, which it is.
        """
        try:
            found = await self._records.find(self._destination)
        except (StoreUnavailable, StoreRefused) as error:
            return _Doubt(f"{cause}; {error}")
        is_ours = standing(found, own.source) in {Standing.OURS, Standing.OURS_DONE}
        return None if is_ours else _Doubt(cause)

    async def _give_way(self, record: Record | None) -> Exists | _Again:
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

    async def _carry_out(self, own: Record) -> CreateOutcome:
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

    async def _without_source(self, own: Record) -> CreateOutcome:
        """Somebody has completed it in our place, or has deleted the source before step 2."""
        try:
            found = await self._records.find(own.destination)
            is_there = await self._completing.is_there(own.destination)
            match standing(found, own.source):
                case Standing.OURS_DONE if is_there:
                    return Created()
                case Standing.OURS if not is_there:
                    await self._records.withdraw(own)  # it is dead, and in everybody's way
        except (StoreUnavailable, StoreRefused) as error:
            return Unknown(str(error))
        # Also when the record is another's now: ours may have been the object before that.
        return Unknown(f"the temporary object {own.source} is gone")

    async def _without_answer(self, own: Record, cause: str) -> CreateOutcome:
        """The copy may land later. Somebody else may have completed it, and this made it fail."""
        try:
            found = await self._records.find(own.destination)
            is_done = standing(found, own.source) is Standing.OURS_DONE
            if is_done and await self._completing.is_there(own.destination):
                return Created()
        except (StoreUnavailable, StoreRefused) as error:
            return Unknown(f"{cause}; {error}")
        return Unknown(cause)
