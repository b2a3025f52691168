"""Processes of a simulation that want to be elected, and who was at each moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from shalekv.roles.electors.bucket import BucketElector
from shalekv.roles.electors.tenure import Tenure
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from tests.sim.nodes import Node
from tests.sim.world import World

TTL_MS = 3_000


@dataclass(frozen=True, slots=True)
class Reign:
    """One process held the lease, by true time."""

    name: str
    from_ms: float
    to_ms: float
    why: str = ""


@dataclass(slots=True)
class Candidates:
    """All who campaign in one bucket."""

    world: World
    reigning: dict[str, float] = field(default_factory=dict)  # since when
    reigns: list[Reign] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)  # what each was told of the holder
    most: int = 0  # that held the lease at one moment

    def elector(self, name: str) -> BucketElector:
        """The elector of a process."""
        node = self.world.node(name)
        runtime = self.world.runtime_for(node)
        store = CasStore(self.world.store_for(node), runtime, StoreSettings())
        return BucketElector(
            store, holder=name, ttl_ms=TTL_MS, told=lambda holder: self._told(name, holder)
        )

    def start(self, name: str) -> Node:
        """A process that campaigns for ever, and holds the lease as long as it can."""
        node = self.world.node(name)
        node.start(self._campaign(name))
        return node

    def crash(self, name: str) -> None:
        """It is gone, and with it what it held."""
        self.world.crash(name)
        self._over(name, "crashed")

    def began(self, name: str) -> None:
        """It holds the lease from now on."""
        self.reigning[name] = self.world.now_ms
        self.most = max(self.most, len(self.reigning))

    def _over(self, name: str, why: str) -> None:
        if name in self.reigning:
            began_ms = self.reigning.pop(name)
            self.reigns.append(Reign(name, began_ms, self.world.now_ms, why))

    async def _campaign(self, name: str) -> None:
        elector = self.elector(name)
        while True:
            tenure: Tenure = await elector.campaign()
            self.began(name)
            self._over(name, await tenure.keep())

    def _told(self, name: str, holder: str) -> None:
        self.told[name] = holder

    async def reigns_somebody(self) -> str:
        """Wait until somebody holds the lease: who."""
        while not self.reigning:
            await self.world.sleep_ms(10)
        return next(iter(self.reigning))
