"""The requests to a bucket of Google or a container of Azure: each sent once, counted and limited.

obstore repeats nothing here: whoever uses a store repeats, so that each attempt is counted and
signed anew. It doesn't limit connections either, nor tell a slow upload from a dead one: that is
done here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore

from shalekv.settings import StoreSettings
from shalekv.store.requests import RequestCounts, RequestKind

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta, PutMode, PutResult

SLOWEST_BYTES_PER_S = 1024 * 1024  # a transfer may take so much longer than a small request

# How obstore says that a request failed, and what is raised here when one took too long.
Failed = (BaseError, FileNotFoundError, ValueError, TimeoutError)


class Bucket:
    """A bucket, whose objects have keys. Every method raises one of `Failed` when it fails."""

    def __init__(
        self,
        client: AzureStore | GCSStore,
        settings: StoreSettings,
        *,
        page_names: int,
        batch_names: int,
        proves: Callable[[PutResult], bool],
    ) -> None:
        """The provider lists `page_names` at once, and deletes `batch_names`.

        `proves` tells of what an upload came to whether only the provider says so. obstore goes
        where a 303 sends it, with a GET, and takes whatever that finds for a success.
        """
        self.page_names = page_names
        self.batch_names = batch_names
        self.sent = RequestCounts()
        self._client = client
        self._proves = proves
        self._connections = asyncio.Semaphore(settings.connections_max)
        self._timeout_s = settings.request_timeout_ms / 1000.0

    async def put(self, key: str, data: bytes, metadata: Mapping[str, str], mode: PutMode) -> bool:
        """Upload an object; whether the answer is that of the store, and so proves it.

        Not in parts: those could have no condition, and be many requests.
        """
        async with self._sending(RequestKind.WRITE), self._in_time(len(data)):
            result = await obstore.put_async(
                self._client,
                key,
                data,
                attributes=dict(metadata),
                mode=mode,
                use_multipart=False,
            )
        return self._proves(result)

    async def read(self, key: str, span: tuple[int, int] | None) -> tuple[GetResult, bytes]:
        """What is said about an object, and its bytes: those from one to before another, or all."""
        async with self._sending(RequestKind.READ):
            async with self._in_time():
                found = await obstore.get_async(
                    self._client, key, options={"range": span} if span else None
                )
            first, end = found.range
            async with self._in_time(end - first):
                return found, bytes(await found.bytes_async())

    async def head(self, key: str) -> ObjectMeta:
        """What is said about an object."""
        async with self._sending(RequestKind.READ), self._in_time():
            return await obstore.head_async(self._client, key)

    async def list(self, folder: str, after: str | None) -> AsyncIterator[Sequence[ObjectMeta]]:
        """What lies in a folder, page by page.

        A page behind a full one is counted even if there is none: only obstore knows.
        """
        pages = obstore.list(self._client, folder, offset=after, chunk_size=self.page_names)
        is_last = False
        while not is_last:
            try:
                async with self._sending(RequestKind.LIST), self._in_time():
                    page = await anext(pages)
            except StopAsyncIteration:
                return
            is_last = len(page) < self.page_names
            yield page

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete at most `batch_names` objects."""
        async with self._sending(RequestKind.DELETE), self._in_time():
            await obstore.delete_async(self._client, keys)

    def close(self) -> None:
        """The connections end with the client."""
        del self._client

    @asynccontextmanager
    async def _sending(self, kind: RequestKind) -> AsyncIterator[None]:
        async with self._connections:
            self.sent.add(kind)
            yield

    def _in_time(self, transferred_bytes: int = 0) -> asyncio.Timeout:
        return asyncio.timeout(self._timeout_s + transferred_bytes / SLOWEST_BYTES_PER_S)
