"""I13: bounds throughout a run: the memory of writers, objects in flight, and L0.

Also that no error of a caller is left to the garbage collector.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from shalekv.errors import (
    ConditionFailed,
    CounterOverflow,
    KeyExpired,
    KeyReused,
    NotACounter,
    OutcomeUnknown,
    Overloaded,
)
from shalekv.protocol.compaction.l0 import l0_runs
from shalekv.protocol.manifest import L0
from shalekv.server.writer import Writer
from tests.kit.cycles import cycles
from tests.sim.cluster import Cluster
from tests.sim.errors import Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.stored import Stored, current_manifest

POLL_MS = 1_000.0
LARGEST_WRITE_BYTES = 1_000
L0_RUNS_MAX = 16  # three times the largest `l0_trigger_count` of `tiny`, and what two publish late


@dataclass(slots=True)
class Bounds:
    """Inspects writers while they serve; their initial state may be more than they may add to."""

    cluster: Cluster
    inspections: int = 0
    problems: list[str] = field(default_factory=list)
    _began_bytes: dict[Writer, int] = field(default_factory=dict)

    async def watch(self, cluster: Cluster) -> None:
        while True:
            await cluster.sim.sleep_ms(POLL_MS * cluster.pace)
            for name, writer in cluster.writers.items():
                self.inspections += 1
                self._inspect(name, writer)

    def _inspect(self, name: str, writer: Writer) -> None:
        engine, settings = writer.engine, self.cluster.settings[name]
        began_bytes = self._began_bytes.setdefault(writer, engine.memory_bytes)
        admission = engine.admission
        bounds = {
            "uncompacted": (engine.memory_bytes, max(began_bytes, settings.memtable_bytes_max)),
            "queued": (admission.queued_bytes, settings.queued_bytes_max),
            "waiting": (admission.waiting_bytes, settings.admission_waiting_bytes_max),
        }
        for what, (held, bound) in bounds.items():
            if not 0 <= held <= bound + LARGEST_WRITE_BYTES:
                self.problems.append(f"I13: {name} has {held} bytes {what}, of at most {bound}")


# Errors that callers get repeatedly while a writer continues; other errors end it.
KEPT_ALIVE = (
    ConditionFailed,
    CounterOverflow,
    KeyExpired,
    KeyReused,
    NotACounter,
    OutcomeUnknown,
    Overloaded,
)


@checks(13, "writers", "database")
def check_i13_refusals_are_freed() -> None:
    """Check that no error of a caller, nor a frame that it came through, is left in a cycle.

    Nothing was collected during the run (`collect_later`): all that it has left is there.
    """
    for each in cycles():
        if isinstance(each, KEPT_ALIVE) and each.__traceback__ is not None:
            frames = [
                frame.f_code.co_qualname for frame, _ in traceback.walk_tb(each.__traceback__)
            ]
            raise Violation(f"I13: only a collection of garbage frees {each!r}, raised in {frames}")


@checks(13, "writers", "database")
def check_i13_memory_of_writers(bounds: Bounds) -> None:
    """At every look, no writer held, queued or let wait more bytes than its settings allow.

    And one that serves when all is compacted, and was for a while, holds nothing any more.
    """
    if bounds.problems:
        raise Violation(bounds.problems[0])
    compacted_seq = current_manifest(bounds.cluster.sim.store).last_compacted_seq
    for name, writer in bounds.cluster.writers.items():
        held_bytes = writer.engine.memory_bytes
        if writer.engine.watermark.seq <= compacted_seq and held_bytes > 0:
            raise Violation(f"I13: {name} has {held_bytes} bytes uncompacted, and all is compacted")


@checks(13, "database")
def check_i13_l0(stored: Stored) -> None:
    """In no manifest a read has to look into more runs of L0 than a compactor lets come together.

    A compactor stops adding to L0 when that is three times as long as it should be.
    """
    for manifest in stored.manifests:
        runs = l0_runs(info for info in manifest.leveled_ssts if info.level == L0)
        if len(runs) > L0_RUNS_MAX:
            raise Violation(f"I13: manifest {manifest.manifest_id} has {len(runs)} runs in L0")
