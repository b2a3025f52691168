"""A store that lets something happen before one of the requests that it gets."""

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

Interruption = Callable[[int], Awaitable[None]]


class InterruptedStore(ObjectStore):
    """Calls `before` with the number of each request, from 0 on, before it passes it on.

    A list that is read on after its first object counts as a request more.
    """

    def __init__(self, inner: ObjectStore, before: Interruption) -> None:
        self.url = inner.url
        self.sent = inner.sent
        self.cas_mode = inner.cas_mode
        self._inner = inner
        self._before = before
        self.requests = 0

    async def _request(self) -> None:
        number = self.requests
        self.requests += 1
        await self._before(number)

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        await self._request()
        return await self._inner.create(name, data, metadata)

    async def get(self, name: str) -> StoredObject:
        await self._request()
        return await self._inner.get(name)

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        await self._request()
        return await self._inner.get_range(name, offset, length)

    async def head(self, name: str) -> ObjectInfo:
        await self._request()
        return await self._inner.head(name)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        await self._request()
        listed = [info async for info in self._inner.list(prefix, start_after=start_after)]
        for info in listed:
            yield info
        if listed:
            await self._request()

    async def delete(self, names: Iterable[str]) -> None:
        await self._request()
        await self._inner.delete(names)

    async def now_ms(self) -> int:
        await self._request()
        return await self._inner.now_ms()

    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        await self._request()
        return await self._inner.recover(is_collected)

    async def close(self) -> None:
        await self._inner.close()
