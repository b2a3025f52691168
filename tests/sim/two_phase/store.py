"""A store without conditional writes and a transactional store, in the place of a `SimStore`."""

from __future__ import annotations

from asyncio import Task
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from shalekv.core.two_phase import Record
from shalekv.format.names import parse_temporary_name
from shalekv.runtime import Runtime
from shalekv.store.api import ObjectStore
from tests.sim.faults import Faults
from tests.sim.network import Network, NoAnswer
from tests.sim.nodes import Node
from tests.sim.objects import DeleteWatch
from tests.sim.script import Match, Plan
from tests.sim.store import SimStore
from tests.sim.two_phase.client import SimPlainClient, WatchedStore
from tests.sim.two_phase.happenings import Happening
from tests.sim.two_phase.objects import PlainObjects
from tests.sim.two_phase.records import RecordTable, SimRecords

if TYPE_CHECKING:
    from shalekv.store.api import StoredObject
    from tests.sim.loop import SimLoop

# What may stand for the create of an object where that is held, or lost: each of its steps.
_STEPS = {"put": 1, "insert": 3, "copy": 2, "commit": 1}
_OF_RECORDS = frozenset({"insert", "commit"})


class TwoPhaseSimStore(SimStore):
    """Both stores as the world sees them. Names, deletes and `log` are without temporary objects.

    A script for creates is one for one of their steps, which the seed draws. Both stores are quiet
    or rough at the same times; which requests are lost is drawn for each by itself.
    """

    def __init__(
        self, loop: SimLoop, random: Random, faults: Faults, runtime_of: Callable[[Node], Runtime]
    ) -> None:
        """Empty stores; `runtime_of` a node is what its clients run on."""
        super().__init__(loop, random, faults)
        self.happened: list[Happening] = []
        self.records_node = Node(loop, "records")
        self.table = RecordTable(loop, self.records_node, self.happened)
        self._random = random
        self._runtime_of = runtime_of
        self._plain = PlainObjects(loop, self.node, self.happened)
        self._objects = self._plain
        seed = random.getrandbits(64)
        self._records = Network(loop, self.records_node, Random(seed), faults)
        self._slow_copies = 0.0  # the share of copies that read and write at different times
        self._page_records = random.choice([10, 1_000])

    def client(self, node: Node) -> ObjectStore:
        """The store for what runs on `node`: the shipped one, over clients of both."""
        plain = SimPlainClient(self._plain, self._network, node, self._copy)
        records = SimRecords(self.table, self._records, node, self._page_records)
        return WatchedStore(plain, records, self._runtime_of(node), node, self.happened)

    @property
    def faults(self) -> Faults:
        return self._network.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._network.faults = self._records.faults = faults
        self._slow_copies = 0.0
        if faults != Faults.none():
            drawn = Faults.swarm(self._random)
            self._records.faults = replace(
                faults,
                lost_request=drawn.lost_request,
                lost_reply=drawn.lost_reply,
                late_request=drawn.late_request,
                refused=drawn.refused,
            )
            self._slow_copies = self._random.choice([0.0, 0.1, 0.5])

    def place_near(self, node: str, one_way_ms: float) -> None:
        super().place_near(node, one_way_ms)
        self._records.near_ms[node] = one_way_ms

    @property
    def last_arrival_ms(self) -> float:
        return max(super().last_arrival_ms, (self._records.last_arrival_us + 1) / 1000)

    def names(self, prefix: str) -> list[str]:
        return [name for name in super().names(prefix) if parse_temporary_name(name) is None]

    def temporary_names(self, prefix: str) -> list[str]:
        """The temporary objects below the folder `prefix`, in order."""
        return [name for name in super().names(prefix) if parse_temporary_name(name) is not None]

    def records(self) -> list[Record]:
        """All records, in the order of their names."""
        return sorted(self.table.rows.values(), key=lambda each: each.destination.name)

    def watch_deletes(self, watch: DeleteWatch) -> None:
        def look(sender: Node, doomed: tuple[str, ...]) -> None:
            created = tuple(name for name in doomed if parse_temporary_name(name) is None)
            if created:
                watch(sender, created)

        super().watch_deletes(look)

    def _plan(self, match: Match, plan: Plan, times: int | None) -> None:
        network = self._network
        if match.operation == "create":
            step = self._random.choices(list(_STEPS), list(_STEPS.values()))[0]
            match = replace(match, operation=step)
            network = self._records if step in _OF_RECORDS else self._network
        network.script.add(match, plan, times)

    def _copy(self, sender: Node, source: str, destination: str) -> Task[str] | None:
        """What the store does when it is told to copy."""
        found = self._plain.find(source)
        is_near = sender.name in self._network.near_ms
        if is_near or self._random.random() >= self._slow_copies:
            self._plain.land(sender, destination, found)
            return None
        return self.node.spawn(self._land(sender, destination, found))

    async def _land(self, sender: Node, destination: str, found: StoredObject) -> str:
        """The second half of a copy, which may be late, or get lost; or why nobody knows."""

        def land() -> None:
            self._plain.land(sender, destination, found)

        try:
            await self._network.ask(self.node, "land", (destination,), land)
        except NoAnswer as silence:
            return silence.cause
        return ""
