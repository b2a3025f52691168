"""Size and troubles of a simulated run, as a value that shrinking reduces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Trouble(Enum):
    """A kind of fault or concurrent activity, each of which can be left out of a run.

    A trouble that is left out is drawn all the same, and then not done: other events stay mostly
    the same, and a failure keeps its seed.
    """

    STORE = "store"  # slow, lossy and refusing answers of the object store
    CRASHES = "crashes"
    PAUSES = "pauses"
    TAKEOVERS = "takeovers"  # writers overtaken at the worst moment, safekeepers replaced
    CLOCKS = "clocks"  # local clocks that jump
    BACKGROUND_JOBS = "background_jobs"  # compactors and collectors
    STALLS = "stalls"  # processes that stop between two requests, at the worst moment
    READERS = "readers"  # readers of snapshots
    SCANS = "scans"  # scans that stay open
    REPLICAS = "replicas"
    PARTITIONS = "partitions"  # safekeepers that are cut off
    DISKS = "disks"  # un-synced writes that are lost or torn, disks that are exchanged


EVERYTHING = frozenset(Trouble)
CHAOS_STEPS = 60
CLIENTS = 4


@dataclass(frozen=True, slots=True)
class Options:
    """Duration of the chaos, number of clients, and what goes wrong."""

    chaos_steps: int = CHAOS_STEPS
    clients: int = CLIENTS
    troubles: frozenset[Trouble] = EVERYTHING

    def has(self, trouble: Trouble) -> bool:
        return trouble in self.troubles

    def without(self, trouble: Trouble) -> Options:
        return replace(self, troubles=self.troubles - {trouble})


ALL = Options()
