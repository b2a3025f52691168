"""All mutants, gathered from the files of their layers."""

from __future__ import annotations

from collections.abc import Mapping

from tests.sim.mutants import (
    collection,
    levels,
    quorum,
    replicas,
    transactions,
    two_phase,
    writer,
)
from tests.sim.mutants import format as formats
from tests.sim.planting import Mutant

_LAYERS = (
    writer.MUTANTS,
    transactions.MUTANTS,
    levels.MUTANTS,
    replicas.MUTANTS,
    collection.MUTANTS,
    formats.MUTANTS,
    two_phase.MUTANTS,
    quorum.MUTANTS,
)
MUTANTS: Mapping[str, Mutant] = {each.name: each for layer in _LAYERS for each in layer}
