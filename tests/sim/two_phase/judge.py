"""I10: two-phase compare-and-swap has one winner, at whatever point processes crash.

Judges the changes that took effect at both stores, in their order, and the outcome of each create.
Objects that are created under a name that was collected do not count (rules F1 to F3): they must be
gone at the end, and the rules for them are relaxed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from shalekv.format.manifest import decode_manifest
from shalekv.format.names import (
    LEVELS_FOLDER,
    MANIFEST_FOLDER,
    WAL_FOLDER,
    manifest_name,
    parse_level_name,
    parse_manifest_name,
    parse_temporary_name,
    parse_wal_name,
)
from shalekv.jobs.collect import CollectJob
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.two_phase import CreateRecord
from shalekv.settings import CollectorSettings, StoreSettings
from shalekv.store.cas import CasStore
from tests.sim.errors import Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.levels import whole_database
from tests.sim.simulation import Simulation
from tests.sim.two_phase.records import (
    Change,
    CreateEnded,
    Happening,
    ObjectChanged,
    RecordChange,
    RecordChanged,
)
from tests.sim.two_phase.store import TwoPhaseSimStore

FOLDERS = (MANIFEST_FOLDER, WAL_FOLDER, LEVELS_FOLDER)
_NOT_CREATED = frozenset({"Exists", "StoreUnavailable", "StoreRefused"})


@dataclass(slots=True)
class _Place:
    """History of one destination."""

    data: bytes | None = None  # present contents
    winner: bytes | None = None  # the first ones that were there
    record: CreateRecord | None = None
    is_collected: bool = False  # since then, nothing that comes there counts
    creators: list[str] = field(default_factory=list)  # nodes whose create succeeded before that
    sources: set[str] = field(default_factory=set)  # all that its records ever named
    put: set[bytes] = field(default_factory=set)  # under temporary names


@checks(10, "two_phase")
def check_i10_one_winner(happened: list[Happening]) -> None:
    """A client that got `Created` has won, for ever, and its object is complete."""
    _Judge().judge(happened)


@checks(10, "two_phase")
def check_i10_nothing_is_left(store: TwoPhaseSimStore) -> None:
    """Objects and records belong to each other, and no temporary object is there.

    REQUIRES: faults have stopped, and all is collected.
    """
    there = {name for folder in FOLDERS for name in store.names(folder)}
    left = [name for folder in FOLDERS for name in store.temporary_names(folder)]
    if left:
        raise Violation(f"I10: nothing needs the temporary objects {left}")
    for record in store.records():
        name = record.destination.name
        if not record.is_committed:
            raise Violation(f"I10: the record of {name} is not committed in peace")
        if name not in there:
            raise Violation(f"I10: the record of {name} is left, and its object is not there")
    recorded = {record.destination.name for record in store.records()}
    if there - recorded:
        raise Violation(f"I10: {sorted(there - recorded)} have no records")
    deleted = {
        each.name
        for each in store.happened
        if isinstance(each, ObjectChanged) and each.change is Change.DELETED
    }
    if there & deleted:
        raise Violation(f"I10: {sorted(there & deleted)} came back after they were collected")


class _Judge:
    """Goes through what happened."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = defaultdict(_Place)
        self._temporary: set[str] = set()  # present ones
        self._ended: list[CreateEnded] = []

    def judge(self, happened: list[Happening]) -> None:
        for each in happened:
            match each:
                case ObjectChanged() if (parsed := parse_temporary_name(each.name)) is not None:
                    self._temporary_changed(each, self._places[parsed.destination])
                case ObjectChanged():
                    self._object_changed(each, self._places[each.name])
                case RecordChanged():
                    self._record_changed(each, self._places[each.name])
                case CreateEnded():
                    self._create_ended(each, self._places[each.name])
        for ended in self._ended:
            self._check_never_entered(ended)

    def _temporary_changed(self, each: ObjectChanged, place: _Place) -> None:
        if each.change is not Change.DELETED:
            self._temporary.add(each.name)
            place.put.add(each.data)
            return
        self._temporary.discard(each.name)
        record = place.record
        is_needed = record is not None and record.source == each.name and not record.is_committed
        if is_needed and not place.is_collected:
            raise Violation(f"I10: {each.node} deletes {each.name}, which its record still needs")

    def _object_changed(self, each: ObjectChanged, place: _Place) -> None:
        if each.change is Change.DELETED:
            place.data, place.is_collected = None, True
            return
        if each.change is Change.PUT:
            raise Violation(f"I10: {each.node} puts {each.name} without asking who has won it")
        if each.data not in place.put:
            raise Violation(f"I10: {each.node} makes {each.name} something that nobody has put")
        if not place.is_collected and place.data not in (None, each.data):
            raise Violation(f"I10: {each.node} overwrites {each.name} with another's object")
        if place.winner is None:
            place.winner = each.data
        place.data = each.data

    def _record_changed(self, each: RecordChanged, place: _Place) -> None:
        before, place.record = each.before, each.after
        if each.after is not None:
            place.sources.add(each.after.source)
        if place.is_collected:
            return
        can_be_completed = place.data is not None or (
            before is not None and before.source in self._temporary
        )
        match each.change:
            case RecordChange.TAKEN_OVER | RecordChange.WITHDRAWN if can_be_completed:
                text = f"the record of {each.name} was {each.change.value} by {each.node}"
                raise Violation(f"I10: {text} while it could be completed")
            case RecordChange.COMMITTED if place.data is None and not self._is_dead(each.name):
                raise Violation(f"I10: {each.node} commits {each.name}, which is not there")
            case RecordChange.DELETED if place.data is not None:
                raise Violation(f"I10: {each.node} forgets {each.name}, which is there")
            case RecordChange.DELETED if not self._is_dead(each.name):
                raise Violation(f"I10: {each.node} forgets {each.name}, which may be created")
            case _:
                pass

    def _create_ended(self, ended: CreateEnded, place: _Place) -> None:
        if ended.outcome in _NOT_CREATED:
            self._ended.append(ended)
        if place.is_collected:
            return
        if ended.outcome == "Exists" and place.data is None:
            raise Violation(f"I10: {ended.node} got that {ended.name} exists, and it does not")
        if ended.outcome == "Created":
            place.creators.append(ended.node)
            if place.data != ended.data:
                raise Violation(f"I10: {ended.node} got a success for {ended.name}, wrongly")
            if len(place.creators) > 1:
                raise Violation(f"I10: {place.creators} all got a success for {ended.name}")

    def _check_never_entered(self, ended: CreateEnded) -> None:
        """A create that was reported as lost, or as not made, must not win later."""
        entered = self._places[ended.name].sources.intersection(ended.sources)
        if entered:
            raise Violation(
                f"I10: {ended.node} got {ended.outcome} for {ended.name}; a record names {entered}"
            )

    def _is_dead(self, name: str) -> bool:
        manifests = {
            parse_manifest_name(each): place.winner
            for each, place in self._places.items()
            if place.winner is not None and each.startswith(MANIFEST_FOLDER)
        }
        current_id = max((each for each in manifests if each is not None), default=None)
        if current_id is None:
            return not name.startswith(FOLDERS)  # where a store is tried
        current = decode_manifest(manifest_name(current_id), manifests[current_id] or b"")
        return not name.startswith(FOLDERS) or _is_behind(name, current)


def _is_behind(name: str, current: Manifest) -> bool:
    manifest_id, wal_id = parse_manifest_name(name), parse_wal_name(name)
    if manifest_id is not None:
        is_named = any(each.manifest_id == manifest_id for each in current.snapshots)
        return not is_named and manifest_id < current.manifest_id
    if wal_id is not None:
        return wal_id < (current.wal_id_last_compacted or 0)
    sst_id = parse_level_name(name)
    ids = current.leveled_ssts.ids
    return sst_id not in {ids[at : at + 16] for at in range(0, len(ids), 16)}


FOREIGN_FILE_AGE_S = 5
# after this time, all objects are old enough to be collected
_OLDER_MS = 2_000.0 * FOREIGN_FILE_AGE_S
_COLLECTIONS = 2  # the first one leaves its own manifest behind


async def two_phase_database(sim: Simulation) -> None:
    """Run and check `whole_database` with two-phase compare-and-swap (I10).

    At the very end the power of all processes is cut, and everything is collected.
    """
    random = sim.random_for("two phases")
    store = TwoPhaseSimStore(sim.loop, random, sim.store.faults, sim.runtime_for)
    sim.store = store
    try:
        await whole_database(sim)
    finally:
        check_i10_one_winner(store.happened)  # the cause of what may have gone wrong above
    await _collect_all(sim)
    check_i10_one_winner(store.happened)
    check_i10_nothing_is_left(store)


async def _collect_all(sim: Simulation) -> None:
    for node in sim.nodes():
        node.crash()
    sweeper = sim.node("sweeper")
    runtime, settings = sim.runtime_for(sweeper), StoreSettings()
    collecting = CollectJob(
        CasStore(sim.store_for(sweeper), runtime, settings),
        CollectorSettings(
            collect_age_s=0, foreign_file_age_s=FOREIGN_FILE_AGE_S, wal_retention_s=0
        ),
    )
    await sim.sleep_ms(max(0.0, sim.store.last_arrival_ms - sim.now_ms))
    for _ in range(_COLLECTIONS):
        await sim.sleep_ms(_OLDER_MS)
        await sweeper.run(collecting.collect())
