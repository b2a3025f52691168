"""The checks of a store: whoever keeps all passes, and whoever breaks one promise is told which."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from shalekv.errors import StoreUnavailable
from shalekv.settings import StoreSettings
from shalekv.store.api import NO_METADATA, CreateOutcome
from shalekv.store.local import LocalStore
from shalekv.store.memory import MemoryObjects
from shalekv.store.two_phase.memory import MemoryRecords
from shalekv.store.verify.scratch import FOLDER
from shalekv.store.verify.verdict import Passed, Told, Unanswered
from shalekv.store.verify.verifying import verification
from tests.kit import careless_stores as careless
from tests.kit.careless_stores import Careful
from tests.kit.inline_runtime import gathered, inline_runtime
from tests.unit.store.verify.trying import EFFORT, Tried, tried, two_phases


async def test_a_careful_store_passes() -> None:
    """A store that keeps all of it passes every check, and nothing is left in it."""
    objects = MemoryObjects()
    trial = await tried(Careful, objects)
    assert all(isinstance(verdict, Passed) for verdict in trial.verdicts.values()), trial.verdicts
    assert len(trial.verdicts) == 13
    assert trial.left == []
    assert await gathered(Careful(objects).list(FOLDER)) == []
    assert await gathered(Careful(objects).list("levels/")) == []


def files_in(folder: Path) -> list[str]:
    """All files below it."""
    return [path.name for path in folder.rglob("*") if path.is_file()]


async def test_the_local_store_passes(tmp_path: Path) -> None:
    """The store in a folder passes; that it keeps no metadata is told, and allowed."""
    runtime = inline_runtime(1)
    trial = Tried(lambda: LocalStore(tmp_path, runtime))
    await trial.run()
    assert trial.failed == set()
    assert isinstance(trial.verdicts.pop("metadata"), Told)
    assert all(isinstance(verdict, Passed) for verdict in trial.verdicts.values())
    assert files_in(tmp_path) == ["clock"]


@pytest.mark.parametrize(
    ("kind", "check", "guarantee"),
    [
        (careless.IgnoresConditions, "create-races", "one winner"),
        (careless.IgnoresConditions, "second-create", "one winner"),
        (careless.IgnoresConditions, "large-object", "bytes as they were written"),
        (careless.ReplacesAndSaysSo, "create-races", "one winner"),
        (careless.ReplacesAndSaysSo, "second-create", "one winner"),
        (careless.LooksThenWrites, "create-races", "one winner"),
        (careless.ReadsTooEarly, "read-after-write", "durability"),
        (careless.ReadsTheDeleted, "read-after-delete", "deletion that lasts"),
        (careless.ReadsTheDeleted, "list-after-write", "a log without gaps"),
        (careless.ListsTooEarly, "list-after-write", "a log without gaps"),
        (careless.ListsBackwards, "list-order", "one current manifest"),
        (careless.ListsBackwards, "list-paging", "a log without gaps"),
        (careless.ListsByLetters, "list-order", "one current manifest"),
        (careless.ListsOnePage, "list-paging", "a log without gaps"),
        (careless.ListsAll, "list-start-after", "one current manifest"),
        (careless.CutsRanges, "ranged-reads", "bytes as they were written"),
        (careless.HidesTheEmpty, "empty-object", "one winner"),
        (careless.CutsTheLarge, "large-object", "bytes as they were written"),
        (careless.ChangesMetadata, "metadata", "bytes as they were written"),
        (careless.TellsNoTime, "store-clock", "protection by snapshots"),
        (careless.StepsBack, "store-clock", "protection by snapshots"),
        (careless.GoesBack, "store-clock", "protection by snapshots"),
        (careless.DatesByAnotherClock, "store-clock", "protection by snapshots"),
    ],
)
async def test_careless_stores_fail(kind: type[Careful], check: str, guarantee: str) -> None:
    """A store that breaks a promise fails the check of it, by which the lost guarantee is told."""
    trial = await tried(kind)
    assert check in trial.failed, trial.verdicts
    assert trial.lost[check].startswith(guarantee)


@pytest.mark.parametrize(
    ("kind", "checks"),
    [
        (careless.LooksThenWrites, {"create-races"}),
        (careless.ListsByLetters, {"list-order"}),
        (careless.ListsOnePage, {"list-paging"}),
        (careless.CutsTheLarge, {"large-object"}),
        (careless.TellsNoTime, {"store-clock"}),
    ],
)
async def test_nothing_else_fails(kind: type[Careful], checks: set[str]) -> None:
    """A store fails the checks of what it breaks, and passes the others."""
    assert (await tried(kind)).failed == checks


async def test_lost_metadata_is_told() -> None:
    """A store may lose metadata: it is told, and fails nothing."""
    trial = await tried(careless.LosesMetadata)
    assert trial.failed == set()
    assert isinstance(trial.verdicts["metadata"], Told)


async def test_two_phases_pass_without_conditions() -> None:
    """In two phases a store that ignores conditions passes, and no object or record is left."""
    open_one = two_phases(careless.IgnoresConditions, MemoryRecords)
    trial = Tried(open_one)
    await trial.run()
    assert trial.failed == set(), trial.verdicts
    assert isinstance(trial.verdicts["record-races"], Passed)
    assert trial.left == []
    store = open_one()
    assert await gathered(store.list(FOLDER)) == []
    assert await gathered(store.records.list(store.url, uncommitted_only=False)) == []


@pytest.mark.parametrize(
    ("kind", "records", "check"),
    [
        (Careful, careless.InsertsTwice, "record-races"),
        (careless.KeepsTheFirst, MemoryRecords, "put-and-copy"),
        (careless.CopiesBytesAlone, MemoryRecords, "put-and-copy"),
    ],
)
async def test_two_phases_fail(
    kind: type[Careful], records: type[MemoryRecords], check: str
) -> None:
    """Records that two may win, and puts and copies that do not replace, are found."""
    trial = Tried(two_phases(kind, records))
    await trial.run()
    assert check in trial.failed, trial.verdicts


class Held(Careful):
    """Keeps the second create of a race waiting, and tells when it does."""

    def __init__(self, objects: MemoryObjects, arrived: asyncio.Event) -> None:
        super().__init__(objects)
        self._arrived = arrived

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        outcome = await super().create(name, data, metadata)
        if "race-000003" in name:
            self._arrived.set()
            await asyncio.Event().wait()
        return outcome


async def test_what_was_made_is_deleted_when_it_is_cancelled() -> None:
    """Whoever stops the checks half-way leaves nothing in the store."""
    objects, arrived = MemoryObjects(), asyncio.Event()
    trial = Tried(lambda: Held(objects, arrived))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(trial.run())
        await arrived.wait()
        assert await gathered(Careful(objects).list(FOLDER)) != []
        running.cancel()
    assert await gathered(Careful(objects).list(FOLDER)) == []
    assert trial.left == []


class NeverDeletes(Careful):
    """Refuses to."""

    async def delete(self, names: object) -> None:
        del names
        raise StoreUnavailable(self.url, "delete", FOLDER, "no permission")


async def test_what_cannot_be_deleted_is_told() -> None:
    """Of a store that deletes nothing, all that was left in it is named."""
    objects = MemoryObjects()
    trial = await tried(NeverDeletes, objects)
    assert isinstance(trial.verdicts["read-after-delete"], Unanswered)
    there = {info.name for info in await gathered(Careful(objects).list(FOLDER))}
    assert there
    assert there <= set(trial.left)


class Down(Careful):
    """Does not answer."""

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        del data, metadata
        raise StoreUnavailable(self.url, "create", name, "no answer")


async def test_a_store_that_does_not_answer_is_not_called_unfit() -> None:
    """What could not be asked is no failure of the store, and no success either."""
    trial = await tried(Down)
    assert trial.failed == set()
    assert isinstance(trial.verdicts["create-races"], Unanswered)
    assert isinstance(trial.verdicts["second-create"], Unanswered)


async def test_runs_do_not_disturb_each_other() -> None:
    """Two runs on one store at once both find it fit."""
    objects = MemoryObjects()
    trials = [Tried(lambda: Careful(objects)), Tried(lambda: Careful(objects))]

    async def run(trial: Tried, seed: int) -> None:
        runtime = inline_runtime(seed)
        async with verification(
            trial.open_one, runtime, StoreSettings(), EFFORT, trial.left.extend
        ) as verifying:
            async for finding in verifying.findings():
                trial.verdicts[finding.check.name] = finding.verdict
                await asyncio.sleep(0)

    await asyncio.gather(*(run(trial, seed) for seed, trial in enumerate(trials)))
    assert [trial.failed for trial in trials] == [set(), set()]
    assert [trial.left for trial in trials] == [[], []]
