"""Memory stores whose requests a test counts, interrupts, answers wrongly, or holds back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from shalekv.errors import ObjectNotFound, StoreBroken, StoreUnavailable
from shalekv.format import names
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import (
    NO_METADATA,
    CreateOutcome,
    IsCollected,
    ObjectInfo,
    ObjectStore,
    Repaired,
    StoredObject,
    Unknown,
    nothing_is_collected,
)
from shalekv.store.cas import CasStore, ClaimOutcome
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.inline_runtime import finish

STORE_NOW_MS = 1_700_000_000_000
FOR_EVER = 10**9  # a count that no test reaches

R = TypeVar("R")


class Request(NamedTuple):
    """One request as the store has received it."""

    number: int  # from 0 on
    operation: str  # the name of the method of `ObjectStore`
    name: str  # of the object, or the folder of a list; empty if there is none
    data: bytes = b""  # of a create
    offset: int = 0  # of a ranged read
    length: int = 0


class Lost(Exception):
    """Raised by a hook: the reply of a create is `Unknown`, of anything else `StoreUnavailable`.

    Raised before the request, it is not applied; raised after it, it was.
    """


Hook = Callable[[Request], Awaitable[None]]


async def nothing(_request: Request) -> None:
    """Let the request pass."""


def at_request(at: int, act: Callable[[], Awaitable[object]]) -> Hook:
    async def hook(request: Request) -> None:
        if request.number == at:
            await act()

    return hook


def at_each(operation: str, prefix: str, act: Callable[[], Awaitable[object]]) -> Hook:
    """Act at every such request."""

    async def hook(request: Request) -> None:
        if request.operation == operation and request.name.startswith(prefix):
            await act()

    return hook


class Gate:
    """A hook that holds such requests while it is closed."""

    def __init__(self, operation: str, prefix: str = "", *, is_open: bool = True) -> None:
        self.operation = operation
        self.prefix = prefix
        self.waiting = 0
        self.arrived = asyncio.Event()
        self._opened = asyncio.Event()
        if is_open:
            self._opened.set()

    def close(self) -> None:
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    async def __call__(self, request: Request) -> None:
        if request.operation != self.operation or not request.name.startswith(self.prefix):
            return
        self.waiting += 1
        self.arrived.set()
        try:
            await self._opened.wait()
        finally:
            self.waiting -= 1


async def at_each_request(
    run: Callable[[int], Awaitable[FaultyStore]], *, first: int = 0, step: int = 1
) -> int:
    """Call `run` with 0, 1, 2 .. until the store that it returns had no request of that number.

    Returns that number.
    """
    at = first
    while len((await run(at)).requests) > at:
        at += step
    return at


async def claim(
    store: ObjectStore,
    name: str,
    data: bytes,
    metadata: Mapping[str, str] = NO_METADATA,
    *,
    runtime: Runtime,
) -> ClaimOutcome:
    """Claim one name through a `CasStore` of its own."""
    return await CasStore(store, runtime, StoreSettings()).claim(name, data, metadata)


class Died(BaseException):
    """The process is no more."""


class MortalProcess:
    """A process that dies at a request, counted over all its stores from 0: it has no effect.

    A reply that is lost is the same as a death at the next request.
    """

    def __init__(self, dies_at: int) -> None:
        self.dies_at = dies_at
        self.requests = 0

    def store(self, inner: ObjectStore) -> FaultyStore:
        return FaultyStore(inner, before=self._before)

    async def run(self, work: Awaitable[object]) -> bool:
        try:
            await work
        except* Died:
            pass
        return self.requests <= self.dies_at

    async def _before(self, _request: Request) -> None:
        await asyncio.sleep(0)
        self.requests += 1
        if self.requests > self.dies_at:
            raise Died


async def dying_at_each_request(run: Callable[[MortalProcess], Awaitable[object]]) -> int:
    """Call `run` with a process that dies at its first request, the second ..; how many died."""
    at = 0
    while True:
        process = MortalProcess(at)
        await run(process)
        if process.requests <= at:
            return at
        at += 1


class FaultyStore(ObjectStore):
    """Passes every request on to `inner`, with hooks of the test before and after.

    A hook may wait, change the objects behind the store, raise an error in the place of the
    answer, or raise `Lost`. Lists leave out the names in `hidden`.
    """

    def __init__(
        self, inner: ObjectStore, *, before: Hook = nothing, after: Hook = nothing
    ) -> None:
        self.url = inner.url
        self.sent = inner.sent
        self.cas_mode = inner.cas_mode
        self.inner = inner
        self.before = before
        self.after = after
        self.hidden: set[str] = set()
        self.requests: list[Request] = []
        self.read_bytes = 0  # contents of objects that were read

    def asked(self, operation: str, prefix: str = "") -> list[str]:
        """The names that were asked for with this operation, in order."""
        return [
            each.name
            for each in self.requests
            if each.operation == operation and each.name.startswith(prefix)
        ]

    @property
    def reads(self) -> list[tuple[str, int, int]]:
        found = (each for each in self.requests if each.operation == "get_range")
        return [(each.name, each.offset, each.length) for each in found]

    def fail(
        self, operation: str, prefix: str = "", error: Exception | None = None, *, times: int = 1
    ) -> None:
        """Raise `error` (default: `StoreUnavailable`) before the next `times` such requests."""
        passed_on, left = self.before, times

        async def before(request: Request) -> None:
            nonlocal left
            if left and request.operation == operation and request.name.startswith(prefix):
                left -= 1
                raise error or StoreUnavailable(self.url, operation, request.name, "refused")
            await passed_on(request)

        self.before = before

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        try:
            return await self._pass(
                "create", name, lambda: self.inner.create(name, data, metadata), data=data
            )
        except Lost as lost:
            return Unknown(str(lost))

    async def get(self, name: str) -> StoredObject:
        found = await self._read("get", name, lambda: self.inner.get(name))
        self.read_bytes += len(found.data)
        return found

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        def read() -> Awaitable[bytes]:
            return self.inner.get_range(name, offset, length)

        data = await self._read("get_range", name, read, offset=offset, length=length)
        self.read_bytes += len(data)
        return data

    async def head(self, name: str) -> ObjectInfo:
        return await self._read("head", name, lambda: self.inner.head(name))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        async def listed() -> list[ObjectInfo]:
            infos = self.inner.list(prefix, start_after=start_after)
            return [info async for info in infos if info.name not in self.hidden]

        for info in await self._read("list", prefix, listed):
            yield info

    async def delete(self, names: Iterable[str]) -> None:
        doomed = tuple(names)
        await self._read("delete", ",".join(doomed), lambda: self.inner.delete(doomed))

    async def now_ms(self) -> int:
        return await self._read("now_ms", "", self.inner.now_ms)

    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Repaired:
        return await self._read("repair", "", lambda: self.inner.repair(is_collected))

    async def close(self) -> None:
        await self.inner.close()

    async def _read(
        self, operation: str, name: str, call: Callable[[], Awaitable[R]], **details: int
    ) -> R:
        try:
            return await self._pass(operation, name, call, **details)
        except Lost as lost:
            raise StoreUnavailable(self.url, operation, name, str(lost)) from lost

    async def _pass(
        self, operation: str, name: str, call: Callable[[], Awaitable[R]], **details: Any
    ) -> R:
        request = Request(len(self.requests), operation, name, **details)
        self.requests.append(request)
        await self.before(request)
        answer = await call()
        await self.after(request)
        return answer


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
        """Apply it, if the name is free, without answering."""
        return finish(self._store.create(self.name, self.data, self.metadata))

    def release(self) -> None:
        outcome = self.apply()
        if not self.answer.done():
            self.answer.set_result(outcome)

    def lose_reply(self) -> None:
        self.apply()
        self.answer.set_result(Unknown("the reply was lost"))

    def lose_request(self) -> None:
        self.answer.set_result(Unknown("the request was lost"))

    def refuse(self) -> None:
        """Answer that nothing was created, and that it may be tried again."""
        self.answer.set_exception(StoreUnavailable("held://", "create", self.name, "refused"))

    def break_disk(self) -> None:
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
        while len(self.held) < count:
            self._arrival.clear()
            await self._arrival.wait()
        return self.held[count - 1]

    @property
    def waiting(self) -> list[HeldCreate]:
        return [held for held in self.held if not held.answer.done()]

    def release_all(self) -> None:
        self.is_holding = False
        for held in self.waiting:
            held.release()

    def data(self, name: str) -> bytes:
        found = self.objects.find(name)
        if found is None:
            raise ObjectNotFound(self.url, "data", name, "no object has this name")
        return found.data
