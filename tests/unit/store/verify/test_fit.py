"""The short form of the checks, which a database is created behind."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest

from shalekv.errors import StoreUnavailable, StoreUnfit
from shalekv.format import names
from shalekv.roles.database import create_database
from shalekv.settings import StoreSettings
from shalekv.store.memory import MemoryObjects
from shalekv.store.requests import RequestKind
from shalekv.store.two_phase.memory import MemoryRecords
from shalekv.store.verify.fit import check_fit
from shalekv.store.verify.scratch import FOLDER
from tests.kit import careless_stores as careless
from tests.kit.careless_stores import Careful, Kind
from tests.kit.inline_runtime import gathered, inline_runtime
from tests.kit.scripted_store import Fate, ScriptedStore
from tests.kit.seeds import random_of
from tests.kit.store import FaultyStore, Lost, Request
from tests.sim.faults import Faults
from tests.sim.run import simulate
from tests.sim.world import World
from tests.unit.store.verify.trying import two_phases

REQUESTS_MAX = 25


async def test_what_it_costs() -> None:
    """A fit store is found so with a few requests, and nothing is left in it."""
    store = Careful(MemoryObjects())
    await check_fit(store, inline_runtime(), StoreSettings())
    assert store.sent.total <= REQUESTS_MAX
    assert store.sent.by_kind[RequestKind.WRITE] == 14
    assert await gathered(store.list(FOLDER)) == []


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (careless.IgnoresConditions, "one winner"),
        (careless.ReplacesAndSaysSo, "one winner"),
        (careless.LooksThenWrites, "one winner"),
        (careless.ListsTooEarly, "a log without gaps"),
        (careless.ReadsTheDeleted, "deletion that lasts"),
        (careless.TellsNoTime, "protection by snapshots"),
    ],
)
async def test_no_database_is_created_on_an_unfit_store(kind: Kind, told: str) -> None:
    """What is refused is told with the guarantee that is lost, and nothing is left there."""
    objects = MemoryObjects()
    store = kind(objects)
    with pytest.raises(StoreUnfit, match=f"no {told}.*shalekv store verify"):
        await create_database(store, inline_runtime(), StoreSettings())
    for folder in (names.MANIFEST_FOLDER, FOLDER, names.WAL_FOLDER):
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
    """A store that ignores conditions holds a database whose creates are decided elsewhere."""
    store = two_phases(careless.IgnoresConditions, MemoryRecords)()
    await create_database(store, inline_runtime(), StoreSettings())
    (record,) = await gathered(store.records.list(store.url, uncommitted_only=False))
    assert record.destination.name == names.manifest_name(0)
    assert await gathered(store.list(FOLDER)) == []


async def test_lost_replies_do_not_look_like_an_unfit_store() -> None:
    """A create of our own whose reply was lost, or that comes late, is no broken promise."""
    for fate in (Fate.REPLY_LOST, Fate.LATE, Fate.REQUEST_LOST, Fate.REFUSED):
        for before in range(14):
            store = ScriptedStore()
            store.creates = [Fate.ANSWERED] * before + [fate]
            await check_fit(store, inline_runtime(), StoreSettings())


async def test_a_late_create_does_not_look_like_a_lost_delete() -> None:
    """What lands after its name was deleted is the network's doing, and not the store's."""
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
    assert await gathered(Careful(objects).list(FOLDER)) == []


@pytest.mark.parametrize("seed", range(6))
def test_faults_do_not_look_like_an_unfit_store(seed: int) -> None:
    """However requests are lost, late and refused, a store that keeps its promises is not refused.

    It may be that it does not answer.
    """

    async def main(world: World) -> None:
        settings = StoreSettings(read_attempts=100)
        with suppress(StoreUnavailable):
            await check_fit(world.store_for("admin"), world.runtime_for("admin"), settings)

    seed = random_of(f"fit {seed}").getrandbits(32)
    simulate(seed, main, faults=Faults.swarm(Random(seed)))
