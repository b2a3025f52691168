"""A store whose creates wait for the test to say what becomes of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from shalekv.errors import ObjectNotFound, StoreBroken, StoreUnavailable
from shalekv.format import names
from shalekv.store.api import NO_METADATA, CreateOutcome, Unknown
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.inline_runtime import finish

STORE_NOW_MS = 1_700_000_000_000


class HeldCreate:
    """One create that has arrived. Each method but `apply` answers it; one answer only."""

    def __init__(
        self, store: MemoryStore, name: str, data: bytes, metadata: Mapping[str, str]
    ) -> None:
        self.name = name
        self.data = data
        self.metadata = metadata
        self.answer: asyncio.Future[CreateOutcome] = asyncio.get_running_loop().create_future()
        self._store = store

    def apply(self) -> CreateOutcome:
        """Let it take effect, if the name is free; nobody is told."""
        return finish(self._store.create(self.name, self.data, self.metadata))

    def release(self) -> None:
        """Apply it, and answer."""
        outcome = self.apply()
        if not self.answer.done():
            self.answer.set_result(outcome)

    def lose_reply(self) -> None:
        """Apply it, and answer that nobody knows."""
        self.apply()
        self.answer.set_result(Unknown("the reply was lost"))

    def lose_request(self) -> None:
        """Answer that nobody knows; `apply` may follow later."""
        self.answer.set_result(Unknown("the request was lost"))

    def refuse(self) -> None:
        """Answer that nothing was created, and that it may be tried again."""
        self.answer.set_exception(StoreUnavailable("held://", "create", self.name, "refused"))

    def break_disk(self) -> None:
        """Answer that nothing more may be written."""
        self.answer.set_exception(StoreBroken("held://", "create", self.name, "sync failed"))


class HeldStore(MemoryStore):
    """Holds creates below `folder`; everything else is a `MemoryStore` on the same objects."""

    def __init__(
        self,
        objects: MemoryObjects | None = None,
        *,
        folder: str = names.WAL_FOLDER,
        now_ms: Callable[[], int] = lambda: STORE_NOW_MS,
    ) -> None:
        objects = MemoryObjects() if objects is None else objects
        super().__init__(now_ms, name="held", objects=objects)
        self.free = MemoryStore(now_ms, name="free", objects=objects)
        self.objects = objects
        self.folder = folder
        self.is_holding = True
        self.held: list[HeldCreate] = []  # in the order of their arrival, answered ones included
        self._arrival = asyncio.Event()

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        if not self.is_holding or not name.startswith(self.folder):
            return await self.free.create(name, data, metadata)
        held = HeldCreate(self.free, name, data, metadata)
        self.held.append(held)
        self._arrival.set()
        return await held.answer

    async def arrived(self, count: int) -> HeldCreate:
        """Wait for the `count`-th create; that one."""
        while len(self.held) < count:
            self._arrival.clear()
            await self._arrival.wait()
        return self.held[count - 1]

    @property
    def waiting(self) -> list[HeldCreate]:
        """Those that are not answered yet."""
        return [held for held in self.held if not held.answer.done()]

    def let_go(self) -> None:
        """Hold nothing more, and release what is held."""
        self.is_holding = False
        for held in self.waiting:
            held.release()

    def data(self, name: str) -> bytes:
        """The bytes of an object that is there."""
        found = self.objects.find(name)
        if found is None:
            raise ObjectNotFound(self.url, "data", name, "no object has this name")
        return found.data
