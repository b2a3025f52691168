"""The databases that a simulation runs: what takes part in each, and what is checked of it."""

from __future__ import annotations

from collections.abc import Mapping

from tests.sim.levels import whole_database
from tests.sim.run import Main
from tests.sim.safekeepers.database import quorum_database
from tests.sim.two_phase.database import two_phase_database
from tests.sim.writers import only_writers

PROFILES: Mapping[str, Main[object]] = {
    "writers": only_writers,
    "database": whole_database,
    "two_phase": two_phase_database,
    "quorum": quorum_database,
}
