"""The objects of a simulated store, where requests are applied one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from shalekv.store.api import Created, CreateOutcome, ObjectInfo
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.sim.errors import SimulationError
from tests.sim.nodes import Node

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop

T = TypeVar("T")
DeleteWatch: TypeAlias = Callable[["Node", tuple[str, ...]], None]

EPOCH_MS = 1_700_000_000_000  # what the store's clock shows when a run starts


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
    clock_ms: int = 0  # what the store's clock told then

    @property
    def digest(self) -> str:
        """A short hash of `data`."""
        return hashlib.blake2b(self.data, digest_size=8).hexdigest()


class Objects:
    """A `MemoryStore`, so that names, ranges, lists and errors are those of the shipped code.

    It also keeps the store's clock, and a log of all that took effect.
    """

    def __init__(self, loop: SimLoop, node: Node) -> None:
        """No objects; `node` is the store, for the timeline."""
        self.log: list[Applied] = []
        self.delete_watches: list[DeleteWatch] = []
        self.tick_ms = 1  # the least that its clock tells; stores there are that tell seconds
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
        """What `read` finds."""
        return run_now(read(self._store))

    def page(self, prefix: str, after: str, limit: int | None) -> list[ObjectInfo]:
        """The first `limit` objects of a list, all if it is None."""
        return run_now(self._page(prefix, after, limit))

    def data(self, name: str) -> bytes | None:
        """The bytes of an object, None if there is none."""
        found = self._objects.find(name)
        return None if found is None else found.data

    def first_made_ms(self, name: str) -> int:
        """When an object was first made, by the store's clock, whatever came of it since."""
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
    """The result of a coroutine that never waits."""
    try:
        coro.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coro.close()
    raise SimulationError("the memory store waited, so its operation was not atomic")
