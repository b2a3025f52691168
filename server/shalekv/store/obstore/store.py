"""An object store in a bucket of Google or a container of Azure.

`Bucket` sends each request once, counts it, and limits connections and time. obstore repeats
nothing here: retries are made above the store, so that each attempt is counted and signed again.
obstore itself has no limit on connections, and no timeout that depends on the size of a transfer.
"""

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
    Repaired,
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
from shalekv.store.obstore.errors import create_outcome, describe_failure, store_error
from shalekv.store.url import BucketUrl

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta, PutMode, PutResult


SLOWEST_BYTES_PER_S = 1024 * 1024  # adds to the timeout of a request with a body
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

# Errors of obstore when a request failed, and the error of `Bucket` when one took too long.
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

        `proves` says whether the reply to an upload has what only the provider sends. This is
        needed because obstore follows a 303 with a GET, and takes any answer to that for a success.
        """
        self.page_names = page_names
        self.batch_names = batch_names
        self.sent = RequestCounts()
        self._client = client
        self._proves = proves
        self._connections = asyncio.Semaphore(settings.connections_max)
        self._timeout_s = settings.request_timeout_ms / 1000.0

    async def put(self, key: str, data: bytes, metadata: Mapping[str, str], mode: PutMode) -> bool:
        """Upload an object; return whether the reply is proven to be the provider's.

        It is one request: an upload in parts could have no condition.
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
        """Read an object, or the bytes from `span[0]` to before `span[1]`; also its metadata."""
        async with self._sending(RequestKind.READ):
            async with self._in_time():
                found = await obstore.get_async(
                    self._client, key, options={"range": span} if span else None
                )
            first, end = found.range
            async with self._in_time(end - first):
                return found, bytes(await found.bytes_async())

    async def head(self, key: str) -> ObjectMeta:
        """Read the metadata of an object."""
        async with self._sending(RequestKind.READ), self._in_time():
            return await obstore.head_async(self._client, key)

    async def list(self, folder: str, after: str | None) -> AsyncIterator[Sequence[ObjectMeta]]:
        """List a folder, page by page.

        After a full page one more request is counted, even if there is no other page: only obstore
        knows.
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
        """Drop the client, and with it the connections."""
        del self._client

    @asynccontextmanager
    async def _sending(self, kind: RequestKind) -> AsyncIterator[None]:
        async with self._connections:
            self.sent.add(kind)
            yield

    def _in_time(self, transferred_bytes: int = 0) -> asyncio.Timeout:
        return asyncio.timeout(self._timeout_s + transferred_bytes / SLOWEST_BYTES_PER_S)


class ObstoreStore(ObjectStore):
    """A store at `place`: a folder of `bucket`, or the whole bucket.

    Times are whole seconds: Azure has no others, and Google has milliseconds only in lists.
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
            failure = describe_failure(error)
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
            # Azure has no ranges from the end, and no provider has empty ranges.
            info = await self._head("get_range", name)
            offset, length = byte_range(info.size_bytes, offset, length)
        if length == 0:
            return b""
        try:
            _, data = await self._bucket.read(self._key(name), (offset, offset + length))
        except Failed as error:
            if describe_failure(error).is_range_past_end:
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
                    # Servers without Azure's `startFrom` list all names. A folder that a console
                    # has made ends in a slash, which obstore cuts.
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
        """Read the clock: overwrite an object and read its time.

        obstore does not show the `Date` of a reply. Google accepts about one write of the same
        object per second, and answers 429 to more. That becomes `StoreUnavailable`, which the
        caller retries a little later. Reading the time of the object without a write would be
        wrong: other objects that were created since may be newer.
        """
        try:
            await self._bucket.put(self._key(CLOCK_OBJECT), b"", NO_METADATA, "overwrite")
        except Failed as error:
            raise self._error(error, "now", CLOCK_OBJECT) from None
        info = await self._head("now", CLOCK_OBJECT)
        self._latest_ms = max(self._latest_ms, info.modified_ms)
        return self._latest_ms

    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Repaired:  # noqa: ARG002
        return Repaired()

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
            failure = describe_failure(error)
        else:
            return None
        if not failure.is_object_missing:
            return store_error(failure, self.url, "delete", names[0])
        if len(names) > 1:
            # One of them was already gone, and the reply says nothing about the others.
            errors = [await self._delete((name,)) for name in names]
            return next((error for error in errors if error is not None), None)
        return None

    def _error(self, error: Exception, operation: str, name: str) -> StoreError:
        return store_error(describe_failure(error), self.url, operation, name)

    def _key(self, name: str) -> str:
        return f"{self._folder}{name}"


def _info(name: str, meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(name, meta["size"], int(meta["last_modified"].timestamp()) * 1000)
