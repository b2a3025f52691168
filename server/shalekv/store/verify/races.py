"""Checks that exactly one of several creates of one name wins."""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.errors import ObjectNotFound, StoreUnavailable
from shalekv.store.api import Created, CreateOutcome, Exists, Unknown
from shalekv.store.verify.scratch import Scratch, StoreViolation, all_of
from shalekv.store.verify.verdict import CheckPassed

_NOTHING_MADE = None  # outcome of a create without an answer that certainly created nothing


async def second_create(scratch: Scratch) -> CheckPassed:
    """Check that a create of an existing name reports that, and replaces nothing."""
    await check_not_replaced(scratch)
    return CheckPassed()


async def check_not_replaced(scratch: Scratch) -> tuple[str, bool]:
    """Check that a second create does not replace an object.

    Returns the name of the object, and whether no create of it can still be in flight.
    """
    first, second = b"the first object", b"the second one, which must not be seen"
    name = await scratch.create_new("second", first)
    outcome, is_over = await scratch.create_until_answered(name, second, at=1)
    found = await read(scratch, name, at=1)
    if found != first:
        raise StoreViolation("create", name, "replaced an object that was there")
    if not isinstance(outcome, Exists):
        raise StoreViolation("create", name, "says that it made an object which was there before")
    return name, is_over


async def create_races(scratch: Scratch) -> CheckPassed:
    """Run rounds of parallel creates of one name; then check again that the winners' bytes stay."""
    winners = {}
    for number in range(scratch.effort.rounds):
        name = scratch.name(f"race-{number:06d}")
        winner = await race(scratch, name, at=number)
        if winner is not None:
            winners[name] = winner
    if not winners:
        raise StoreUnavailable(scratch.stores[0].url, "create", scratch.own, "no race was answered")
    for name, winner in winners.items():
        if await read(scratch, name, at=0) != winner:
            raise StoreViolation(
                "create", name, "a loser of the race replaced the winner's object later"
            )
    return CheckPassed(f"{len(winners):,} races of {scratch.effort.racers:,}")


async def race(scratch: Scratch, name: str, *, at: int) -> bytes | None:
    """Run one race for `name`; return the winner's bytes, or None if no create was answered."""
    bodies = [f"racer {racer} for {name}".encode() for racer in range(scratch.effort.racers)]
    outcomes = await all_of([_create(scratch, *racer, name) for racer in enumerate(bodies)])
    found: bytes | None
    try:
        found = (await scratch.reader(at).get(name)).data
    except ObjectNotFound:
        found = None
    problem = race_problem(outcomes, bodies, found)
    if problem:
        raise StoreViolation("create", name, problem)
    return found


async def _create(scratch: Scratch, racer: int, body: bytes, name: str) -> CreateOutcome | None:
    try:
        return await scratch.stores[racer % len(scratch.stores)].create(name, body)
    except StoreUnavailable:
        return _NOTHING_MADE


def race_problem(
    outcomes: Sequence[CreateOutcome | None], bodies: Sequence[bytes], found: bytes | None
) -> str:
    """Return what is wrong with a race with these outcomes, after which `found` was read; or ""."""
    winners = [at for at, outcome in enumerate(outcomes) if isinstance(outcome, Created)]
    racers = f"{len(outcomes)} creates at once"
    if len(winners) > 1:
        return f"{len(winners)} of {racers} were reported to have made the object"
    if found is None:
        if winners or any(isinstance(outcome, Exists) for outcome in outcomes):
            return f"after {racers} the object is said to exist, and is not there"
        return ""  # all outcomes are unknown, and there is no object: no race took place
    if found not in bodies:
        return f"after {racers} the object is none of theirs"
    holder = bodies.index(found)
    if winners and holder != winners[0]:
        return f"of {racers} one was reported to have made the object, which is that of another"
    if not isinstance(outcomes[holder], Created | Unknown):
        return f"of {racers} the one that made the object was reported to have lost"
    return ""


async def read(scratch: Scratch, name: str, *, at: int) -> bytes:
    """Read the object `name`, which must exist."""
    try:
        return (await scratch.reader(at).get(name)).data
    except ObjectNotFound:
        raise StoreViolation("get", name, "an object that exists is not found") from None
