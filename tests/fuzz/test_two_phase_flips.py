"""Creates in two phases that were interrupted, and whose objects and records are changed then.

A temporary object is copied as it is, and read under the name that it gets. Records have no
checksum of ours: a transactional store has its own. What is in them can keep a database from being
opened, or make a name free, and never changes what is read.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import CorruptObject
from shalekv.format.coding import crc32c
from shalekv.format.names import manifest_name, temporary_name
from shalekv.protocol.manifest import CasMode
from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.runtime import Runtime
from shalekv.store.api import ObjectStore
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.fuzz.budget import attempts, replayable
from tests.fuzz.database import NOW_MS, Answers, StillPlace, answers, fill, judged, roles_at
from tests.fuzz.mutations import flipped
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.memory_records import MemoryRecords, Table

UUID = b"of an attempt..."
URL = "memory://unnamed"
BUDGET_S = 1.5


class TwoPhasePlace(StillPlace):
    """A place where records decide who has created an object."""

    def __init__(self, objects: MemoryObjects | None = None, table: Table | None = None) -> None:
        super().__init__(objects)
        self.table: Table = {} if table is None else table

    def store(self) -> ObjectStore:
        runtime = Runtime(LoopClock(), Random(5), InlineWorkers())
        plain = MemoryStore(lambda: NOW_MS, objects=self.objects)
        return TwoPhaseStore(plain, MemoryRecords(table=self.table), runtime)

    def copy(self) -> TwoPhasePlace:
        return TwoPhasePlace(super().copy().objects, dict(self.table))


@dataclass(frozen=True, slots=True)
class Sound:
    """A database, and the same with the create of its last WAL object interrupted."""

    place: TwoPhasePlace
    interrupted: TwoPhasePlace
    destination: Destination
    source: str
    answers: Answers
    answers_before: Answers  # as if the create had never begun


async def make() -> Sound:
    """Make it by a writer that dies between the record and the copy."""
    place = TwoPhasePlace()
    async with roles_at(place, 9) as roles:
        await roles.create()
        async with roles.writing() as writer:
            await fill(writer, b"low", 8)
    right = await answers(place, ())
    manifest = await place.manifest()
    assert manifest.cas_mode is CasMode.TWO_PHASE
    name = max(name for name in place.names() if name.startswith("wal/"))
    data = place.data(name)
    destination = Destination(URL, name)
    interrupted, source = place.copy(), temporary_name(name, UUID, crc32c(data))
    interrupted.lose(name)
    del interrupted.table[destination]
    before = await answers(interrupted, ())
    interrupted.add(source, data)
    interrupted.table[destination] = CreateRecord(destination, source)
    return Sound(place, interrupted, destination, source, right, before)


@cache
def sound() -> Sound:
    return asyncio.run(make())


@pytest.fixture(autouse=True, scope="module")
def _made_before_any_loop_runs() -> None:
    sound()


async def test_an_interrupted_create_is_completed() -> None:
    """Opening the database completes it, and answers what was acknowledged."""
    assert await answers(sound().interrupted, ()) == sound().answers


async def check_temporary(random: Random) -> None:
    """A temporary object with a bit flipped is completed, and then refused by its new name."""
    data = sound().interrupted.data(sound().source)
    place = sound().interrupted.copy()
    place.overwrite(sound().source, flipped(data, random.randrange(8 * len(data))))
    found = await judged(place, ())
    assert isinstance(found, CorruptObject), found
    assert found.name == sound().destination.name


def changed_record(record: CreateRecord, random: Random) -> CreateRecord:
    """Return the record with one field changed."""
    if record.is_committed and random.random() < 0.2:
        return replace(record, is_committed=False)
    source, name = record.source.encode(), record.destination.name.encode()
    if random.random() < 0.5:
        bit = random.randrange(8 * len(source))
        return replace(record, source=flipped(source, bit).decode("latin-1"))
    bit = random.randrange(8 * len(name))
    destination = replace(record.destination, name=flipped(name, bit).decode("latin-1"))
    return replace(record, destination=destination)


async def check_record(place: TwoPhasePlace, name: str, random: Random) -> None:
    """A changed record never makes anybody read something else: an error, the answers, or a slot
    that is free.

    The open record is the only trace of where the bytes of its object are. Without it, the object
    was never created.
    """
    record = place.table[Destination(URL, name)]
    copy, changed = place.copy(), changed_record(record, random)
    del copy.table[record.destination]
    copy.table[changed.destination] = changed
    # A record of a manifest that is not there makes opening try again until its end.
    found = await judged(copy, (), open_timeout_ms=1_000)
    if isinstance(found, Answers) and found != sound().answers:
        assert place is sound().interrupted, changed
        assert found == sound().answers_before, changed


async def test_flipped_bits() -> None:
    """A flipped bit of a temporary object, its open record, or a committed record is found."""
    newest = manifest_name((await sound().place.manifest()).manifest_id)
    records = [
        (sound().interrupted, sound().destination.name),
        (sound().place, sound().destination.name),
        (sound().place, newest),
    ]
    for number, random in attempts("two phases", BUDGET_S):
        with replayable(number):
            if number % 4 == 3:
                await check_temporary(random)
            else:
                await check_record(*records[number % 4], random)
