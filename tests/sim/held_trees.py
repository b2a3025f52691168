"""I8: what a writer reads is what its snapshot keeps."""

from __future__ import annotations

from itertools import chain

from shalekv.core.snapshot import find_snapshot
from shalekv.core.tree import Tree
from shalekv.engine.levels.held_tree import HeldTree
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import manifest_name
from tests.sim.cluster import Cluster
from tests.sim.errors import Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.stored import current_manifest

LOOK_MS = 500.0  # at pace 1


class HeldTrees:
    """Looks at the trees that writers read while they serve."""

    def __init__(self, cluster: Cluster) -> None:
        """Nothing is looked at yet."""
        self._cluster = cluster
        self._store = cluster.world.store
        self._known: set[bytes] = set()  # the snapshots of those that were looked at
        self.problems: list[str] = []

    @property
    def looked_at(self) -> int:
        """How many trees there were."""
        return len(self._known)

    async def watch(self, cluster: Cluster) -> None:
        """Look from time to time, until cancelled."""
        while True:
            await cluster.world.sleep_ms(LOOK_MS * cluster.pace)
            for name, writer in cluster.writers.items():
                held = writer.engine.levels.current.base
                if held.snapshot_id not in self._known:
                    self._look(name, held)

    @checks(8, "database")
    def check_i8_trees_are_those_of_their_snapshots(self) -> None:
        """Every SST of a tree that is read is one that its snapshot keeps."""
        if self.problems:
            raise Violation(self.problems[0])

    def _look(self, name: str, held: HeldTree) -> None:
        snapshot = find_snapshot(current_manifest(self._store), held.snapshot_id)
        data = snapshot and self._store.data(manifest_name(snapshot.manifest_id))
        if snapshot is None or not data:
            return  # it was lost, and the writer will hear of that
        named = decode_manifest(manifest_name(snapshot.manifest_id), data)
        kept = {info.id for info in named.leveled_ssts}
        beyond = _ids(held.tree) - kept
        self._known.add(held.snapshot_id)
        if beyond:
            ids = ", ".join(sorted(each.hex() for each in beyond))
            self.problems.append(
                f"I8: {name} reads {ids}, and its snapshot of manifest {named.manifest_id} does "
                "not keep that"
            )


def _ids(tree: Tree) -> set[bytes]:
    infos = chain(tree.l0, tree.system, chain.from_iterable(run.ssts for run in tree.runs))
    return {info.id for info in infos}
