"""Plays a scenario: the shipped roles on a simulated store, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from shalekv.errors import ShaleError
from shalekv.format import names
from shalekv.format.names import parse_temporary_name
from shalekv.server.database import create_database
from shalekv.settings import StoreSettings
from tests.scenarios import acts, jobs, objects
from tests.scenarios.reading import Scenario, carry_out, sentence, table
from tests.scenarios.serving import CreatorProcess
from tests.scenarios.stage import ERROR, Stage
from tests.sim.faults import Faults
from tests.sim.network import Match, Plan
from tests.sim.run import simulate
from tests.sim.simulation import Simulation
from tests.sim.two_phase.records import Change, ObjectChanged
from tests.sim.two_phase.store import TwoPhaseSimStore

CREATOR = r"(?P<process>process \d+)"
OBJECT = r"(?P<folder>manifest|wal) (?P<object_id>\d+)"
OUTCOME = r"(?:: (?P<outcome>\w+))?"
OF_RECORDS = frozenset({"insert", "find", "commit", "withdraw", "delete_committed"})


class ScriptedStores(TwoPhaseSimStore):
    """The two stores, where each step of a create is one that a scenario can hold."""

    def _plan(self, match: Match, plan: Plan, times: int | None) -> None:
        network = self._records if match.operation in OF_RECORDS else self._network
        network.script.add(match, plan, times)

    def remove(self, name: str) -> None:
        """Delete an object without consulting the records."""
        self._plain.delete(self.node, (name,))


def install(sim: Simulation) -> None:
    """Keep the simulation's objects in a store that has no conditional writes."""
    random = sim.random_for("two phases")
    sim.store = ScriptedStores(sim.loop, random, sim.store.faults, sim.runtime_for)


def stores(stage: Stage) -> ScriptedStores:
    found = stage.sim.store
    assert isinstance(found, ScriptedStores), "this scenario is played on a store with conditions"
    return found


# --- who creates --------------------------------------------------------------------------------


@sentence(r"the store has no conditional writes(?:, and no database yet)?")
async def has_no_conditions(stage: Stage) -> None:
    stores(stage)


@sentence(rf"{CREATOR} writes {OBJECT}{OUTCOME}")
async def writes(
    stage: Stage, process: str, folder: str, object_id: str, outcome: str | None
) -> None:
    """The process creates it, and waits in the background, or until this has become of it."""
    creator = _creator(stage, process)
    await _begin(stage, process, creator.create(_name(folder, object_id)), outcome)


@sentence(rf"{CREATOR} deletes {OBJECT}{OUTCOME}")
async def deletes(
    stage: Stage, process: str, folder: str, object_id: str, outcome: str | None
) -> None:
    """Object and record go, as when a collector deletes it."""
    role = _creator(stage, process).role
    await _begin(stage, process, role.delete([_name(folder, object_id)]), outcome)


@sentence(rf"{CREATOR} recovers(?:, and knows that {OBJECT} was collected)?{OUTCOME}")
async def recovers(
    stage: Stage, process: str, folder: str | None, object_id: str | None, outcome: str | None
) -> None:
    """It completes what others have begun, and forgets what belongs to an object that is gone."""
    gone = _name(folder, object_id) if folder and object_id else ""
    job = _creator(stage, process).role.repair(lambda name: name == gone)
    await _begin(stage, process, job, outcome)


@sentence(rf"{CREATOR}: (?P<outcome>done|Created|Exists|Unknown|{ERROR})")
async def ends(stage: Stage, process: str, outcome: str, error: str | None = None) -> None:
    del error  # the outcome has it
    creator = _creator(stage, process)
    found = await creator.end()
    assert found is None or isinstance(found, ShaleError), f"{process} ended with {found!r}"
    assert (type(found).__name__ if found else creator.outcome or "done") == outcome
    creator.outcome = ""


@sentence(r"the temporary objects of process (?P<number>\d+) are deleted")
async def loses_sources(stage: Stage, number: str) -> None:
    """Delete temporary objects without consulting the records, like a bucket's lifecycle rule."""
    found = [name for name in _temporary(stage) if _owner(stage, name) == f"process {number}"]
    assert found, "there are none"
    for name in found:
        stores(stage).remove(name)


async def _begin(
    stage: Stage, process: str, job: Coroutine[Any, Any, object], outcome: str | None
) -> None:
    _creator(stage, process).begin_job(job)
    if outcome is not None:
        await ends(stage, process, outcome)


def _creator(stage: Stage, name: str) -> CreatorProcess:
    stores(stage)
    process = stage.jobs(name)
    assert isinstance(process, CreatorProcess)
    return process


# --- what is there ------------------------------------------------------------------------------


@table(r"(record of )?(manifest|wal)/\S+ (source )?of ")
async def objects_and_records(stage: Stage, rows: list[str]) -> None:
    both = stores(stage)
    there = [*both.names(names.MANIFEST_FOLDER), *both.names(names.WAL_FOLDER)]
    shown = [f"{name} {stage.data(name).decode()}" for name in there]
    # Temporary names are drawn.
    shown[:0] = sorted(f"{_shown(name)} {stage.data(name).decode()}" for name in _temporary(stage))
    for record in both.records():
        owner, committed = _owner(stage, record.source), str(record.is_committed).lower()
        shown.append(
            f"record of {record.destination.name} source of {owner}, committed={committed}"
        )
    assert shown == rows


@sentence(r"nothing is there")
async def nothing_is_there(stage: Stage) -> None:
    await objects_and_records(stage, [])


@sentence(r"(?P<folder>manifest|wal|levels) has (?P<none>no )?temporary objects")
async def has_temporary(stage: Stage, folder: str, none: str | None) -> None:
    found = [name for name in _temporary(stage) if name.startswith(f"{folder}/")]
    assert bool(found) != bool(none)


@table(r"record of (manifest|wal|levels)/\S+ (stays|goes)")
async def records_stay_and_go(stage: Stage, rows: list[str]) -> None:
    """The records of the folders that are mentioned; gone are those that went since the last."""
    mentioned = {row.split()[2].partition("/")[0] for row in rows}
    there = {record.destination.name for record in stores(stage).records()}
    found = [name for name in {*there, *stage.listed_records} if name.split("/")[0] in mentioned]
    stage.listed_records = there
    shown = {stage.shown(name): name in there for name in found if _is_counted(stage, name)}
    assert [f"record of {n} {'stays' if shown[n] else 'goes'}" for n in sorted(shown)] == rows


def _is_counted(stage: Stage, name: str) -> bool:
    return not name.startswith(names.WAL_FOLDER) or name >= stage.wal_name(0)


def _temporary(stage: Stage) -> list[str]:
    both = stores(stage)
    folders = (names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER)
    return [name for folder in folders for name in both.temporary_names(folder)]


def _shown(name: str) -> str:
    parsed = parse_temporary_name(name)
    return name if parsed is None else f"{parsed.destination}.[UUID].[checksum]"


def _owner(stage: Stage, source: str) -> str:
    """Return the node that has put a temporary object; none for one that only keeps others out."""
    for each in stores(stage).happened:
        if isinstance(each, ObjectChanged) and each.change is Change.PUT and each.name == source:
            return each.node
    return "nobody"


def _name(folder: str, object_id: str) -> str:
    return (names.wal_name if folder == "wal" else names.manifest_name)(int(object_id))


VOCABULARY = (acts, jobs, objects)  # importing them registers their sentences
NO_CONDITIONS, NO_DATABASE = "the store has no conditional writes", ", and no database yet"
LIMIT_S = 259_200.0  # of virtual time: a scenario that waits for an event that never happens fails


def play(scenario: Scenario, seed: int, *, limit_s: float = LIMIT_S) -> None:
    """Play it on a new database; raise at the first difference from the scenario.

    The seed orders what the scenario leaves open. The first line may state that the store has no
    conditional writes, or that there is no database yet.
    """
    first = scenario.steps[0].text

    async def main(sim: Simulation) -> None:
        if first.startswith(NO_CONDITIONS):
            install(sim)
        stage = Stage(sim)
        if not first.endswith(NO_DATABASE):
            creator = sim.node("creator")
            store, runtime = sim.store_for(creator), sim.runtime_for(creator)
            await creator.run(create_database(store, runtime, StoreSettings()))
        stage.listed_manifests = len(stage.attempts.of("manifest"))
        await carry_out(stage, scenario)

    # The sender of a held request waits for as long as it is held.
    faults = replace(Faults.none(), timeout_ms=math.inf)
    simulate(seed, main, faults=faults, limit_s=limit_s)
