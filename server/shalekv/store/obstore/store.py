"""A store in a bucket of Google or a container of Azure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore

from shalekv.errors import StoreError
from shalekv.settings import StoreSettings
from shalekv.store.api import (
    NO_METADATA,
    Created,
    CreateOutcome,
    IsCollected,
    ObjectInfo,
    ObjectStore,
    Recovered,
    RequestCounts,
    RequestKind,
    StoredObject,
    Unknown,
    byte_range,
    check_name,
    check_new_name,
    check_prefix,
    nothing_is_collected,
)
from shalekv.store.obstore.errors import create_outcome, read_failure, store_error
from shalekv.store.url import BucketUrl

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta, PutMode, PutResult


# --- bucket
# The requests to a bucket of Google or a container of Azure: each sent once, counted and limited.
#
# obstore repeats nothing here: whoever uses a store repeats, so that each attempt is counted and
# signed anew. It doesn't limit connections either, nor tell a slow upload from a dead one: that
# is done here.


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


# --- store


CLOCK_OBJECT = "clock"  # beside the folders of objects, and so in no list
STANDARD = frozenset(  # attributes that are no user metadata
    {
        "Cache-Control",
        "Content-Disposition",
        "Content-Encoding",
        "Content-Language",
        "Content-Type",
        "Storage-Class",
    }
)


class ObstoreStore(ObjectStore):
    """A store at `place`, which is a folder of `bucket` or all of it.

    Times are whole seconds: Azure has no others, and Google tells milliseconds in lists alone.
    """

    def __init__(self, place: BucketUrl, bucket: Bucket) -> None:
        self.url = str(place)
        self.sent = bucket.sent
        self._bucket = bucket
        self._folder = f"{place.folder}/" if place.folder else ""
        self._latest_ms = 0

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        check_new_name(name)
        try:
            is_proven = await self._bucket.put(self._key(name), data, metadata, "create")
        except Failed as error:
            failure = read_failure(error)
        else:
            return Created() if is_proven else Unknown("another server than the store's answered")
        outcome = create_outcome(failure)
        if outcome is None:
            raise store_error(failure, self.url, "create", name)
        return outcome

    async def get(self, name: str) -> StoredObject:
        check_name(name)
        try:
            found, data = await self._bucket.read(self._key(name), None)
        except Failed as error:
            raise self._error(error, "get", name) from None
        kept = {key: text for key, text in found.attributes.items() if key not in STANDARD}
        return StoredObject(_info(name, found.meta), data, MappingProxyType(kept))

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        check_name(name)
        if offset < 0 or length <= 0:
            # Azure has no ranges that count from the end, and no store has empty ones.
            info = await self._head("get_range", name)
            offset, length = byte_range(info.size_bytes, offset, length)
        if length == 0:
            return b""
        try:
            _, data = await self._bucket.read(self._key(name), (offset, offset + length))
        except Failed as error:
            if read_failure(error).is_behind_the_end:
                return b""
            raise self._error(error, "get_range", name) from None
        return data

    async def head(self, name: str) -> ObjectInfo:
        return await self._head("head", name)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        is_inside = start_after.startswith(prefix)
        if not is_inside and start_after.encode() > prefix.encode():
            return
        first = start_after.encode() if is_inside else b""
        after = self._key(start_after) if is_inside else None
        try:
            async for page in self._bucket.list(self._key(prefix[:-1]), after):
                for meta in page:
                    name = meta["path"].removeprefix(self._folder)
                    # Servers that do not know where Azure's lists may begin show all names; and
                    # obstore cuts the slash from a name that ends in one, as a console's folders.
                    if name.startswith(prefix) and name.encode() > first:
                        yield _info(name, meta)
        except Failed as error:
            raise self._error(error, "list", prefix) from None

    async def delete(self, names: Iterable[str]) -> None:
        doomed = tuple(names)
        for name in doomed:
            check_name(name)
        size = self._bucket.batch_names
        async with asyncio.TaskGroup() as tasks:
            deletions = [
                tasks.create_task(self._delete(doomed[first : first + size]))
                for first in range(0, len(doomed), size)
            ]
        for deletion in deletions:
            if (error := deletion.result()) is not None:
                raise error

    async def now_ms(self) -> int:
        """The time of an object that is overwritten for it: obstore shows no `Date` of a reply.

        Google takes about one write of the same object per second, and answers 429 to more. That
        becomes `StoreUnavailable`, and whoever reads the clock repeats it a little later. To ask
        for the object's time instead would be wrong: what was created since may be newer.
        """
        try:
            await self._bucket.put(self._key(CLOCK_OBJECT), b"", NO_METADATA, "overwrite")
        except Failed as error:
            raise self._error(error, "now", CLOCK_OBJECT) from None
        info = await self._head("now", CLOCK_OBJECT)
        self._latest_ms = max(self._latest_ms, info.modified_ms)
        return self._latest_ms

    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:  # noqa: ARG002
        return Recovered()

    async def close(self) -> None:
        self._bucket.close()

    async def _head(self, operation: str, name: str) -> ObjectInfo:
        check_name(name)
        try:
            return _info(name, await self._bucket.head(self._key(name)))
        except Failed as error:
            raise self._error(error, operation, name) from None

    async def _delete(self, names: tuple[str, ...]) -> StoreError | None:
        try:
            await self._bucket.delete([self._key(name) for name in names])
        except Failed as error:
            failure = read_failure(error)
        else:
            return None
        if not failure.is_of_object:
            return store_error(failure, self.url, "delete", names[0])
        if len(names) > 1:
            # One of them was gone before, and nobody says what became of the others.
            errors = [await self._delete((name,)) for name in names]
            return next((error for error in errors if error is not None), None)
        return None

    def _error(self, error: Exception, operation: str, name: str) -> StoreError:
        return store_error(read_failure(error), self.url, operation, name)

    def _key(self, name: str) -> str:
        return f"{self._folder}{name}"


def _info(name: str, meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(name, meta["size"], int(meta["last_modified"].timestamp()) * 1000)
