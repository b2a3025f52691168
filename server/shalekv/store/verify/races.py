"""Whether of several creates of one name exactly one wins."""

from __future__ import annotations

from collections.abc import Sequence

from shalekv.errors import ObjectNotFound, StoreUnavailable
from shalekv.store.api import Created, CreateOutcome, Exists, Unknown
from shalekv.store.verify.scratch import NotKept, Scratch, all_of
from shalekv.store.verify.verdict import CheckPassed

_NOTHING_MADE = None  # the outcome of a create that was not answered, but certainly made nothing


async def second_create(ground: Scratch) -> CheckPassed:
    """A create of a name that an object has is told so, and replaces nothing."""
    await refused(ground)
    return CheckPassed()


async def refused(ground: Scratch) -> tuple[str, bool]:
    """The name of an object that a second create did not replace; whether none is under way."""
    first, second = b"the first object", b"the second one, which must not be seen"
    name = await ground.created("second", first)
    outcome, is_over = await ground.answered(name, second, at=1)
    found = await read(ground, name, at=1)
    if found != first:
        raise NotKept("create", name, "replaced an object that was there")
    if not isinstance(outcome, Exists):
        raise NotKept("create", name, "says that it made an object which was there before")
    return name, is_over


async def create_races(ground: Scratch) -> CheckPassed:
    """Rounds of creates of one name at once; then all winners are looked at again."""
    winners = {}
    for number in range(ground.effort.rounds):
        name = ground.name(f"race-{number:06d}")
        winner = await race(ground, name, at=number)
        if winner is not None:
            winners[name] = winner
    if not winners:
        raise StoreUnavailable(ground.stores[0].url, "create", ground.own, "no race was answered")
    for name, winner in winners.items():
        if await read(ground, name, at=0) != winner:
            raise NotKept("create", name, "a loser of the race replaced the winner's object later")
    return CheckPassed(f"{len(winners):,} races of {ground.effort.racers:,}")


async def race(ground: Scratch, name: str, *, at: int) -> bytes | None:
    """One race for `name`: what the winner wrote; None if nobody was answered."""
    bodies = [f"racer {racer} for {name}".encode() for racer in range(ground.effort.racers)]
    outcomes = await all_of([_raced(ground, *racer, name) for racer in enumerate(bodies)])
    found: bytes | None
    try:
        found = (await ground.reader(at).get(name)).data
    except ObjectNotFound:
        found = None
    problem = judged(outcomes, bodies, found)
    if problem:
        raise NotKept("create", name, problem)
    return found


async def _raced(ground: Scratch, racer: int, body: bytes, name: str) -> CreateOutcome | None:
    try:
        return await ground.stores[racer % len(ground.stores)].create(name, body)
    except StoreUnavailable:
        return _NOTHING_MADE


def judged(
    outcomes: Sequence[CreateOutcome | None], bodies: Sequence[bytes], found: bytes | None
) -> str:
    """What is wrong with a race in which these were told that, and then `found` was read; or ""."""
    told = [at for at, outcome in enumerate(outcomes) if isinstance(outcome, Created)]
    racers = f"{len(outcomes)} creates at once"
    if len(told) > 1:
        return f"{len(told)} of {racers} were told that they made the object"
    if found is None:
        if told or any(isinstance(outcome, Exists) for outcome in outcomes):
            return f"after {racers} the object is said to exist, and is not there"
        return ""  # nobody knows, and nothing is there: no race
    if found not in bodies:
        return f"after {racers} the object is none of theirs"
    holder = bodies.index(found)
    if told and holder != told[0]:
        return f"of {racers} one was told that it made the object, which is that of another"
    if not isinstance(outcomes[holder], Created | Unknown):
        return f"of {racers} the one whose object it is was told that it is not"
    return ""


async def read(ground: Scratch, name: str, *, at: int) -> bytes:
    """The object `name`, which must be there."""
    try:
        return (await ground.reader(at).get(name)).data
    except ObjectNotFound:
        raise NotKept("get", name, "an object that exists is not found") from None
