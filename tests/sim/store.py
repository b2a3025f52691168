"""The object store of a simulation: one world of objects, and a client of it for each node.

Requests travel (`tests.sim.network`), and are applied one at a time by the store, on a node of its
own that never fails: what a node has sent may land after the node has crashed.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from shalekv.store.api import ObjectStore
from tests.sim.client import SimStoreClient
from tests.sim.faults import Faults
from tests.sim.network import Network
from tests.sim.nodes import Node
from tests.sim.objects import Applied, DeleteWatch, Objects
from tests.sim.script import Fate, Gate, Match, Plan

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop


class SimStore:
    """The store as the world sees it: faults, scripts, and what has happened.

    A script's `times` is the number of requests that it is for; None means all from now on.
    """

    def __init__(self, loop: SimLoop, random: Random, faults: Faults) -> None:
        self.node = Node(loop, "store")
        self._objects = Objects(loop, self.node)
        self._network = Network(loop, self.node, random, faults)

    def client(self, node: Node) -> ObjectStore:
        """The store for what runs on `node`."""
        return SimStoreClient(self._objects, self._network, node)

    @property
    def faults(self) -> Faults:
        """How requests are treated; set it to change that for those sent from now on."""
        return self._network.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._network.faults = faults

    def place_near(self, node: str, one_way_ms: float) -> None:
        """From now on, requests of nodes of this name, and replies to them, take this long.

        No faults are drawn for them, and their senders wait for as long as they are held.
        """
        self._network.near_ms[node] = one_way_ms

    @property
    def last_arrival_ms(self) -> float:
        """When the last of all requests that were sent has arrived, virtual time."""
        return (self._network.last_arrival_us + 1) / 1000

    # --- scripts -------------------------------------------------------------------------------

    def hold(self, match: Match, *, times: int | None = 1) -> Gate:
        """Requests that arrive are not applied before the gate releases them."""
        gate = Gate()
        self._plan(match, Plan(request_gate=gate), times)
        return gate

    def hold_reply(self, match: Match, *, times: int | None = 1) -> Gate:
        """Requests are applied, but not answered before the gate releases the replies."""
        gate = Gate()
        self._plan(match, Plan(reply_gate=gate), times)
        return gate

    def lose_request(self, match: Match, *, times: int | None = 1) -> None:
        self._plan(match, Plan(Fate.LOST_REQUEST), times)

    def lose_reply(self, match: Match, *, times: int | None = 1) -> None:
        self._plan(match, Plan(Fate.LOST_REPLY), times)

    def delay(self, match: Match, *, times: int | None = 1) -> None:
        """Requests are not answered, and applied `Faults.late_ms` after their sender gave up."""
        self._plan(match, Plan(Fate.LATE_REQUEST), times)

    def refuse(self, match: Match, *, times: int | None = 1) -> None:
        self._plan(match, Plan(Fate.REFUSED), times)

    def spare(self, match: Match, *, times: int | None = 1) -> None:
        """Requests are served, whatever faults are drawn and whatever scripts come later."""
        self._plan(match, Plan(), times)

    def _plan(self, match: Match, plan: Plan, times: int | None) -> None:
        self._network.script.add(match, plan, times)

    # --- what is there, without a request ------------------------------------------------------

    @property
    def log(self) -> list[Applied]:
        return self._objects.log

    def names(self, prefix: str) -> list[str]:
        """The names below the folder `prefix`, in order."""
        return [info.name for info in self._objects.page(prefix, "", None)]

    def watch_deletes(self, watch: DeleteWatch) -> None:
        """Call `watch` with sender and names just before each delete takes effect."""
        self._objects.delete_watches.append(watch)

    def data(self, name: str) -> bytes | None:
        """The bytes of an object, None if there is none."""
        return self._objects.data(name)

    def first_made_ms(self, name: str) -> int:
        """When an object was first made, by the store's clock. REQUIRES: it was made."""
        return self._objects.first_made_ms(name)

    def clock_ms(self) -> int:
        return self._objects.clock_ms()

    @property
    def tick_ms(self) -> int:
        """What the store's clock shows is true for so long."""
        return self._objects.tick_ms

    def tell_time_in(self, tick_ms: int) -> None:
        """From now on the store's clock, and the ages of objects, are told in steps of this."""
        self._objects.tick_ms = tick_ms

    def jump_clock_ms(self, ahead_ms: int) -> None:
        self._objects.jump_clock_ms(ahead_ms)
