"""One client of the two simulated stores: the plain one, and the shipped code over both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

from shalekv.errors import StoreRefused, StoreUnavailable
from shalekv.runtime import Runtime
from shalekv.store.api import NO_METADATA, CreateOutcome, PlainStore
from shalekv.store.two_phase.belonging import BelongingStore
from shalekv.store.two_phase.records import RecordStore
from tests.sim.client import SimStoreClient
from tests.sim.errors import SimulationError
from tests.sim.network import Network, NoAnswer
from tests.sim.nodes import Node
from tests.sim.two_phase.happenings import CALL, Call, Happening, Told
from tests.sim.two_phase.objects import PlainObjects

if TYPE_CHECKING:
    from asyncio import Task

# Applies a copy for a node: None when it is done, a task where it lands later; that tells what
# went wrong.
Copy = Callable[[Node, str, str], "Task[str] | None"]


class SimPlainClient(SimStoreClient, PlainStore):
    """One client of a store without conditional writes, on one node."""

    def __init__(self, objects: PlainObjects, network: Network, node: Node, copy: Copy) -> None:
        """`copy` is how the store copies."""
        super().__init__(objects, network, node)
        self._plain = objects
        self._copy = copy

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> NoReturn:
        raise SimulationError(f"{name} of {len(data)} bytes, {len(metadata)}: there is no create")

    async def put(self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA) -> None:
        CALL.get().sources.append(name)
        sent, kept = bytes(data), dict(metadata)  # what is sent can't be changed any more
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


class WatchedStore(BelongingStore):
    """The shipped store of two-phase compare-and-swap; notes what each create was told."""

    def __init__(
        self,
        plain: PlainStore,
        records: RecordStore,
        runtime: Runtime,
        node: Node,
        happened: list[Happening],
    ) -> None:
        """For `node`."""
        super().__init__(plain, records, runtime)
        self._node = node
        self._happened = happened

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        call = Call()
        token = CALL.set(call)
        told = "cancelled"
        try:
            outcome = await super().create(name, data, metadata)
            told = type(outcome).__name__
        except (StoreUnavailable, StoreRefused) as error:
            told = type(error).__name__
            raise
        finally:
            CALL.reset(token)
            sources = tuple(call.sources)
            self._happened.append(Told(self._node.label, name, bytes(data), told, sources))
        return outcome
