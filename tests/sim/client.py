"""The simulated store as one node reaches it: the `ObjectStore` that the shipped code is given."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from shalekv.errors import StoreUnavailable
from shalekv.store.api import (
    NO_METADATA,
    CreateOutcome,
    IsCollected,
    ObjectInfo,
    ObjectStore,
    Recovered,
    StoredObject,
    Unknown,
    nothing_is_collected,
)
from shalekv.store.memory import MemoryStore
from shalekv.store.requests import RequestCounts, RequestKind
from tests.sim.errors import SimulationError
from tests.sim.network import Network, NoAnswer
from tests.sim.nodes import Node
from tests.sim.objects import Objects

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
        """Use `SimStore.client`."""
        self.url = URL
        self.sent = RequestCounts()
        self._objects = objects
        self._network = network
        self._node = node
        self._closed = False

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        sent, kept = bytes(data), dict(metadata)  # what is sent can't be changed any more
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
        return await self._read("now_ms", "", lambda store: store.now_ms())

    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:  # noqa: ARG002
        return Recovered()

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
