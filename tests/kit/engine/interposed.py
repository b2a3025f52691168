"""A store that lets a test act before and after each request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

from shalekv.store.api import (
    NO_METADATA,
    CreateOutcome,
    IsCollected,
    ObjectInfo,
    ObjectStore,
    Recovered,
    StoredObject,
    nothing_is_collected,
)

Act = Callable[[str, str], Awaitable[None]]  # operation, name of the object or folder


async def nothing(_operation: str, _name: str) -> None:
    """Does nothing."""


class InterposedStore(ObjectStore):
    """Passes everything on to `inner`, after `before` and before `after`."""

    def __init__(self, inner: ObjectStore, before: Act = nothing, after: Act = nothing) -> None:
        self.url = inner.url
        self.sent = inner.sent
        self.cas_mode = inner.cas_mode
        self._inner = inner
        self.before = before
        self.after = after

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        await self.before("create", name)
        outcome = await self._inner.create(name, data, metadata)
        await self.after("create", name)
        return outcome

    async def get(self, name: str) -> StoredObject:
        await self.before("get", name)
        found = await self._inner.get(name)
        await self.after("get", name)
        return found

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        await self.before("get_range", name)
        data = await self._inner.get_range(name, offset, length)
        await self.after("get_range", name)
        return data

    async def head(self, name: str) -> ObjectInfo:
        await self.before("head", name)
        info = await self._inner.head(name)
        await self.after("head", name)
        return info

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        await self.before("list", prefix)
        async for info in self._inner.list(prefix, start_after=start_after):
            yield info
        await self.after("list", prefix)

    async def delete(self, names: Iterable[str]) -> None:
        await self.before("delete", "")
        await self._inner.delete(names)
        await self.after("delete", "")

    async def now_ms(self) -> int:
        await self.before("now_ms", "")
        now_ms = await self._inner.now_ms()
        await self.after("now_ms", "")
        return now_ms

    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        return await self._inner.recover(is_collected)

    async def close(self) -> None:
        await self._inner.close()
