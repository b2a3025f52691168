"""The table of invariants is complete, and what needs a running database to be wrong is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import TypeAlias

import pytest

from shalekv.format import names
from shalekv.protocol.sst_table import SstTable
from shalekv.settings import StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.write.snapshots import Snapshots
from tests.sim.callers import Callers
from tests.sim.campaign import PROFILES, SHARES
from tests.sim.cluster import Cluster
from tests.sim.errors import Violation
from tests.sim.invariants import catalogue, damage
from tests.sim.invariants.asked import is_judged
from tests.sim.invariants.bounds import LARGEST_WRITE_BYTES, Bounds, check_i13_memory_of_writers
from tests.sim.invariants.damage import check_i12_damage_is_detected
from tests.sim.level_states import (
    DeleteGuard,
    check_i8_levels_are_what_is_named,
    check_i9_levels_are_the_log,
)
from tests.sim.levels import WholeRun, whole_database
from tests.sim.requests import KEYS
from tests.sim.run import simulate
from tests.sim.serial import SerialOrder
from tests.sim.simulation import Simulation
from tests.sim.snapshot_readers import Snapped, check_i7_over_is_over
from tests.sim.stalls import BackgroundJobs
from tests.sim.stored import Stored

Scene: TypeAlias = Callable[[Simulation, Cluster, Callers], Awaitable[None]]


def test_every_invariant_has_a_checker_with_its_number() -> None:
    """There are I1 to I15, each has a checker, and each checker is of a profile that is run."""
    assert list(catalogue.INVARIANTS) == list(range(1, 16))
    checked = {each.number for each in catalogue.CHECKERS.values()}
    assert checked == set(catalogue.INVARIANTS)
    for name, each in catalogue.CHECKERS.items():
        assert each.text, f"{name} does not say what it looks at"
        assert each.profiles, f"{name} is called nowhere"
        assert each.profiles <= set(PROFILES), f"{name} names a profile that is not there"


@pytest.mark.parametrize("profile", SHARES)
def test_profiles_call_their_checkers(profile: str) -> None:
    """A run of a profile calls every checker that is registered for it."""
    before = Counter(catalogue.calls)
    judged = next(seed for seed in range(100) if is_judged(seed))
    simulate(judged, PROFILES[profile])
    assert catalogue.uncalled(profile, before) == []


def play(scene: Scene) -> None:
    """A database with one writer, in a simulation without faults."""

    async def main(sim: Simulation) -> None:
        cluster = Cluster(sim)
        await cluster.found()
        cluster.start_writer("w1", cluster.draw(Random(1)))
        await cluster.serving.wait()
        callers = Callers(cluster)
        await callers.put_one("w1")
        await scene(sim, cluster, callers)

    simulate(1, main)


def test_i7_an_unprotected_writer() -> None:
    """A writer that reads what no snapshot protects is found."""

    async def scene(sim: Simulation, cluster: Cluster, _callers: Callers) -> None:
        background_jobs = BackgroundJobs(cluster)
        background_jobs.check_i7_writers_are_protected(cluster)
        mine = cluster.writers["w1"].engine.levels.current.snapshot_id
        node = sim.node("admin")
        store = CasStore(sim.store_for(node), sim.runtime_for(node), StoreSettings())
        await node.run(Snapshots(store).delete(mine.hex()))
        with pytest.raises(Violation, match=r"^I7: no snapshot"):
            background_jobs.check_i7_writers_are_protected(cluster)

    play(scene)


def test_i7_a_snapshot_that_answers_after_its_end() -> None:
    """A snapshot that answers although no manifest has it any more is found."""

    async def scene(sim: Simulation, cluster: Cluster, _callers: Callers) -> None:
        node = sim.node("admin")
        store = CasStore(sim.store_for(node), sim.runtime_for(node), StoreSettings())
        snapshot = await node.run(Snapshots(store).create(name="s", ttl_ms=60_000))
        stored = cluster.stored()
        snapped = [Snapped(snapshot, 0)]
        await check_i7_over_is_over(sim, stored, snapped)  # it is not over
        forgotten = replace(stored.manifests[-1], snapshots=())
        with pytest.raises(Violation, match=r"^I7: .* is over"):
            await check_i7_over_is_over(
                sim, replace(stored, manifests=(*stored.manifests[:-1], forgotten)), snapped
            )
        await node.run(Snapshots(store).delete("s"))
        await check_i7_over_is_over(sim, cluster.stored(), snapped)

    play(scene)


def test_i8_a_needed_object_is_deleted() -> None:
    """A delete of the current manifest, of an uncompacted slot, or of a fence, is found."""

    async def scene(sim: Simulation, _cluster: Cluster, _callers: Callers) -> None:
        client = sim.store_for("vandal")
        for name in (
            sim.store.names(names.MANIFEST_FOLDER)[-1],
            *sim.store.names(names.WAL_FOLDER),
        ):
            guard = DeleteGuard(sim.store)
            guard.check_i8_nothing_needed_is_deleted()
            data = sim.store.data(name)
            await sim.node("vandal").run(client.delete([name]))
            with pytest.raises(Violation, match=r"^I8: vandal deletes"):
                guard.check_i8_nothing_needed_is_deleted()
            await sim.node("vandal").run(client.create(name, data or b""))

    play(scene)


def test_i8_an_orphan_is_left() -> None:
    """An object in levels/ that no manifest names is found, and one that is named and missing."""

    async def scene(sim: Simulation, _cluster: Cluster, _callers: Callers) -> None:
        check_i8_levels_are_what_is_named(sim.store)
        name = names.level_name(bytes.fromhex("018f0000000070008000000000000000"))
        await sim.node("vandal").run(sim.store_for("vandal").create(name, b"orphan"))
        with pytest.raises(Violation, match=r"^I8: nothing needs"):
            check_i8_levels_are_what_is_named(sim.store)

    play(scene)


def _without_the_last_write(_random: Random, there: damage.Objects) -> tuple[damage.Objects, str]:
    data = max(each for each in there if names.parse_wal_name(each) is not None)
    return {name: there[name] for name in there if name != data}, f"{data} is not there"


def _without_manifests(_random: Random, there: damage.Objects) -> tuple[damage.Objects, str]:
    kept = {name: there[name] for name in there if names.parse_manifest_name(name) is None}
    return kept, "there is no manifest"


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (_without_the_last_write, "is not there, and .* is read instead of"),
        (_without_manifests, "no manifest, and a reader says DatabaseNotFound"),
    ],
)
def test_i12_damage_that_is_served(
    harm: damage.Damage, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong answer is found, and so is an error that does not name the damaged object."""

    async def scene(sim: Simulation, _cluster: Cluster, callers: Callers) -> None:
        outcomes = await check_i12_damage_is_detected(sim)
        assert outcomes.total() == damage.DAMAGES
        for _ in range(20):
            await callers.put_one("w1")
        for name in ("flip", "cut", "swap", "put_back"):
            monkeypatch.setattr(damage, name, harm)
        with pytest.raises(Violation, match=rf"^I12: .*{problem}"):
            await check_i12_damage_is_detected(sim, random=Random(1))

    play(scene)


def test_i13_memory_past_its_bound() -> None:
    """A writer that holds more than its settings allow is found."""

    async def scene(sim: Simulation, cluster: Cluster, callers: Callers) -> None:
        settings = cluster.settings["w1"]
        nothing = settings.model_copy(update={"queued_bytes_max": -LARGEST_WRITE_BYTES - 1})

        async def bounds_at(at: WriterSettings) -> Bounds:
            cluster.settings["w1"], bounds = at, Bounds(cluster)
            sim.node("watch").start(bounds.watch(cluster))
            for _ in range(10):
                await callers.put_one("w1")
                await sim.sleep_ms(500.0)
            sim.crash("watch")
            assert bounds.inspections > 0
            return bounds

        check_i13_memory_of_writers(await bounds_at(settings))
        with pytest.raises(Violation, match=r"^I13: w1 has"):
            check_i13_memory_of_writers(await bounds_at(nothing))

    play(scene)


@pytest.fixture(scope="module")
def whole() -> WholeRun:
    """A run with levels."""
    return simulate(101, whole_database).value


def test_i9_levels_that_are_not_the_log(whole: WholeRun) -> None:
    """Levels that lack what the log has are found."""
    stored = whole.stored
    order = SerialOrder(whole.cluster.history, stored, KEYS)
    assert check_i9_levels_are_the_log(order, stored) > 0
    last = stored.manifests[-1]
    emptied = replace(last, manifest_id=last.manifest_id + 1, leveled_ssts=SstTable())
    forged: Stored = replace(stored, manifests=(*stored.manifests, emptied))
    with pytest.raises(Violation, match=r"^I2, I9: the levels of manifest"):
        check_i9_levels_are_the_log(order, forged)
    with pytest.raises(Violation, match=r"^I8: manifest .* never written"):
        check_i9_levels_are_the_log(order, replace(stored, levels={}))
