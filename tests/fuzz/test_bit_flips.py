"""Bit flips in every object of a database are detected by the readers of the object.

Objects that are not read any more are listed here, with the reason. Every bit of an object that is
read is covered by a checksum.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache
from random import Random

import pytest

from shalekv.errors import CorruptObject, IllegalState, ObjectNotFound
from shalekv.format.names import manifest_name, parse_manifest_name
from shalekv.protocol.manifest import SYSTEM_LEVEL, Manifest
from tests.fuzz.budget import attempts, budgets, replayable
from tests.fuzz.database import (
    REFUSED,
    Answers,
    Made,
    Readers,
    StillPlace,
    answers,
    damage,
    judged,
    made,
    reachable,
    read_by,
)
from tests.fuzz.mutations import flipped
from tests.kit.engine.backups import verify

BUDGET_S = 1.0  # of each test
DATABASE, BACKUPS = "database", "backups"
both = pytest.mark.parametrize("where", [DATABASE, BACKUPS])

# Objects of the database that are not read when it is opened: why they are harmless.
UNREAD = {
    "manifest/": "a newer manifest has replaced it, and no snapshot names it",
    "wal/": "its commits are in the levels, and of every snapshot, too",
    "levels/": "it was merged into others, and no manifest that is read names it",
}


@dataclass(frozen=True, slots=True)
class Sound:
    """The database that is damaged again and again, and what is right."""

    made: Made
    answers: Answers
    current: Manifest


@cache
def sound() -> Sound:
    async def make() -> Sound:
        found = await made()
        right = await answers(found.place, found.snapshot_ids)
        return Sound(found, right, await found.place.manifest())

    return asyncio.run(make())


@pytest.fixture(autouse=True, scope="module")
def _made_before_any_loop_runs() -> None:
    sound()


# The last object of a kind, whose absence no later object shows: a store that loses it loses an
# edit of the manifest, or the last commit. Whether the answers stay the same:
LAST = {
    "manifest/00000000000000000026.manifest": True,  # it dropped a lease
    "wal/00000000000000000023.sst": False,
}


def place_of(where: str) -> StillPlace:
    return sound().made.place if where == DATABASE else sound().made.backups


def readers() -> Readers:
    return Readers.of(sound().made.place, sound().current)


async def test_the_database_has_every_kind_of_object() -> None:
    """The tests below change objects of all kinds, those that are read and others."""
    place = sound().made.place
    wanted = read_by(place, sound().current, sound().made.snapshot_ids)
    assert wanted < reachable(place, sound().current)
    for folder in UNREAD:
        assert any(name.startswith(folder) for name in wanted)
        assert any(name.startswith(folder) for name in {*place.names()} - wanted)
    levels = {info.level for info in sound().current.leveled_ssts}
    assert {0, SYSTEM_LEVEL} < levels
    assert sound().current.pending_loads
    assert len(sound().current.snapshots) >= 2
    assert any(name.startswith("backup_levels/") for name in sound().made.backups.names())
    assert any(name.startswith("backup_wal/") for name in sound().made.backups.names())
    assert all(len(rows) > 10 for rows in sound().answers.of_snapshots)
    assert await damage(place) == []


async def check_opened(place: StillPlace, what: str, *, is_read: bool) -> None:
    """Check that opening the database ends in a typed error, or that the answers are right."""
    found = await judged(place, sound().made.snapshot_ids)
    if isinstance(found, Answers):
        assert found == sound().answers, what
        assert not is_read, f"{what}: nobody has noticed"
    else:
        assert is_read, f"{what}: {found!r}"
        assert isinstance(found, CorruptObject), f"{what}: {found!r}"


@both
def test_flipped_bits_and_cuts_are_found_by_readers(where: str) -> None:
    """An object with any bit flipped, or without its end or its beginning, is refused."""
    place, read = place_of(where), readers().read
    names = list(place.names())
    for number, random in attempts(f"readers of the {where}", BUDGET_S):
        name = names[number % len(names)]
        data = place.data(name)
        bit, length = random.randrange(8 * len(data)), random.randrange(len(data))
        with replayable(number):
            assert read(name, data) != REFUSED, name
            assert read(name, flipped(data, bit)) == REFUSED, f"bit {bit} of {name}"
            for cut in (data[:length], data[length + 1 :], data + b"\0"):
                assert read(name, cut) == REFUSED, (name, length)


@pytest.mark.soak
@pytest.mark.timeout(900)
@both
def test_every_flipped_bit_is_found_by_its_readers(where: str) -> None:
    """Every bit of every object: there is none that no checksum covers."""
    place, read = place_of(where), readers().read
    for name in place.names():
        data = place.data(name)
        for bit in range(8 * len(data)):
            assert read(name, flipped(data, bit)) == REFUSED, f"bit {bit} of {name}"


def flip(where: str, number: int, random: Random) -> tuple[StillPlace, str, int]:
    """Return a copy in which one bit is flipped, with its object and position."""
    place = place_of(where)
    names = list(place.names())
    name = names[number % len(names)]
    data = place.data(name)
    bit = random.randrange(8 * len(data))
    copy = place.copy()
    copy.overwrite(name, flipped(data, bit))
    return copy, name, bit


async def check_finding(number: int, random: Random) -> None:
    """`fsck --deep` names the object of a flip that a reader would meet, and no other."""
    changed, name, bit = flip(DATABASE, number, random)
    found = await damage(changed)
    is_wanted = name in reachable(place_of(DATABASE), sound().current)
    assert (name in {each.name for each in found}) == is_wanted, (name, bit, found)


async def check_opening(number: int, random: Random) -> None:
    """Damage of what is read ends in a typed error, and of what is not it changes no answer."""
    changed, name, bit = flip(DATABASE, number, random)
    wanted = read_by(place_of(DATABASE), sound().current, sound().made.snapshot_ids)
    await check_opened(changed, f"bit {bit} of {name}", is_read=name in wanted)


async def check_backup(number: int, random: Random) -> None:
    """The verification of backups names the object, wherever its bits are flipped."""
    changed, name, bit = flip(BACKUPS, number, random)
    (found,) = await verify(changed)
    assert found.name == name, bit


CHECKS = {"fsck": check_finding, "opening": check_opening, "verification": check_backup}


@budgets
@pytest.mark.parametrize("check", CHECKS)
async def test_flipped_bits_are_found(check: str, times: int) -> None:
    """They are found when the database is opened or checked, or its backups are verified."""
    for number, random in attempts(check, times * BUDGET_S):
        with replayable(number):
            await CHECKS[check](number, random)


@both
def test_swapped_objects_are_found(where: str) -> None:
    """An intact object of the same kind, under the name of another one, is refused."""
    place, read = place_of(where), readers().read
    for name in place.names():
        folder = name.partition("/")[0]
        for other in place.names():
            if other != name and other.startswith(f"{folder}/"):
                assert read(name, place.data(other)) == REFUSED, (name, other)


async def test_a_stale_manifest_under_a_new_name() -> None:
    """An older state that is put in front of the current one is not taken for a newer one."""
    place = sound().made.place
    newest = manifest_name(sound().current.manifest_id + 1)
    for name in place.names():
        if parse_manifest_name(name) is not None:
            copy = place.copy()
            copy.add(newest, place.data(name))
            await check_opened(copy, f"{name} as {newest}", is_read=True)
            assert newest in {each.name for each in await damage(copy)}


async def test_missing_objects() -> None:
    """An object that is gone is missed, but for the last one of a kind, which nothing names."""
    place = sound().made.place
    wanted = read_by(place, sound().current, sound().made.snapshot_ids)
    for name in place.names():
        copy = place.copy()
        copy.lose(name)
        found = await judged(copy, sound().made.snapshot_ids)
        if name in LAST:
            assert isinstance(found, Answers), name
            assert (found == sound().answers) == LAST[name], name
        elif name in wanted:
            assert isinstance(found, CorruptObject | ObjectNotFound | IllegalState), (name, found)
            assert name in str(found)
        else:
            assert found == sound().answers, name
        if name in reachable(place, sound().current) and name not in LAST:
            assert name in {each.name for each in await damage(copy)}, name
