"""Processes that stop between two requests, at the worst moment, and go on when all has changed.

A process that edits the manifest has listed, and creates: meanwhile others edit, leases expire, and
the collector deletes what it can, the manifest with the very id that is about to be created
included (F2). A compactor is about to publish, and another has the same job (I9). A collector is
about to delete what it has found (F3). A writer that has won an epoch is about to list the WAL. A
request is held on its way to the store, or its reply on the way back, and its sender is paused.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from shalekv.core.sst_table import SstTable
from shalekv.format.names import LEVELS_FOLDER, MANIFEST_FOLDER, WAL_FOLDER, manifest_name, wal_name
from shalekv.format.names import parse_manifest_name as manifest_id_of
from tests.sim.cluster import Cluster
from tests.sim.janitors import COLLECTORS, COMPACTORS, Janitors
from tests.sim.options import Trouble
from tests.sim.script import Match
from tests.sim.stored import current_manifest
from tests.sim.workload import WRITER_NAMES

READER_NAMES = ("reader0", "reader1")
REPLICA_NAMES = ("replica1", "replica2")
BETWEEN_MS = (10.0, 1_000.0, 5_000.0)  # two stalls of one process, at pace 1
RARE = (1.0, 5.0, 20.0)  # how much longer that is in some runs
STALLS_MS = (200.0, 3_000.0, 10_000.0, 25_000.0)  # the longer ones outlast leases
REUSED_MS = 30_000.0  # so long is waited until an id is free again
COLLECTED_MS = 8_000.0  # so long is waited until slots have been collected
TWIN_MS = 10_000.0  # so long is waited until another compactor has published
LOOK_MS = 100.0  # between two looks whether it is


@dataclass(frozen=True, slots=True)
class _Point:
    """Where a process is stopped: at requests of this kind."""

    node: str
    operation: str
    name: str
    rarity: float = 1.0


POINTS = (
    *(_Point(name, "create", f"{MANIFEST_FOLDER}*") for name in (*COMPACTORS, *READER_NAMES)),
    *(_Point(name, "create", f"{MANIFEST_FOLDER}*", 4.0) for name in COLLECTORS),
    *(_Point(name, "create", f"{MANIFEST_FOLDER}*", 3.0) for name in WRITER_NAMES),
    *(_Point(name, "create", f"{MANIFEST_FOLDER}*", 2.0) for name in REPLICA_NAMES),
    *(_Point(name, "create", f"{LEVELS_FOLDER}*", 8.0) for name in COMPACTORS),
    *(_Point(name, "list", f"{WAL_FOLDER}*", 2.0) for name in WRITER_NAMES),
    *(_Point(name, "delete", "*", 4.0) for name in COLLECTORS),
)


class Stalls:
    """Stops processes of one database."""

    def __init__(self, cluster: Cluster, janitors: Janitors) -> None:
        """Nothing is stopped yet."""
        self._cluster = cluster
        self._world = cluster.world
        self._store = cluster.world.store
        self._janitors = janitors
        self.reused_count = 0  # processes that went on when their id had been free again

    async def chaos(self, cluster: Cluster) -> None:
        """Stop processes at random moments, until cancelled. All go on then."""
        rare = self._world.random_for("stalls").choice(RARE)
        async with asyncio.TaskGroup() as tasks:
            for point in POINTS:
                tasks.create_task(self._stop_at(point, rare * point.rarity, cluster))

    async def _stop_at(self, point: _Point, rare: float, cluster: Cluster) -> None:
        random = self._world.random_for(f"stalls of {point.node} at {point.operation} {point.name}")
        match = Match(point.operation, point.name, node=point.node)
        while True:
            between_ms = random.choice(BETWEEN_MS) * random.random() * 2
            await self._world.sleep_ms(between_ms * rare * cluster.pace)
            is_reply = random.random() < 0.3
            stall_ms = random.choice(STALLS_MS) * cluster.pace
            is_long = random.random() < 0.5
            if not self._world.options.has(Trouble.STALLS):
                continue
            gate = (self._store.hold_reply if is_reply else self._store.hold)(match)
            await gate.reached()
            node = self._world.find(point.node)
            try:
                if node is not None:
                    node.pause()
                    await self._change_meanwhile(point, stall_ms, random, is_long=is_long)
            finally:
                if node is not None:
                    node.resume()
                gate.release()

    async def _change_meanwhile(
        self, point: _Point, stall_ms: float, random: Random, *, is_long: bool
    ) -> None:
        """While a process is stopped, others go on for so long, or until its id is free again."""
        if point.node in COMPACTORS and random.random() < 0.5:
            self._janitors.start_twin(point.node, random)
            await self._until_compacted()
            return
        if point.operation == "list":
            self._cluster.is_undisturbed = True
            try:
                await self._until_collected()
            finally:
                self._cluster.is_undisturbed = False
            return
        if not is_long or point.operation != "create" or point.name != f"{MANIFEST_FOLDER}*":
            await self._world.sleep_ms(stall_ms)
            return
        held_id = self._highest_id() + 1  # or one that is there already
        end_ms = self._world.now_ms + REUSED_MS * self._janitors.pace
        while self._world.now_ms < end_ms:
            if self._highest_id() > held_id and self._store.data(manifest_name(held_id)) is None:
                self.reused_count += 1
                return
            await self._world.sleep_ms(LOOK_MS * self._janitors.pace)

    async def _until_collected(self) -> None:
        """Wait until slots that are not compacted now have been collected."""
        first = (self._levels()[0] or 0) + 1
        end_ms = self._world.now_ms + COLLECTED_MS * self._janitors.pace
        while self._world.now_ms < end_ms:
            is_behind = (self._levels()[0] or 0) > first
            if is_behind and self._store.data(wal_name(first)) is None:
                return
            await self._world.sleep_ms(LOOK_MS * self._janitors.pace)

    async def _until_compacted(self) -> None:
        """Wait until somebody has published a result, which may be what the stopped one has."""
        before = self._levels()
        end_ms = self._world.now_ms + TWIN_MS * self._janitors.pace
        while self._world.now_ms < end_ms and self._levels() == before:
            await self._world.sleep_ms(LOOK_MS * self._janitors.pace)

    def _levels(self) -> tuple[int | None, SstTable]:
        current = current_manifest(self._store)
        return current.wal_id_last_compacted, current.leveled_ssts

    def _highest_id(self) -> int:
        return manifest_id_of(self._store.names(MANIFEST_FOLDER)[-1]) or 0
