"""I7, I12: backups and checks of the database during chaos, in some of the runs.

Batches become loads there: files that a manifest names before they exist, and a record in the log.
A backup is restored at once, and must show the state of the log. A check must find no damage.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random

from shalekv.errors import CorruptObject, IllegalState, ObjectNotFound, SnapshotNotFound
from shalekv.format.backup import Backup
from shalekv.format.names import LEVELS_FOLDER
from shalekv.jobs.backup.create import BackupJob
from shalekv.jobs.backup.repository import Repository
from shalekv.jobs.backup.restore import RestoreJob
from shalekv.jobs.fsck.check import Fsck
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.write.snapshots import Snapshots
from tests.kit.inline_runtime import gathered
from tests.sim.cluster import Cluster
from tests.sim.errors import NodeCrashed, Violation
from tests.sim.network import Match
from tests.sim.nodes import Node
from tests.sim.options import Trouble
from tests.sim.serial import SerialOrder
from tests.sim.snapshot_readers import (
    PASSING,
    Snapped,
    check_i7_snapshots_are_one_state,
    new_views,
    read_snapshot,
)
from tests.sim.stored import current_manifest

SHARE = 0.25  # share of the seeds
BETWEEN_MS = (10.0, 100.0, 1_000.0)  # a check and the next backup, at pace 1
AMID_BELOW = 0.8  # share of the rounds in which a file of a load is held meanwhile
WRITTEN = Match("create", f"{LEVELS_FOLDER}*", node="w[123]")
CRASH_SHARE = 0.2
TTL_MS = 30_000  # of the snapshot of a backup, at pace 1
CRASHES_MS = (30.0, 300.0, 3_000.0)  # from a beginning to a crash, at pace 1, at most


def is_copied(seed: int) -> bool:
    """Return whether there are loads, backups and checks in the run with this seed."""
    return Random(f"{seed}/copies").random() < SHARE


class Copies:
    """Makes backups of one database, in one repository, and checks the database."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sim = cluster.sim
        self._repository = MemoryObjects()
        self._snapped: list[Snapped] = []  # of restored databases
        self._problems: list[str] = []

    async def chaos(self, cluster: Cluster) -> None:
        """Back up and check until cancelled, most of the time while a file is on its way."""
        sim, random = self._sim, self._sim.random_for("copies")
        while True:
            await sim.sleep_ms(random.choice(BETWEEN_MS) * cluster.pace)
            drawn = random.random()
            crash_s = random.choice(CRASHES_MS) * random.random() * cluster.pace / 1_000
            if not sim.options.has(Trouble.READERS):
                continue
            node = sim.node("copier")
            if random.random() < CRASH_SHARE and sim.options.has(Trouble.CRASHES):
                sim.loop.call_later(crash_s, node.crash, context=sim.loop.root.context)
            gate = sim.store.hold(WRITTEN, times=1 if drawn < AMID_BELOW else 0)
            try:
                if drawn < AMID_BELOW:
                    await cluster.reached(gate)
                for act in (self._back_up, self.check):
                    node = sim.node("copier")
                    with suppress(NodeCrashed, *PASSING):
                        await node.run(act(node))
            finally:
                gate.release()

    def judge(self, order: SerialOrder) -> None:
        """Raise `Violation` if anything went wrong, or a restored database is not the log."""
        if self._problems:
            raise Violation(self._problems[0])
        check_i7_snapshots_are_one_state(order, self._snapped)

    async def check(self, node: Node) -> None:
        """Find no damage in the database."""
        await self._find_damage(node, self._sim.store_for(node))

    async def _back_up(self, node: Node) -> None:
        source = self._cas(node, self._sim.store_for(node))
        repository = Repository(self._cas(node, self._place(self._repository)))
        ttl_ms = int(TTL_MS * self._cluster.pace)
        try:
            backup = await BackupJob(source, repository, ttl_ms=ttl_ms).run()
        except SnapshotNotFound:
            return
        except (ObjectNotFound, IllegalState, CorruptObject) as error:
            if self._is_protected():
                self._problems.append(f"I7: a backup ends with {error!r}")
            return
        await self._restore(node, repository, backup)

    async def _restore(self, node: Node, repository: Repository, backup: Backup) -> None:
        place = self._place(MemoryObjects())
        store = self._cas(node, place)
        await RestoreJob(repository, store, _fit).run(backup)
        await self._find_damage(node, place)
        snapshot = await Snapshots(store).create(ttl_ms=None)
        read = await read_snapshot(await new_views(store), snapshot)
        self._snapped.append(Snapped(snapshot, 0, [read]))

    async def _find_damage(self, node: Node, store: ObjectStore) -> None:
        findings = await gathered(Fsck(self._cas(node, store)).findings())
        self._problems += [f"I12: fsck tells of {each}" for each in findings if each.kind.is_damage]

    def _is_protected(self) -> bool:
        """Return whether a snapshot of a backup lives: then that of the last one does."""
        now_s = self._sim.store.clock_ms() / 1_000
        snapshots = current_manifest(self._sim.store).snapshots
        ends_s = [each.snapshot_expire_time_s for each in snapshots if "backup" in each.name]
        return max(ends_s, default=0) > now_s

    def _place(self, objects: MemoryObjects) -> ObjectStore:
        return MemoryStore(self._sim.store.clock_ms, objects=objects)

    def _cas(self, node: Node, store: ObjectStore) -> CasStore:
        return CasStore(store, self._sim.runtime_for(node), StoreSettings())


async def _fit() -> None:
    """A store in memory is fit."""
