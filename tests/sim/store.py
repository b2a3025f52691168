"""The object store of a simulation: one set of objects, and a client of it for each node.

Requests travel (`tests.sim.network`), and are applied one at a time by the store, on a node of its
own that never fails: what a node has sent may land after the node has crashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from shalekv.errors import StoreUnavailable
from shalekv.store.api import (
    NO_METADATA,
    Created,
    CreateOutcome,
    IsCollected,
    ObjectInfo,
    ObjectStore,
    Repaired,
    RequestCounts,
    RequestKind,
    StoredObject,
    Unknown,
    nothing_is_collected,
)
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.sim.errors import SimulationError
from tests.sim.faults import Faults
from tests.sim.network import Fate, Gate, Match, Network, NoAnswer, Plan
from tests.sim.nodes import Node

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop


T = TypeVar("T")

URL = "sim://database"
KINDS = {
    "create": RequestKind.WRITE,
    "put": RequestKind.WRITE,
    "copy": RequestKind.WRITE,
    "get": RequestKind.READ,
    "get_range": RequestKind.READ,
    "head": RequestKind.READ,
    "now_ms": RequestKind.READ,
    "list": RequestKind.LIST,
    "delete": RequestKind.DELETE,
}


class SimStoreClient(ObjectStore):
    """One client of the store, on one node."""

    def __init__(self, objects: Objects, network: Network, node: Node) -> None:
        self.url = URL
        self.sent = RequestCounts()
        self._objects = objects
        self._network = network
        self._node = node
        self._closed = False

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        # later changes of the caller's data have no effect
        sent, kept = bytes(data), dict(metadata)
        create = self._objects.create
        try:
            return await self._ask("create", (name,), lambda: create(self._node, name, sent, kept))
        except NoAnswer as silence:
            return Unknown(silence.cause)

    async def get(self, name: str) -> StoredObject:
        return await self._read("get", name, lambda store: store.get(name))

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        return await self._read(
            "get_range", name, lambda store: store.get_range(name, offset, length)
        )

    async def head(self, name: str) -> ObjectInfo:
        return await self._read("head", name, lambda store: store.head(name))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        page_of = self._objects.page
        after = start_after
        while True:
            limit = self._network.faults.page_names
            try:
                page = await self._ask("list", (prefix,), lambda: page_of(prefix, after, limit))  # noqa: B023 - the request is served before the next one is made
            except NoAnswer as silence:
                raise self._unavailable("list", prefix, silence) from None
            for info in page:
                yield info
            if len(page) < limit:
                return
            after = page[-1].name

    async def delete(self, names: Iterable[str]) -> None:
        sent = tuple(names)
        delete = self._objects.delete
        try:
            await self._ask("delete", sent, lambda: delete(self._node, sent))
        except NoAnswer as silence:
            raise self._unavailable("delete", ", ".join(sent[:3]), silence) from None

    async def now_ms(self) -> int:
        now_ms = await self._read("now_ms", "", lambda store: store.now_ms())
        return now_ms + self._objects.misled_ms.get(self._node.name, 0)

    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Repaired:  # noqa: ARG002
        return Repaired()

    async def close(self) -> None:
        self._closed = True

    async def _read(
        self, operation: str, name: str, read: Callable[[MemoryStore], Coroutine[Any, Any, T]]
    ) -> T:
        objects = self._objects
        try:
            return await self._ask(operation, (name,), lambda: objects.read(read))
        except NoAnswer as silence:
            raise self._unavailable(operation, name, silence) from None

    async def _ask(self, operation: str, names: tuple[str, ...], serve: Callable[[], T]) -> T:
        if self._closed:
            raise SimulationError(f"{self._node.label} uses its store after closing it")
        self.sent.add(KINDS[operation])
        return await self._network.ask(self._node, operation, names, serve)

    def _unavailable(self, operation: str, name: str, silence: NoAnswer) -> StoreUnavailable:
        return StoreUnavailable(self.url, operation, name, silence.cause)


DeleteWatch: TypeAlias = Callable[["Node", tuple[str, ...]], None]

EPOCH_MS = 1_700_000_000_000  # time of the store's clock when a run starts


@dataclass(frozen=True, slots=True)
class Applied:
    """A change that took effect at the store: a create that created, or a delete of one object.

    `node` is the label of the sender, `data` what was created, empty for a delete.
    """

    at_us: int  # virtual time
    node: str
    operation: str  # "create" or "delete"
    name: str
    data: bytes
    clock_ms: int = 0  # time of the store's clock

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.data, digest_size=8).hexdigest()


class Objects:
    """A `MemoryStore`, so that names, ranges, lists and errors are those of the shipped code.

    It also keeps the store's clock, and a log of all that took effect.
    """

    def __init__(self, loop: SimLoop, node: Node) -> None:
        """No objects; `node` is the store, for the timeline."""
        self.log: list[Applied] = []
        self.delete_watches: list[DeleteWatch] = []
        self.misled_ms: dict[str, int] = {}  # by node: error of the time that it gets
        self.tick_ms = 1  # resolution of its clock; some stores report whole seconds
        self._loop = loop
        self._node = node
        self._clock_ahead_ms = 0
        self._objects = MemoryObjects()
        self._made_ms: dict[str, int] = {}
        self._store = MemoryStore(self.clock_ms, name="sim", objects=self._objects)

    def clock_ms(self) -> int:
        now_ms = EPOCH_MS + self._clock_ahead_ms + self._loop.now_us // 1000
        return now_ms - now_ms % self.tick_ms

    def jump_clock_ms(self, ahead_ms: int) -> None:
        if ahead_ms < 0:
            raise ValueError(f"a store's clock does not go back by {-ahead_ms} ms")
        self._clock_ahead_ms += ahead_ms

    def create(
        self, sender: Node, name: str, data: bytes, metadata: Mapping[str, str]
    ) -> CreateOutcome:
        outcome = run_now(self._store.create(name, data, metadata))
        if isinstance(outcome, Created):
            self._record(sender, "create", name, data)
        return outcome

    def delete(self, sender: Node, names: tuple[str, ...]) -> None:
        for watch in self.delete_watches:
            watch(sender, names)
        found = {name: None for name in names if self._objects.find(name)}
        run_now(self._store.delete(names))
        for name in found:
            self._record(sender, "delete", name, b"")

    def read(self, read: Callable[[MemoryStore], Coroutine[Any, Any, T]]) -> T:
        return run_now(read(self._store))

    def page(self, prefix: str, after: str, limit: int | None) -> list[ObjectInfo]:
        """The first `limit` objects of a list, all if it is None."""
        return run_now(self._page(prefix, after, limit))

    def data(self, name: str) -> bytes | None:
        """The bytes of an object, None if there is none."""
        found = self._objects.find(name)
        return None if found is None else found.data

    def first_made_ms(self, name: str) -> int:
        """Return when an object was first made, by the store's clock, even if deleted since."""
        return self._made_ms[name]

    async def _page(self, prefix: str, after: str, limit: int | None) -> list[ObjectInfo]:
        found = [info async for info in self._store.list(prefix, start_after=after)]
        return found[:limit]

    def _record(self, sender: Node, operation: str, name: str, data: bytes) -> None:
        now_ms = self.clock_ms()
        if operation == "create":
            self._made_ms.setdefault(name, now_ms)
        applied = Applied(self._loop.now_us, sender.label, operation, name, data, now_ms)
        self.log.append(applied)
        what = f"{len(data)} bytes {applied.digest}" if operation == "create" else "gone"
        self._loop.note(f"{name}: {what}", self._node)


def run_now(coro: Coroutine[Any, Any, T]) -> T:
    try:
        coro.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coro.close()
    raise SimulationError("the memory store waited, so its operation was not atomic")


class SimStore:
    """The store as the simulation sees it: faults, scripts, and a log of its changes.

    A script's `times` is the number of requests that it is for; None means all from now on.
    """

    def __init__(self, loop: SimLoop, random: Random, faults: Faults) -> None:
        self.node = Node(loop, "store")
        self._objects = Objects(loop, self.node)
        self._network = Network(loop, self.node, random, faults)

    def client(self, node: Node) -> ObjectStore:
        return SimStoreClient(self._objects, self._network, node)

    @property
    def faults(self) -> Faults:
        """Faults of requests; set it to change those of requests that are sent from now on."""
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
        """The virtual time by which all requests that were sent have arrived."""
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
        """Serve these requests, whatever faults are drawn and whatever scripts come later."""
        self._plan(match, Plan(), times)

    def _plan(self, match: Match, plan: Plan, times: int | None) -> None:
        self._network.script.add(match, plan, times)

    # --- what is there, without a request ------------------------------------------------------

    @property
    def log(self) -> list[Applied]:
        return self._objects.log

    def names(self, prefix: str) -> list[str]:
        return [info.name for info in self._objects.page(prefix, "", None)]

    def watch_deletes(self, watch: DeleteWatch) -> None:
        """Call `watch` with sender and names just before each delete takes effect."""
        self._objects.delete_watches.append(watch)

    def data(self, name: str) -> bytes | None:
        """The bytes of an object, None if there is none."""
        return self._objects.data(name)

    def first_made_ms(self, name: str) -> int:
        """The time when an object was first made, by the store's clock. REQUIRES: it was made."""
        return self._objects.first_made_ms(name)

    def clock_ms(self) -> int:
        return self._objects.clock_ms()

    @property
    def tick_ms(self) -> int:
        return self._objects.tick_ms

    def tell_time_in(self, tick_ms: int) -> None:
        """Report the store's clock, and the ages of objects, in steps of this from now on."""
        self._objects.tick_ms = tick_ms

    def jump_clock_ms(self, ahead_ms: int) -> None:
        self._objects.jump_clock_ms(ahead_ms)

    def mislead(self, node: str, ahead_ms: int) -> None:
        """Report to nodes of this name a time that is `ahead_ms` ahead, from now on.

        No object gets another age by it, as if they asked another server of the store.
        """
        self._objects.misled_ms[node] = ahead_ms
