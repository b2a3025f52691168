"""The checks of a store, all of them and the short form before a database is created.

A store that fulfils all requirements passes; for one that violates any, the check that failed says
which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shalekv.errors import StoreUnfit
from shalekv.format import names
from shalekv.format.names import VERIFY_FOLDER
from shalekv.server.database import create_database
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore, RequestKind
from shalekv.store.memory import MemoryObjects
from shalekv.store.two_phase.store import TwoPhaseStore
from shalekv.store.verify.scratch import Effort
from shalekv.store.verify.verdict import CheckFailed, CheckPassed, NotOffered, Unanswered, Verdict
from shalekv.store.verify.verify import check_fit, verification
from tests.kit import careless_stores as careless
from tests.kit.careless_stores import Careful, Kind
from tests.kit.inline_runtime import gathered, inline_runtime
from tests.kit.memory_records import MemoryRecords, Table
from tests.kit.scripted_store import Fate, ScriptedStore
from tests.kit.store import FaultyStore, Lost, Request

EFFORT = Effort(racers=4, rounds=5, large_object_bytes=3 << 20)
REQUESTS_MAX = 25  # of the short form


class Tried:
    """A store, and the results of all checks of it."""

    def __init__(self, open_one: Callable[[], ObjectStore]) -> None:
        self.open_one = open_one
        self.verdicts: dict[str, Verdict] = {}
        self.lost: dict[str, str] = {}
        self.left: list[str] = []

    @property
    def failed(self) -> set[str]:
        return {name for name, verdict in self.verdicts.items() if isinstance(verdict, CheckFailed)}

    async def run(self, seed: int = 1) -> None:
        async with verification(
            self.open_one, inline_runtime(seed), StoreSettings(), EFFORT, self.left.extend
        ) as verifying:
            async for finding in verifying.findings():
                await asyncio.sleep(0)
                self.verdicts[finding.check.name] = finding.verdict
                self.lost[finding.check.name] = finding.check.lost


async def tried(kind: Kind, objects: MemoryObjects | None = None) -> Tried:
    shared = MemoryObjects() if objects is None else objects
    checked = Tried(lambda: kind(shared))
    await checked.run()
    return checked


def two_phases(kind: Kind, records: type[MemoryRecords]) -> Callable[[], TwoPhaseStore]:
    objects, table, runtime = MemoryObjects(), Table(), inline_runtime(2)
    return lambda: TwoPhaseStore(kind(objects), records(table=table), runtime)


async def test_a_careful_store_passes() -> None:
    """A store that fulfils all requirements passes every check, and nothing is left in it."""
    objects = MemoryObjects()
    checked = await tried(Careful, objects)
    assert all(isinstance(each, CheckPassed) for each in checked.verdicts.values()), (
        checked.verdicts
    )
    assert len(checked.verdicts) == 13
    assert checked.left == []
    assert await gathered(Careful(objects).list(VERIFY_FOLDER)) == []
    assert await gathered(Careful(objects).list("levels/")) == []


WINNER, GAPS, CURRENT = "one winner", "a log without gaps", "one current manifest"
BYTES, DATES = "bytes as they were written", "protection by snapshots"


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        (
            careless.IgnoresConditions,
            {"create-races": WINNER, "second-create": WINNER, "large-object": BYTES},
        ),
        (careless.ReplacesAndSaysSo, {"create-races": WINNER, "second-create": WINNER}),
        (careless.HeadThenPut, {"create-races": WINNER}),
        (careless.ReadsTooEarly, {"read-after-write": "durability"}),
        (
            careless.ReadsTheDeleted,
            {"read-after-delete": "deletion that lasts", "list-after-write": GAPS},
        ),
        (careless.ListsTooEarly, {"list-after-write": GAPS}),
        (careless.ListsBackwards, {"list-order": CURRENT, "list-paging": GAPS}),
        (careless.ListsByLetters, {"list-order": CURRENT}),
        (careless.ListsOnePage, {"list-paging": GAPS}),
        (careless.ListsAll, {"list-start-after": CURRENT}),
        (careless.CutsRanges, {"ranged-reads": BYTES}),
        (careless.HidesTheEmpty, {"empty-object": WINNER}),
        (careless.CutsTheLarge, {"large-object": BYTES}),
        (careless.ChangesMetadata, {"metadata": BYTES}),
        (careless.HasNoClock, {"store-clock": DATES}),
        (careless.StepsBack, {"store-clock": DATES}),
        (careless.GoesBack, {"store-clock": DATES}),
        (careless.DatesByAnotherClock, {"store-clock": DATES}),
    ],
)
async def test_careless_stores_fail(kind: Kind, lost: dict[str, str]) -> None:
    """A store that violates a requirement fails its check, which names the lost guarantee. One that
    violates a single requirement passes the other checks.
    """
    checked = await tried(kind)
    assert lost.keys() <= checked.failed, checked.verdicts
    for check, guarantee in lost.items():
        assert checked.lost[check].startswith(guarantee)
    if kind in BREAKS_ONE:
        assert checked.failed == lost.keys()


BREAKS_ONE = {
    careless.HeadThenPut,
    careless.ListsByLetters,
    careless.ListsOnePage,
    careless.CutsTheLarge,
    careless.HasNoClock,
}


async def test_lost_metadata_is_reported() -> None:
    """A store may drop metadata: this is reported, and fails no check."""
    checked = await tried(careless.LosesMetadata)
    assert checked.failed == set()
    assert isinstance(checked.verdicts["metadata"], NotOffered)


async def test_two_phases_pass_without_conditions() -> None:
    """In two-phase mode a store that ignores conditions passes, and no object or record is left."""
    open_one = two_phases(careless.IgnoresConditions, MemoryRecords)
    checked = Tried(open_one)
    await checked.run()
    assert checked.failed == set(), checked.verdicts
    assert isinstance(checked.verdicts["record-races"], CheckPassed)
    assert checked.left == []
    store = open_one()
    assert await gathered(store.list(VERIFY_FOLDER)) == []
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
    """Records that two processes can win, and puts and copies that do not replace, are detected."""
    checked = Tried(two_phases(kind, records))
    await checked.run()
    assert check in checked.failed, checked.verdicts


async def test_what_was_made_is_deleted_when_it_is_cancelled() -> None:
    """Checks that are cancelled half-way leave nothing in the store."""
    objects, arrived = MemoryObjects(), asyncio.Event()

    async def hold(request: Request) -> None:
        if request.operation == "create" and "race-000003" in request.name:
            arrived.set()
            await asyncio.Event().wait()

    checked = Tried(lambda: FaultyStore(Careful(objects), after=hold))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(checked.run())
        await arrived.wait()
        assert await gathered(Careful(objects).list(VERIFY_FOLDER)) != []
        running.cancel()
    assert await gathered(Careful(objects).list(VERIFY_FOLDER)) == []
    assert checked.left == []


@pytest.mark.parametrize("operation", ["create", "delete"])
async def test_a_store_that_does_not_answer_is_not_called_unfit(operation: str) -> None:
    """A check without an answer is neither a failure nor a success; objects that cannot be deleted
    are named.
    """
    objects = MemoryObjects()

    def open_one() -> FaultyStore:
        store = FaultyStore(Careful(objects))
        store.fail(operation, times=1_000_000)
        return store

    checked = Tried(open_one)
    await checked.run()
    assert checked.failed == set()
    unanswered = {name for name, each in checked.verdicts.items() if isinstance(each, Unanswered)}
    there = {info.name for info in await gathered(Careful(objects).list(VERIFY_FOLDER))}
    if operation == "create":
        assert unanswered >= {"create-races", "second-create"}
        assert not there
    else:
        assert "read-after-delete" in unanswered
        assert there
        assert there <= set(checked.left)


async def test_runs_do_not_disturb_each_other() -> None:
    """Two runs on one store at once both find it fit."""
    objects = MemoryObjects()
    both = [Tried(lambda: Careful(objects)), Tried(lambda: Careful(objects))]
    await asyncio.gather(*(checked.run(seed) for seed, checked in enumerate(both)))
    assert [checked.failed for checked in both] == [set(), set()]
    assert [checked.left for checked in both] == [[], []]


async def test_what_it_costs() -> None:
    """A fit store passes with a few requests, and nothing is left in it."""
    store = Careful(MemoryObjects())
    await check_fit(store, inline_runtime(), StoreSettings())
    assert store.sent.total <= REQUESTS_MAX
    assert store.sent.by_kind[RequestKind.WRITE] == 14
    assert await gathered(store.list(VERIFY_FOLDER)) == []


@pytest.mark.parametrize(
    ("kind", "guarantee"),
    [
        (careless.IgnoresConditions, "one winner"),
        (careless.ReplacesAndSaysSo, "one winner"),
        (careless.HeadThenPut, "one winner"),
        (careless.ListsTooEarly, "a log without gaps"),
        (careless.ReadsTheDeleted, "deletion that lasts"),
        (careless.HasNoClock, "protection by snapshots"),
    ],
)
async def test_no_database_is_created_on_an_unfit_store(kind: Kind, guarantee: str) -> None:
    """The refusal names the lost guarantee, and nothing is left in the store."""
    objects = MemoryObjects()
    store = kind(objects)
    with pytest.raises(StoreUnfit, match=f"no {guarantee}.*shalekv store verify"):
        await create_database(store, inline_runtime(), StoreSettings())
    for folder in (names.MANIFEST_FOLDER, VERIFY_FOLDER, names.WAL_FOLDER):
        assert await gathered(Careful(objects).list(folder)) == []


async def test_what_to_do_about_it() -> None:
    """Two-phase compare-and-swap is recommended where it helps, and nowhere else."""
    runtime, settings = inline_runtime(), StoreSettings()
    with pytest.raises(StoreUnfit, match="--cas two_phase"):
        await check_fit(careless.IgnoresConditions(MemoryObjects()), runtime, settings)
    with pytest.raises(StoreUnfit, match=r"Use another store;"):
        await check_fit(careless.ListsTooEarly(MemoryObjects()), runtime, settings)
    with pytest.raises(StoreUnfit, match=r"Use another store;"):
        await check_fit(two_phases(Careful, careless.InsertsTwice)(), runtime, settings)


async def test_two_phases_are_fit_without_conditions() -> None:
    """In two-phase mode a store that ignores conditions can hold a database."""
    store = two_phases(careless.IgnoresConditions, MemoryRecords)()
    await create_database(store, inline_runtime(), StoreSettings())
    (record,) = await gathered(store.records.list(store.url, uncommitted_only=False))
    assert record.destination.name == names.manifest_name(0)
    assert await gathered(store.list(VERIFY_FOLDER)) == []


async def test_lost_replies_do_not_count_as_an_unfit_store() -> None:
    """An own create whose reply was lost, or that takes effect late, is no violation."""
    for fate in (Fate.REPLY_LOST, Fate.LATE, Fate.REQUEST_LOST, Fate.REFUSED):
        for before in range(14):
            store = ScriptedStore()
            store.creates = [Fate.ANSWERED] * before + [fate]
            await check_fit(store, inline_runtime(), StoreSettings())


async def test_a_late_create_does_not_count_as_a_lost_delete() -> None:
    """A create that takes effect after its name was deleted is the network's fault, and not the
    store's.
    """
    objects, late = MemoryObjects(), list[Request]()

    async def lose(request: Request) -> None:
        if request.operation == "create" and len(store.asked("create")) == 2:
            late.append(request)
            raise Lost("no answer")

    async def land(request: Request) -> None:
        if request.operation == "delete" and late:
            each = late.pop()
            await Careful(objects).create(each.name, each.data)

    store = FaultyStore(Careful(objects), before=lose, after=land)
    await check_fit(store, inline_runtime(), StoreSettings())
    assert await gathered(Careful(objects).list(VERIFY_FOLDER)) == []
