"""Checks of the two stores of two-phase compare-and-swap: puts, copies, and one record per name."""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.errors import IllegalState, ObjectNotFound, StoreUnavailable
from shalekv.format.coding import crc32c
from shalekv.format.names import temporary_name
from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.store.two_phase.records import (
    Inserted,
    InsertOutcome,
    InsertUnknown,
    Occupied,
)
from shalekv.store.two_phase.store import TwoPhaseStore
from shalekv.store.verify.races import read
from shalekv.store.verify.scratch import Scratch, StoreViolation, all_of
from shalekv.store.verify.verdict import ONE_WINNER, WHOLE, Check, CheckPassed

UUID_BYTES = 16
_GIVEN = {"writer_epoch": "7"}


async def put_and_copy(scratch: Scratch) -> CheckPassed:
    """Check that puts and copies replace an existing object, whole and with metadata."""
    plain = _store(scratch, 0).plain
    source, destination = scratch.name("put"), scratch.name("copy")
    for data in (b"the first object", b"another one, which is to replace it", b"", b"the last"):
        await plain.put(source, data, _GIVEN)
        if await read(scratch, source, at=1) != data:
            raise StoreViolation("put", source, "did not replace the object that was there")
        await plain.copy(source, destination)
        if await read(scratch, destination, at=1) != data:
            raise StoreViolation("copy", destination, "is not what its source is")
    kept = [(await scratch.reader(1).get(name)).metadata for name in (source, destination)]
    if kept[0] != kept[1]:
        raise StoreViolation("copy", destination, "has other metadata than its source")
    await plain.delete([source])
    try:
        await plain.copy(source, destination)
    except ObjectNotFound:
        return CheckPassed()
    raise StoreViolation("copy", source, "an object that was deleted was copied")


async def record_races(scratch: Scratch) -> CheckPassed:
    """Run rounds of parallel inserts of one record, as `create_races` does with objects.

    The records never have objects: `Scratch.delete_all` has the store delete the records.
    """
    proven = 0
    for number in range(scratch.effort.rounds):
        destination = Destination(scratch.stores[0].url, scratch.name(f"record-{number:06d}"))
        proven += await _record_race(scratch, destination, at=number)
    if not proven:
        raise StoreUnavailable(_url(scratch), "insert", scratch.own, "no race was answered")
    return CheckPassed(f"{proven:,} races of {scratch.effort.racers:,}")


async def _record_race(scratch: Scratch, destination: Destination, *, at: int) -> bool:
    """Run one race; return False if no insert was answered."""
    drawn = [scratch.runtime.random.randbytes(UUID_BYTES) for _ in range(scratch.effort.racers)]
    records = [
        CreateRecord(destination, temporary_name(destination.name, uuid, crc32c(uuid)))
        for uuid in drawn
    ]
    outcomes = await all_of([_inserted(scratch, *racer) for racer in enumerate(records)])
    found = await _store(scratch, at).records.find(destination)
    problem = race_problem(outcomes, records, found)
    if problem:
        raise StoreViolation(
            "insert", f"the record of {destination.name} in {_url(scratch)}", problem
        )
    return found is not None


async def _inserted(scratch: Scratch, racer: int, record: CreateRecord) -> InsertOutcome:
    try:
        return await _store(scratch, racer).records.insert(record)
    except StoreUnavailable as error:
        return InsertUnknown(str(error))


def race_problem(
    outcomes: Sequence[InsertOutcome], records: Sequence[CreateRecord], found: CreateRecord | None
) -> str:
    """Return what is wrong with a race with these outcomes, after which `found` was read; or ""."""
    winners = [
        record
        for outcome, record in zip(outcomes, records, strict=True)
        if outcome in (Inserted(), Occupied(record))
    ]
    racers = f"{len(records)} inserts at once"
    if len(winners) > 1:
        return f"{len(winners)} of {racers} were reported to have made the record"
    if found is None:
        is_reported = winners or any(isinstance(outcome, Occupied) for outcome in outcomes)
        problem = f"after {racers} the record is said to exist, and is not there"
        return problem if is_reported else ""
    if found not in records:
        return f"after {racers} the record is none of theirs"
    if winners and winners[0] != found:
        return f"of {racers} one was reported to have made the record, which is that of another"
    occupants = {outcome.record for outcome in outcomes if isinstance(outcome, Occupied)}
    if occupants - {found}:
        return f"of {racers} one got another record than the one that is there"
    return ""


def _store(scratch: Scratch, number: int) -> TwoPhaseStore:
    store = scratch.stores[number % len(scratch.stores)]
    if not isinstance(store, TwoPhaseStore):
        raise IllegalState(f"{store.url} decides in two phases, but is no store that does")
    return store


def _url(scratch: Scratch) -> str:
    return _store(scratch, 0).records.url


TWO_PHASE_CHECKS: Sequence[Check] = (
    Check(
        "record-races",
        "of parallel inserts of one record exactly one wins, and everybody hears of it",
        ONE_WINNER,
        record_races,
    ),
    Check(
        "put-and-copy",
        "puts and copies replace what was there, whole",
        WHOLE,
        put_and_copy,
    ),
)
