"""Bugs that runs have shown, in smaller tests: each passes, and fails with its bug brought back.

A change of the workload draws other runs from a seed, so the seeds themselves are not kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from types import SimpleNamespace
from typing import Any

import pytest

from shalekv.server.safekeeper import archiver
from shalekv.settings import ArchivingSettings
from shalekv.write.quorum import peer
from tests.sim import loop
from tests.sim.errors import Livelock
from tests.sim.planting import planted
from tests.sim.run import simulate
from tests.sim.safekeepers.chaos import SafekeeperChaos
from tests.sim.safekeepers.cluster import QuorumCluster
from tests.sim.simulation import NodeClock, Simulation

_SOON = (loop, "STEPS_PER_MOMENT_MAX", 100_000)  # endless loops are detected sooner


def _spare_those_that_stop(self: SafekeeperChaos) -> None:
    for machine in self._cluster.machines.values():
        self._start(machine)


def test_a_sender_waits_no_shorter_than_time_passes() -> None:
    """Seed 26 of `quorum` has shown that one to a safekeeper waited in circles for the rest of a
    microsecond, by the clock of a machine that is slow.
    """

    async def main(sim: Simulation) -> None:
        clock = NodeClock(sim.loop, drift_ppm=-50.0)
        due_ms = clock.monotonic_ms() + 20.0
        sender = SimpleNamespace(
            _window=SimpleNamespace(paused_until_ms=0.0),
            _chain_position=SimpleNamespace(due_ms=due_ms),
            _wake=asyncio.Event(),
            _context=SimpleNamespace(runtime=SimpleNamespace(clock=clock)),
        )
        while clock.monotonic_ms() < due_ms:
            await peer.Peer._wait(sender)  # type: ignore[arg-type] # noqa: SLF001 - what is seen

    simulate(0, main)
    with planted([(peer, "WAIT_MS_MIN", 0.0), _SOON]), pytest.raises(Livelock):
        simulate(0, main)


class _Waiting(archiver.Archiver):
    """An archiver that has nothing to do before its next poll."""

    def __init__(self, clock: NodeClock) -> None:
        self._store: Any = SimpleNamespace(runtime=SimpleNamespace(clock=clock))
        self._timer = archiver.PollTimer(clock, ArchivingSettings(archive_list_interval_ms=20))
        self._timer.begin()
        self._timer.end(is_manifest_read=True)
        self._is_named = True
        member = SimpleNamespace(is_space_wanted=False, state=SimpleNamespace(health=None))
        member.wait_for_work = lambda *_: asyncio.Event().wait()
        self._member = member

    def _is_turn(self) -> bool:
        return False

    async def until_its_poll(self) -> None:
        while self._poll_in_ms >= vars(archiver)["NOW_MS"]:  # read each time, since it is patched
            await self._wait(0, b"")


def test_an_archiver_waits_no_shorter_than_time_passes() -> None:
    """Seed 110405 of `quorum` has shown that it waited in circles for the rest of a microsecond."""

    async def main(sim: Simulation) -> None:
        for drift_ppm in range(-50, 50):
            await _Waiting(NodeClock(sim.loop, drift_ppm=drift_ppm)).until_its_poll()

    simulate(0, main)
    with planted([(archiver, "NOW_MS", 5e-324), _SOON]), pytest.raises(Livelock):
        simulate(0, main)


def test_safekeepers_that_were_asked_to_stop_run_in_peace() -> None:
    """Seed 106039 of `quorum` has shown that they stay down: a fault of the simulation itself."""

    async def main(sim: Simulation) -> None:
        cluster = QuorumCluster(sim)
        await cluster.found()
        await sim.sleep_ms(10_000)
        for machine in cluster.machines.values():
            assert machine.safekeeper is not None
            machine.stop()
        SafekeeperChaos(cluster).set_right()
        await sim.sleep_ms(60_000)
        assert all(machine.is_running for machine in cluster.machines.values())

    simulate(0, main)
    with (
        planted([(SafekeeperChaos, "set_right", _spare_those_that_stop)]),
        contextlib.redirect_stderr(io.StringIO()),
        pytest.raises(AssertionError),
    ):
        simulate(0, main)
