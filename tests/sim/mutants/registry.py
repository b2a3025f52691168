"""All mutants, gathered from the files of their layers."""

from __future__ import annotations

from collections.abc import Mapping

from tests.sim.mutants import collection, levels, quorum, transactions, writer
from tests.sim.planting import Mutant

_LAYERS = (
    writer.MUTANTS,
    transactions.MUTANTS,
    levels.LEVELS,
    levels.REPLICAS,
    collection.COLLECTION,
    collection.FORMAT,
    quorum.TWO_PHASE,
    quorum.QUORUM,
)
MUTANTS: Mapping[str, Mutant] = {each.name: each for layer in _LAYERS for each in layer}
