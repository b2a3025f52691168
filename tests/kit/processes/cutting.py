"""A writer under load that the network cuts off from its safekeepers, by a proxy or for real."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tests.e2e.quorum.namespaces import Namespaces
from tests.e2e.quorum.uplink import Uplink
from tests.kit.processes.archived import check_archived
from tests.kit.processes.child import Child
from tests.kit.processes.history import History
from tests.kit.processes.load import Load
from tests.kit.processes.quorum_cluster import Cluster

# All that was written is in the bucket, and the WAL can be compared with what clients know.
ALONE = ("--no-with-compactor", "--no-with-collector")


class Cutting(Protocol):
    """What can come between the old writer and its safekeepers."""

    def cut(self, indices: Iterable[int], *, requests: bool = True, replies: bool = True) -> None:
        """Nothing passes to (`requests`) or from (`replies`) these."""

    def heal(self) -> None:
        """Everything passes again."""


@dataclass(slots=True)
class ByProxy:
    """The writer has its connections through a proxy, which holds what is cut."""

    way: Uplink
    cluster: Cluster

    def cut(self, indices: Iterable[int], *, requests: bool = True, replies: bool = True) -> None:
        addresses = [self.cluster.addresses[index] for index in indices]
        self.way.cut(addresses, requests=requests, replies=replies)

    def heal(self) -> None:
        self.way.heal()


@dataclass(slots=True)
class ByRoutes:
    """The writer and each safekeeper are machines; packets vanish where they are sent."""

    network: Namespaces
    cluster: Cluster
    writer: str
    _cut: set[tuple[str, str]] = field(default_factory=set)

    def cut(self, indices: Iterable[int], *, requests: bool = True, replies: bool = True) -> None:
        for index in indices:
            node = self.cluster.spaces[index]
            ways = [(self.writer, node)] * requests + [(node, self.writer)] * replies
            for way in ways:
                self.network.cut(*way)
                self._cut.add(way)

    def heal(self) -> None:
        while self._cut:
            self.network.heal(*self._cut.pop())


class Judged:
    """Loads on the writers of one cluster, and the judgement over all of them."""

    def __init__(self, cluster: Cluster, tasks: asyncio.TaskGroup, seed: int) -> None:
        """Clients run in `tasks`."""
        self.history = History(seed)
        self._cluster = cluster
        self._tasks = tasks
        self._random = Random(seed)

    def load(self, writer: Child) -> Load:
        """Put load on a writer that serves. It waits for the majority with each write: what a
        writer that is cut off acknowledges from memory, it says is in its memory alone.
        """
        load = Load(self.history, writer.listen, self._random, clients=6, memory_share=0)
        self._tasks.create_task(load.run(), name=f"load on {writer.listen}")
        return load

    async def rest(self, load: Load) -> None:
        """End a load; all of it was answered well."""
        load.stop()
        await load.ended.wait()
        assert not load.ended_by, load.reasons()

    async def end(self, writer: Child) -> None:
        """All that clients know, the writer shows and the archive holds is the same."""
        await check_archived(self._cluster.files, writer, self.history)
        assert await writer.stop() == 0, writer.report()
