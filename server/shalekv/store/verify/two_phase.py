"""What two-phase compare-and-swap asks of its two stores: puts, copies, and one record per name."""

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
from shalekv.store.verify.scratch import NotKept, Scratch, all_of
from shalekv.store.verify.verdict import ONE_WINNER, WHOLE, Check, CheckPassed

UUID_BYTES = 16
_GIVEN = {"writer_epoch": "7"}


async def put_and_copy(ground: Scratch) -> CheckPassed:
    """A put replaces what was there, and so does a copy, which is the whole of its source."""
    plain = _store(ground, 0).plain
    source, destination = ground.name("put"), ground.name("copy")
    for data in (b"the first object", b"another one, which is to replace it", b"", b"the last"):
        await plain.put(source, data, _GIVEN)
        if await read(ground, source, at=1) != data:
            raise NotKept("put", source, "did not replace the object that was there")
        await plain.copy(source, destination)
        if await read(ground, destination, at=1) != data:
            raise NotKept("copy", destination, "is not what its source is")
    kept = [(await ground.reader(1).get(name)).metadata for name in (source, destination)]
    if kept[0] != kept[1]:
        raise NotKept("copy", destination, "has other metadata than its source")
    await plain.delete([source])
    try:
        await plain.copy(source, destination)
    except ObjectNotFound:
        return CheckPassed()
    raise NotKept("copy", source, "an object that was deleted was copied")


async def record_races(ground: Scratch) -> CheckPassed:
    """Rounds of inserts of one record at once, as `create_races` does it with objects.

    No object ever belongs to them: `Scratch.delete_all` has the store forget the records.
    """
    proven = 0
    for number in range(ground.effort.rounds):
        destination = Destination(ground.stores[0].url, ground.name(f"record-{number:06d}"))
        proven += await _record_race(ground, destination, at=number)
    if not proven:
        raise StoreUnavailable(_url(ground), "insert", ground.own, "no race was answered")
    return CheckPassed(f"{proven:,} races of {ground.effort.racers:,}")


async def _record_race(ground: Scratch, destination: Destination, *, at: int) -> bool:
    """One race; False if nobody was answered."""
    drawn = [ground.runtime.random.randbytes(UUID_BYTES) for _ in range(ground.effort.racers)]
    records = [
        CreateRecord(destination, temporary_name(destination.name, uuid, crc32c(uuid)))
        for uuid in drawn
    ]
    outcomes = await all_of([_inserted(ground, *racer) for racer in enumerate(records)])
    found = await _store(ground, at).records.find(destination)
    problem = judged(outcomes, records, found)
    if problem:
        raise NotKept("insert", f"the record of {destination.name} in {_url(ground)}", problem)
    return found is not None


async def _inserted(ground: Scratch, racer: int, record: CreateRecord) -> InsertOutcome:
    try:
        return await _store(ground, racer).records.insert(record)
    except StoreUnavailable as error:
        return InsertUnknown(str(error))


def judged(
    outcomes: Sequence[InsertOutcome], records: Sequence[CreateRecord], found: CreateRecord | None
) -> str:
    """What is wrong with a race in which these were told that, and then `found` was read; or ""."""
    told = [
        record
        for outcome, record in zip(outcomes, records, strict=True)
        if outcome in (Inserted(), Occupied(record))
    ]
    racers = f"{len(records)} inserts at once"
    if len(told) > 1:
        return f"{len(told)} of {racers} were told that the record is theirs"
    if found is None:
        is_said = told or any(isinstance(outcome, Occupied) for outcome in outcomes)
        return f"after {racers} the record is said to exist, and is not there" if is_said else ""
    if found not in records:
        return f"after {racers} the record is none of theirs"
    if told and told[0] != found:
        return f"of {racers} one was told that the record is its own, which is that of another"
    occupants = {outcome.record for outcome in outcomes if isinstance(outcome, Occupied)}
    if occupants - {found}:
        return f"of {racers} one was told of another record than the one that is there"
    return ""


def _store(ground: Scratch, number: int) -> TwoPhaseStore:
    store = ground.stores[number % len(ground.stores)]
    if not isinstance(store, TwoPhaseStore):
        raise IllegalState(f"{store.url} decides in two phases, but is no store that does")
    return store


def _url(ground: Scratch) -> str:
    return _store(ground, 0).records.url


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
