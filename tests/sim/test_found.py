"""What has failed once passes now, and fails again with what brings its bug back.

A change of the workload draws other runs from a seed. If one does not show its bug any more, it
gives way to another seed, or to a smaller test. What is found gets a test of its own besides, where
there is a place for one; RELIABILITY.md names it.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from shalekv.core.fencing import FenceRun
from shalekv.engine.quorum.proposing import peer
from shalekv.errors import ShaleError
from shalekv.manifest import stored
from shalekv.roles.safekeeper import archiver
from shalekv.roles.safekeeper.archiver import Archiver
from shalekv.store.memory import MemoryObjects
from tests.kit.processes.in_process import memory_store, real_runtime
from tests.kit.quorum import held_log
from tests.sim import loop
from tests.sim.campaign import spread
from tests.sim.invariants import answers
from tests.sim.options import Options, Trouble
from tests.sim.outcomes import Outcome, Task, first_of, run_task
from tests.sim.planting import Patch, planted
from tests.sim.run import simulate
from tests.sim.safekeepers.chaos import SafekeeperChaos
from tests.sim.safekeepers.cluster import QuorumCluster
from tests.sim.world import World
from tests.unit.core import test_transaction
from tests.unit.engine import test_opening_races
from tests.unit.manifest import test_stored
from tests.unit.roles.safekeeper import test_archiver

# ruff: noqa: SLF001 - what is replaced is private, as a rule
SEEDS_MAX = 20
_last_state = answers._last_state
_SOON = (loop, "STEPS_PER_MOMENT_MAX", 100_000)  # who waits in circles is found out sooner


def _unproven(self: FenceRun, _manifest: object) -> FenceRun:
    return self


def _yes(*_infos: object) -> bool:
    return True


def _durable(order: Any, operation: Any, attempt: Any, first: int) -> int:
    last_durable: int = order.durable_at(attempt.replied_us)
    return min(_last_state(order, operation, attempt, first), last_durable)


def _with_traceback(self: ShaleError, _traceback: object) -> ShaleError:
    return self


def _left_ms(self: Archiver) -> float:
    return self._look_due_ms - self._clock.monotonic_ms()


def _spare_those_that_stop(self: SafekeeperChaos) -> None:
    for machine in self._cluster.machines.values():
        self._start(machine)


@dataclass(frozen=True, slots=True)
class Found:
    """A run, what it has shown, and what it shows again with these patches.

    If it shows that no more, the seeds from 0 on are tried: time to put another one here.
    """

    what: str
    task: Task
    patches: Sequence[Patch]
    kind: str  # of the failure then (`outcomes.kind_of`)


FOUND = (
    Found(
        "a sender to a safekeeper waits in circles for the rest of a microsecond",
        Task(
            "quorum",
            26,
            Options(
                25,
                1,
                frozenset({Trouble.STORE, Trouble.CRASHES, Trouble.PAUSES, Trouble.TAKEOVERS}),
            ),
        ),
        [(peer, "WAIT_MS_MIN", 0.0), _SOON],
        "Livelock",
    ),
    Found(
        "an archiver waits in circles for the rest of a microsecond",
        Task("quorum", 110_405),
        [(archiver, "NOW_MS", 5e-324), _SOON],
        "Livelock",
    ),
    Found(
        "a delete of no keys is asked for a durable state",
        Task("writers", 106_200),
        [(answers, "_last_state", _durable)],
        "I1, I14, I15",
    ),
)


@dataclass(frozen=True, slots=True)
class Checked:
    """How the run that shows a bug ends with it and without; if none does, the last one of all."""

    with_it: Outcome
    without: Outcome


def check(number: int) -> tuple[int, Checked]:
    """Look for a run that shows this bug: for another process."""
    found = FOUND[number]
    with planted(found.patches):
        with_it = run_task(found.task)
        for seed in range(SEEDS_MAX):
            if with_it.kind == found.kind:
                break
            with_it = run_task(replace(found.task, seed=seed))
    return number, Checked(with_it, run_task(with_it.task))


@pytest.fixture(scope="module")
def checked() -> Mapping[int, Checked]:
    """All runs, with and without their bugs, in all cores."""
    return dict(spread(check, range(len(FOUND))))


@pytest.mark.timeout(900)  # where a seed does not show its bug any more, others are tried
@pytest.mark.parametrize("number", range(len(FOUND)), ids=lambda number: str(FOUND[number].task))
def test_what_was_found_once_is_mended(number: int, checked: Mapping[int, Checked]) -> None:
    """The run passes, and would fail as it did if the bug were there."""
    found, ends = FOUND[number], checked[number]
    sys.stdout.write(f"{found.what}: {ends.with_it.task}\n")
    assert ends.with_it.kind == found.kind, f"{found.what}: no seed of {SEEDS_MAX} shows it"
    assert not ends.without.has_failed, f"{found.what}: {ends.without.problem}"


# What no run of some seconds shows any more, or few of them: a smaller test does.


def test_an_opening_ends_although_its_fences_are_merged() -> None:
    """Seeds 4 and 25 of `two_phase` have shown it, when no fence was proven before the last one."""
    test = test_opening_races.test_an_opening_ends_although_its_fences_are_merged_at_once
    test()
    with planted([(FenceRun, "proven_by", _unproven)]):
        fails(test, TimeoutError)


async def test_a_manifest_that_was_made_anew_is_not_read() -> None:
    """Seed 43 of `database` has shown it, when what was read was not compared with the list."""
    test = test_stored.test_manifest_that_was_made_anew_since_the_list_is_not_read
    await test(told_s=False)
    with planted([(stored, "_may_be", _yes)]), pytest.raises(AssertionError):
        await test(told_s=False)


def test_a_refused_transaction_does_not_keep_what_it_was_decided_by() -> None:
    """Seed 13 of `database` has shown it, when its traceback kept the levels."""
    test = test_transaction.test_refusal_keeps_nothing_of_the_state
    test()
    with planted([(ShaleError, "with_traceback", _with_traceback)]):
        fails(test)


async def test_a_full_log_is_trimmed_before_it_is_time_for_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 101508 of `quorum` has shown it; that of a member has a test of its own."""
    monkeypatch.setattr(held_log, "DEADLINE_S", 3)
    objects = MemoryObjects()
    store = memory_store(objects)
    members = (held_log.A, held_log.B, held_log.C)
    await held_log.put_manifest(store, held_log.manifest_of(0, *members))
    with (
        real_runtime() as runtime,
        planted([(Archiver, "_left_ms", property(_left_ms))]),
        pytest.raises(ExceptionGroup) as raised,
    ):
        await test_archiver.test_a_member_without_room_looks_at_once(objects, store, runtime)
    assert isinstance(first_of(raised.value), TimeoutError)


def test_safekeepers_that_were_asked_to_stop_run_in_peace() -> None:
    """Seed 106039 of `quorum` has shown that they stay down: a fault of the simulation itself."""

    async def main(world: World) -> None:
        cluster = QuorumCluster(world)
        await cluster.found()
        await world.sleep_ms(10_000)
        for machine in cluster.machines.values():
            assert machine.safekeeper is not None
            machine.stop()
        SafekeeperChaos(cluster).set_right()
        await world.sleep_ms(60_000)
        assert all(machine.is_running for machine in cluster.machines.values())

    simulate(0, main)
    with planted([(SafekeeperChaos, "set_right", _spare_those_that_stop)]):
        fails(lambda: simulate(0, main))


def fails(test: Callable[[], object], error: type[Exception] = AssertionError) -> None:
    """It ends so, and its report is nobody's business."""
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(error):
        test()
