"""Mutants of two-phase compare-and-swap, of which the profile `two_phase` runs the shipped code."""

from __future__ import annotations

from collections.abc import Iterable

from shalekv.core.two_phase import Destination, Record
from shalekv.errors import ObjectNotFound, StoreRefused, StoreUnavailable
from shalekv.format.names import parse_temporary_name
from shalekv.store.api import Created, CreateOutcome, Exists, Recovered, Unknown
from shalekv.store.two_phase.abandoning import Abandoning
from shalekv.store.two_phase.creating import Creating, _Again
from shalekv.store.two_phase.recovering import Recovering
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.sim.planting import mutant


async def commit_first(self: Creating, own: Record) -> CreateOutcome:
    """The fourth step before the third."""
    try:
        is_ours = await self._records.commit(own)
        await self._plain.copy(own.source, own.destination.name)
    except ObjectNotFound:
        return await self._without_source(own)
    except (StoreUnavailable, StoreRefused) as error:
        return Unknown(str(error))
    await self._completing.discard(own.source)
    return Created() if is_ours else Unknown("")


async def believe_in_copy(_self: Creating, _own: Record, _cause: str) -> CreateOutcome:
    """A copy without an answer is taken for one that was made."""
    return Created()


async def believe_in_insert(_self: Creating, _own: Record, _cause: str) -> None:
    """An insert without an answer is taken for one that was made."""


async def help_nobody(_self: Creating, record: Record | None) -> Exists | _Again:
    """The object of an open record is not made before it is said to exist."""
    return Exists() if record is not None else _Again(None)


async def take_over_the_living(_self: Creating, record: Record | None) -> Exists | _Again:
    """A record is taken over although it could be completed."""
    if record is not None and record.is_committed:
        return Exists()
    return _Again(record)


async def records_first(self: TwoPhaseStore, names: Iterable[str]) -> None:
    """Records go, and then their objects."""
    doomed = tuple(names)
    temporary = [name for name in doomed if parse_temporary_name(name) is not None]
    if temporary:
        await Abandoning(self._plain, self._records, self._runtime.random).delete(temporary)
    created = [name for name in doomed if parse_temporary_name(name) is None]
    await self._records.delete_committed([Destination(self.url, name) for name in created])
    await self._plain.delete(created)


async def forget_all(self: Recovering, batch: list[Record]) -> int:
    """Records that may go do so although their objects are there."""
    await self._records.delete_committed([record.destination for record in batch])
    return len(batch)


async def complete_nothing(self: Recovering) -> Recovered:
    """What crashed creates have left half done stays as it is."""
    return Recovered(forgotten=await self._forget())


MUTANTS = (
    mutant(
        "two phases: commit before the copy",
        (Creating, "_carry_out", commit_first),
        seeds=20,
    ),
    mutant(
        "two phases: take an unanswered copy for made",
        (Creating, "_without_answer", believe_in_copy),
        seeds=20,
        hint=1,
    ),
    mutant(
        "two phases: take an unanswered insert for made",
        (Creating, "_resolve", believe_in_insert),
        seeds=20,
        hint=1,
    ),
    mutant(
        "two phases: do not help whoever is first", (Creating, "_give_way", help_nobody), seeds=20
    ),
    mutant(
        "two phases: take over from the living",
        (Creating, "_give_way", take_over_the_living),
        seeds=20,
    ),
    mutant("two phases: delete records first", (TwoPhaseStore, "delete", records_first), seeds=20),
    mutant(
        "two phases: forget a record whose object is there",
        (Recovering, "_forget_gone", forget_all),
        seeds=20,
    ),
    mutant(
        "two phases: recover nothing",
        (Recovering, "recover", complete_nothing),
        seeds=40,
        hint=6,
    ),
)
