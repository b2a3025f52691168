"""Scans that clients read slowly, while what they read is compacted and collected (I7)."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from random import Random

from shalekv.errors import (
    OutcomeUnknown,
    Overloaded,
    SnapshotNotFound,
    Stopping,
    StoreUnavailable,
)
from shalekv.roles.service import Call
from shalekv.roles.writer import Writer
from shalekv.v1 import kv_pb2
from tests.sim.cluster import Cluster
from tests.sim.errors import NodeCrashed
from tests.sim.history import Got, ScanOp
from tests.sim.options import Trouble

SCANS = 2
BETWEEN_MS = (0.0, 500.0, 5_000.0)  # two messages of one scan, at pace 1
ENDS = (
    NodeCrashed,
    Stopping,
    OutcomeUnknown,
    Overloaded,
    SnapshotNotFound,
    StoreUnavailable,
)


class OpenScans:
    """Slow clients. What they get to the end is checked as any scan is."""

    def __init__(self, cluster: Cluster) -> None:
        """None of them reads yet."""
        self._cluster = cluster
        self._world = cluster.world
        self.endings: Counter[str] = Counter()

    async def keep_some_open(self, cluster: Cluster) -> None:
        """Read slowly, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(SCANS):
                random = cluster.world.random_for(f"slow client {number}")
                tasks.create_task(self._client(random))

    async def _client(self, random: Random) -> None:
        while True:
            await self._world.sleep_ms(500.0 * self._cluster.pace)
            names = [each for each in self._cluster.writers if each not in self._cluster.avoided]
            if not names or not self._world.options.has(Trouble.SCANS):
                continue
            name = random.choice(names)
            writer = self._cluster.writers[name]
            invoked_us = self._world.loop.now_us
            try:
                node = self._world.node(name)
                seq, replied_us, entries = await node.run(self._scan(writer, random))
            except ENDS as error:
                self.endings[type(error).__name__] += 1
                continue
            self.endings["done"] += 1
            self._cluster.history.scans.append(
                ScanOp(writer.epoch, invoked_us, replied_us, seq, entries)
            )

    async def _scan(
        self, writer: Writer, random: Random
    ) -> tuple[int, int, tuple[tuple[bytes, Got], ...]]:
        """The number of the view, when its first message came, and all that is in it."""
        entries: list[tuple[bytes, Got]] = []
        seq = 0
        first_us: int | None = None
        request = kv_pb2.ScanRequest(reverse=random.random() < 0.3)
        async with aclosing(writer.kv.scan(request, Call())) as replies:  # type: ignore[type-var]
            async for reply in replies:
                seq = reply.header.seq
                first_us = self._world.loop.now_us if first_us is None else first_us
                entries += [(e.key, Got(e.value, e.seq, e.expire_at_ms)) for e in reply.entries]
                await self._world.sleep_ms(random.choice(BETWEEN_MS) * self._cluster.pace)
        return seq, first_us or 0, tuple(entries)
