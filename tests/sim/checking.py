"""All checkers of the invariants, called: for runs of the simulation, and of real processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from shalekv.format import names
from tests.kit.model import keys_of
from tests.sim.cluster import Cluster
from tests.sim.history import History, Seen
from tests.sim.invariants import answers, log
from tests.sim.invariants.bounds import Bounds, check_i13_memory_of_writers
from tests.sim.invariants.damage import check_i12_damage_is_detected
from tests.sim.invariants.linearizability import check_i14_linearizable, is_judged
from tests.sim.invariants.replicas import (
    check_i2_nothing_comes_back,
    check_i6_replicas_show_prefixes,
)
from tests.sim.level_states import check_i9_levels_are_the_log
from tests.sim.requests import COUNTED, KEYS
from tests.sim.serial import SerialOrder
from tests.sim.stored import Stored
from tests.sim.world import World

STEPS_IN_EARNEST = 200_000  # of a search; there are few such histories


@dataclass(frozen=True, slots=True)
class Checked:
    """What was looked at, and how often what was found harmless."""

    order: SerialOrder
    stored: Stored
    told: Counter[str]


def check_all(
    history: History,
    stored: Stored,
    *,
    keys: Sequence[bytes] = KEYS,
    counters: Collection[bytes] = (COUNTED,),
) -> SerialOrder:
    """Check what was told and stored of a run of writers; the order of its commits.

    Raises `Violation`.
    """
    log.check_i3_nothing_behind_a_fence_run(stored)
    log.check_i4_slots_without_gaps(stored)
    log.check_i4_slot_order_is_sequence_order(stored)
    log.check_i5_manifests(stored)
    log.check_i5_logical_time_in_the_log(stored)
    log.check_i5_a_writer_issues_numbers_of_its_own(stored)
    order = SerialOrder(history, stored, keys)  # I1, I14 and I15 from here on
    log.check_i5_numbers_are_issued_once(order)
    answers.check_i1_acknowledged_writes_are_in_the_log(order)
    answers.check_i14_commits_are_in_the_order_of_time(order)
    answers.check_i14_answers(order)
    answers.check_i15_one_answer(order)
    answers.check_i14_reads(order)
    answers.check_i14_scans(order)
    answers.check_i15_counters(order, counters)
    return order


def check_history(
    history: History,
    stored: Stored,
    *,
    counters: Collection[bytes] = (),
    seen: Iterable[Seen] = (),
) -> SerialOrder:
    """Check a history of real processes and what was gathered; the order of its commits.

    As `check_all`, and I2 and I6 of what replicas have shown (`seen`), I9, and I14 by a search.
    Landing times may be unknown (`gather`); but all must be there that was ever written. Keys are
    those of the history. Raises `Violation`.
    """
    order = check_all(history, stored, keys=keys_in_history(history, stored), counters=counters)
    found = list(seen)
    check_i6_replicas_show_prefixes(order, found)
    check_i2_nothing_comes_back(order, found)
    check_i9_levels_are_the_log(order, stored)
    check_i14_linearizable(history, order.timeline.keys, steps_max=STEPS_IN_EARNEST)
    return order


async def check_run(
    world: World, cluster: Cluster, bounds: Bounds, seen: Sequence[Seen] = ()
) -> Checked:
    """Check a whole run of the simulation, whatever took part in it. Raises `Violation`."""
    check_i13_memory_of_writers(bounds)
    stored = cluster.stored()
    created = (
        names.parse_manifest_name(e.name) for e in world.store.log if e.operation == "create"
    )
    log.check_i5_manifest_ids_in_time(each for each in created if each is not None)
    order = check_all(cluster.history, stored)
    check_i2_nothing_comes_back(order, seen)
    told = Counter({"looks at bounds": bounds.looks})
    if is_judged(world.seed):
        told += check_i14_linearizable(cluster.history, order.timeline.keys)
    told += await check_i12_damage_is_detected(world)
    return Checked(order, stored, told)


def keys_in_history(history: History, stored: Stored) -> list[bytes]:
    """Every key that was named, one by one, or is in the log."""
    found = {key for each in history.operations for key in keys_of(each.request, ())}
    found |= {read.key for read in history.reads}
    found |= {entry.key for each in stored.wal for entry in each.entries}
    return sorted(found - {b""})
