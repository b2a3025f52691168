"""The checks of a store: whoever keeps all passes, and whoever breaks one promise is told which."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.settings import StoreSettings
from shalekv.store.memory import MemoryObjects
from shalekv.store.two_phase.memory import MemoryRecords
from shalekv.store.verify.scratch import FOLDER
from shalekv.store.verify.verdict import Passed, Told, Unanswered
from shalekv.store.verify.verifying import verification
from tests.kit import careless_stores as careless
from tests.kit.careless_stores import Careful, Kind
from tests.kit.inline_runtime import gathered, inline_runtime
from tests.kit.store import FaultyStore, Request
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
async def test_careless_stores_fail(kind: Kind, check: str, guarantee: str) -> None:
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
async def test_nothing_else_fails(kind: Kind, checks: set[str]) -> None:
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
async def test_two_phases_fail(kind: Kind, records: type[MemoryRecords], check: str) -> None:
    """Records that two may win, and puts and copies that do not replace, are found."""
    trial = Tried(two_phases(kind, records))
    await trial.run()
    assert check in trial.failed, trial.verdicts


async def test_what_was_made_is_deleted_when_it_is_cancelled() -> None:
    """Checks that are stopped half-way leave nothing in the store."""
    objects, arrived = MemoryObjects(), asyncio.Event()

    async def hold(request: Request) -> None:
        if request.operation == "create" and "race-000003" in request.name:
            arrived.set()
            await asyncio.Event().wait()

    trial = Tried(lambda: FaultyStore(Careful(objects), after=hold))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(trial.run())
        await arrived.wait()
        assert await gathered(Careful(objects).list(FOLDER)) != []
        running.cancel()
    assert await gathered(Careful(objects).list(FOLDER)) == []
    assert trial.left == []


@pytest.mark.parametrize("operation", ["create", "delete"])
async def test_a_store_that_does_not_answer_is_not_called_unfit(operation: str) -> None:
    """What could not be asked is no failure of the store, and no success either; what cannot be
    deleted is named.
    """
    objects = MemoryObjects()

    def open_one() -> FaultyStore:
        store = FaultyStore(Careful(objects))
        store.fail(operation, times=1_000_000)
        return store

    trial = Tried(open_one)
    await trial.run()
    assert trial.failed == set()
    unanswered = {name for name, each in trial.verdicts.items() if isinstance(each, Unanswered)}
    there = {info.name for info in await gathered(Careful(objects).list(FOLDER))}
    if operation == "create":
        assert unanswered >= {"create-races", "second-create"}
        assert not there
    else:
        assert "read-after-delete" in unanswered
        assert there
        assert there <= set(trial.left)


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
