"""A store without conditional writes and a transactional store, in the place of a `SimStore`."""

from __future__ import annotations

import asyncio
from asyncio import Task
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, NoReturn

from shalekv.errors import StoreRefused, StoreUnavailable
from shalekv.format.names import parse_temporary_name
from shalekv.protocol.two_phase import CreateRecord
from shalekv.runtime import Runtime
from shalekv.store.api import NO_METADATA, CreateOutcome, ObjectStore, PlainStore, StoredObject
from shalekv.store.two_phase.opening import CheckedTwoPhaseStore
from shalekv.store.two_phase.records import RecordStore
from tests.sim.errors import SimulationError
from tests.sim.faults import Faults
from tests.sim.network import Match, Network, NoAnswer, Plan
from tests.sim.nodes import Node
from tests.sim.store import DeleteWatch, Objects, SimStore, SimStoreClient, run_now
from tests.sim.two_phase.records import (
    CALL,
    Call,
    Change,
    CreateEnded,
    Happening,
    ObjectChanged,
    RecordTable,
    SimRecords,
)

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop


_CHANGES = {"create": Change.COPIED, "copy": Change.COPIED, "put": Change.PUT}


class PlainObjects(Objects):
    """Reports each change: `log` has the objects that came and went, as for other stores.

    Temporary objects, and copies over existing objects, are among the events but not in `log`. The
    author of an object is the node that has put its bytes, not one that helped and copied them.
    """

    def __init__(self, loop: SimLoop, node: Node, happened: list[Happening]) -> None:
        super().__init__(loop, node)
        self._happened = happened
        self._authors: dict[bytes, Node] = {}  # by the bytes that they have put

    def put(self, sender: Node, name: str, data: bytes, metadata: Mapping[str, str]) -> None:
        run_now(self._store.put(name, data, metadata))
        self._authors.setdefault(data, sender)
        self._record(sender, "put", name, data)

    def find(self, source: str) -> StoredObject:
        """Return the source of a copy. Raises `ObjectNotFound`."""
        return run_now(self._store.get(source))

    def land(self, sender: Node, name: str, found: StoredObject) -> None:
        """Write the bytes of a copy, over whatever is there."""
        operation = "create" if self._objects.find(name) is None else "copy"
        run_now(self._store.put(name, found.data, found.metadata))
        self._record(sender, operation, name, found.data)

    def _record(self, sender: Node, operation: str, name: str, data: bytes) -> None:
        if operation in {"create", "delete"} and parse_temporary_name(name) is None:
            super()._record(self._authors.get(data, sender), operation, name, data)
        else:
            self._loop.note(f"{name}: {operation}", self._node)
        change = _CHANGES.get(operation, Change.DELETED)
        self._happened.append(ObjectChanged(sender.label, change, name, data))


# Applies a copy for a node: None when it is done, a task if it lands later, whose result is the
# problem.
Copy = Callable[[Node, str, str], "Task[str] | None"]


class SimPlainClient(SimStoreClient, PlainStore):
    """One client of a store without conditional writes, on one node."""

    def __init__(self, objects: PlainObjects, network: Network, node: Node, copy: Copy) -> None:
        super().__init__(objects, network, node)
        self._plain = objects
        self._copy = copy

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> NoReturn:
        raise SimulationError(f"{name} of {len(data)} bytes, {len(metadata)}: there is no create")

    async def put(self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA) -> None:
        CALL.get().sources.append(name)
        # later changes of the caller's data have no effect
        sent, kept = bytes(data), dict(metadata)
        put = self._plain.put
        try:
            await self._ask("put", (name,), lambda: put(self._node, name, sent, kept))
        except NoAnswer as silence:
            raise self._unavailable("put", name, silence) from None

    async def copy(self, source: str, destination: str) -> None:
        copy, names = self._copy, (source, destination)
        try:
            landing = await self._ask("copy", names, lambda: copy(self._node, *names))
        except NoAnswer as silence:
            raise self._unavailable("copy", source, silence) from None
        problem = "" if landing is None else await asyncio.shield(landing)
        if problem:
            raise StoreUnavailable(self.url, "copy", source, problem)


class WatchedStore(CheckedTwoPhaseStore):
    """The shipped store of two-phase compare-and-swap; records the outcome of each create."""

    def __init__(
        self,
        plain: PlainStore,
        records: RecordStore,
        runtime: Runtime,
        node: Node,
        happened: list[Happening],
    ) -> None:
        super().__init__(plain, records, runtime)
        self._node = node
        self._happened = happened

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        call = Call()
        token = CALL.set(call)
        ended = "cancelled"
        try:
            outcome = await super().create(name, data, metadata)
            ended = type(outcome).__name__
        except (StoreUnavailable, StoreRefused) as error:
            ended = type(error).__name__
            raise
        finally:
            CALL.reset(token)
            sources = tuple(call.sources)
            self._happened.append(CreateEnded(self._node.label, name, bytes(data), ended, sources))
        return outcome


# Steps of a create, each of which may be held or lost in its place.
_STEPS = {"put": 1, "insert": 3, "copy": 2, "commit": 1}
_OF_RECORDS = frozenset({"insert", "commit"})


class TwoPhaseSimStore(SimStore):
    """Both stores as the simulation sees them. Names, deletes and `log` omit temporary objects.

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

    def records(self) -> list[CreateRecord]:
        return sorted(self.table.rows.values(), key=lambda each: each.destination.name)

    def watch_deletes(self, watch: DeleteWatch) -> None:
        def check(sender: Node, doomed: tuple[str, ...]) -> None:
            created = tuple(name for name in doomed if parse_temporary_name(name) is None)
            if created:
                watch(sender, created)

        super().watch_deletes(check)

    def _plan(self, match: Match, plan: Plan, times: int | None) -> None:
        network = self._network
        if match.operation == "create":
            step = self._random.choices(list(_STEPS), list(_STEPS.values()))[0]
            match = replace(match, operation=step)
            network = self._records if step in _OF_RECORDS else self._network
        network.script.add(match, plan, times)

    def _copy(self, sender: Node, source: str, destination: str) -> Task[str] | None:
        found = self._plain.find(source)
        is_near = sender.name in self._network.near_ms
        if is_near or self._random.random() >= self._slow_copies:
            self._plain.land(sender, destination, found)
            return None
        return self.node.spawn(self._land(sender, destination, found))

    async def _land(self, sender: Node, destination: str, found: StoredObject) -> str:
        """Do the second half of a copy, which may be late or lost; return why its outcome is
        unknown.
        """

        def land() -> None:
            self._plain.land(sender, destination, found)

        try:
            await self._network.ask(self.node, "land", (destination,), land)
        except NoAnswer as silence:
            return silence.cause
        return ""
