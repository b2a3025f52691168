"""An object store in a bucket of S3, or of a server with S3's protocol.

`create` is one PutObject with ``If-None-Match: *``. Large SSTs of the levels are uploaded in parts
instead, and the request that completes the upload carries the condition.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import structlog

from shalekv.format.names import LEVELS_FOLDER
from shalekv.runtime import Runtime
from shalekv.settings import MIB, S3Reads, StoreSettings
from shalekv.store.api import (
    NO_METADATA,
    Created,
    CreateOutcome,
    Exists,
    IsCollected,
    ObjectInfo,
    PlainStore,
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
from shalekv.store.s3 import requests
from shalekv.store.s3.answers import Failed, RequestOutcome, S3Place
from shalekv.store.s3.client import ClientOptions
from shalekv.store.s3.requests import Calls, delete_batch, list_objects
from shalekv.store.s3.uploads import Parts, Upload, abort_stale_uploads
from shalekv.store.url import BucketUrl

DELETE_BATCH = 1_000  # the most that S3 accepts
IF_ABSENT: Mapping[str, str] = MappingProxyType({"IfNoneMatch": "*"})
ALWAYS: Mapping[str, str] = MappingProxyType({})
# A failed part is sent again: 16 MiB take a second at 128 Mbit/s. Four parts at once fill a
# connection to S3 of 1 Gbit/s; more take more memory.
PART_BYTES = 16 * MIB
PART_UPLOADS_MAX = 4
ABORT_AGE_MS = 86_400_000  # a day: no upload of a live process takes so long
UPLOAD_CHECK_INTERVAL_MS = 3_600_000
NO_OBJECT = "clock"  # beside the folders of objects; requested only for the time in the reply

log = structlog.get_logger()


class S3Store(PlainStore):
    """A store in `place`. Stores of one configuration share a client and its connections."""

    def __init__(self, place: BucketUrl, runtime: Runtime, settings: StoreSettings) -> None:
        """Open nothing yet. Raises `InvalidSetting` when `settings` describe no valid client."""
        options = ClientOptions.of(settings)
        self.url = str(place)
        self.sent = RequestCounts()
        self._bucket = place.bucket
        self._root = f"{place.folder}/" if place.folder else ""
        self._parts = Parts(PART_BYTES, PART_UPLOADS_MAX)
        self._multipart_bytes = settings.multipart_bytes
        self._clock = runtime.clock
        self._next_upload_check_ms = -math.inf
        shown = S3Place(place.bucket, options.endpoint_url or "Amazon S3", options.region)
        is_direct = settings.s3_reads is S3Reads.DIRECT
        self._calls = Calls(shown, options, runtime, self.sent, is_direct=is_direct)

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        check_new_name(name)
        try:
            await self._upload("create", name, data, metadata, IF_ABSENT)
        except Failed as failed:
            match failed.failure.outcome:
                case RequestOutcome.EXISTS:
                    return Exists()
                case (
                    RequestOutcome.UNCERTAIN | RequestOutcome.ABSENT
                ):  # no store answers ABSENT to a create
                    return Unknown(failed.failure.problem)
                case _:
                    raise failed.failure.error(self.url, "create", name) from None
        return Created()

    async def put(self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA) -> None:
        check_new_name(name)
        with self._store_errors("put", name):
            await self._upload("put", name, data, metadata, ALWAYS)

    async def copy(self, source: str, destination: str) -> None:
        check_name(source)
        check_new_name(destination)
        call = requests.copy(self._bucket, self._key(source), self._key(destination))
        try:
            await self._calls.attempt(RequestKind.WRITE, "copy", call)
        except Failed as failed:
            is_absent = failed.failure.outcome is RequestOutcome.ABSENT
            name = source if is_absent else destination
            raise failed.failure.error(self.url, "copy", name) from None

    async def get(self, name: str) -> StoredObject:
        check_name(name)
        with self._store_errors("get", name):
            call = requests.get(self._bucket, self._key(name))
            found = await self._calls.attempt(RequestKind.READ, "get", call)
        info = ObjectInfo(name, len(found.data), found.modified_ms)
        return StoredObject(info, found.data, found.metadata)

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        check_name(name)
        byte_range(0, offset, length)  # refuses a negative length
        if length == 0:
            await self._head("get_range", name)
            return b""
        # A range from the end has no length in HTTP: the whole rest is requested, and cut below.
        wanted = f"bytes={offset}" if offset < 0 else f"bytes={offset}-{offset + length - 1}"
        with self._store_errors("get_range", name):
            try:
                found = await self._calls.get_part(self._bucket, self._key(name), wanted)
            except Failed as failed:
                if failed.failure.outcome is RequestOutcome.BEHIND_THE_END:
                    return b""
                raise
        if found.is_part:
            return found.data[:length]
        first, taken = byte_range(len(found.data), offset, length)  # the server ignored the range
        return found.data[first : first + taken]

    async def head(self, name: str) -> ObjectInfo:
        check_name(name)
        return await self._head("head", name)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        with self._store_errors("list", prefix):
            found = list_objects(self._calls, self._bucket, self._root, prefix, start_after)
            async for info in found:
                yield info

    async def delete(self, names: Iterable[str]) -> None:
        doomed = list(dict.fromkeys(names))
        for name in doomed:
            check_name(name)
        for first in range(0, len(doomed), DELETE_BATCH):
            batch = [self._key(name) for name in doomed[first : first + DELETE_BATCH]]
            with self._store_errors("delete", doomed[first]):
                failed = await delete_batch(self._calls, self._bucket, batch)
            if failed is not None:
                name = failed.key.removeprefix(self._root)
                raise failed.failure.error(self.url, "delete", name)

    async def now_ms(self) -> int:
        with self._store_errors("now", NO_OBJECT):
            call = requests.time_of_day(self._bucket, self._key(NO_OBJECT))
            return self._calls.clock_ms(await self._calls.attempt(RequestKind.READ, "now", call))

    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Repaired:
        """Abort abandoned multipart uploads, at most once an hour, and only for collectors."""
        clock_ms = self._clock.monotonic_ms()
        if is_collected is nothing_is_collected or clock_ms < self._next_upload_check_ms:
            return Repaired()
        self._next_upload_check_ms = clock_ms + UPLOAD_CHECK_INTERVAL_MS
        before_ms = await self.now_ms() - ABORT_AGE_MS
        prefix = self._root + LEVELS_FOLDER
        try:
            aborted = await abort_stale_uploads(
                self._calls, self._bucket, prefix, before_ms=before_ms
            )
        except Failed as failed:
            # Parts that stay cost only money, so the collection goes on.
            error = failed.failure.error(self.url, "abort", LEVELS_FOLDER)
            log.warning("stale uploads are left", problem=str(error))
            return Repaired()
        return Repaired(aborted=aborted)

    async def close(self) -> None:
        await self._calls.close()

    async def _upload(
        self,
        operation: str,
        name: str,
        data: bytes,
        metadata: Mapping[str, str],
        condition: Mapping[str, str],
    ) -> None:
        target = {"Bucket": self._bucket, "Key": self._key(name)}
        # WAL and manifest objects are never uploaded in parts (protocol, "Objects").
        if name.startswith(LEVELS_FOLDER) and len(data) > self._multipart_bytes:
            upload = Upload(self._calls, operation, target, condition, metadata)
            await upload.run(data, self._parts)
        else:
            call = requests.put(target, data, metadata, condition)
            await self._calls.attempt(RequestKind.WRITE, operation, call)

    async def _head(self, operation: str, name: str) -> ObjectInfo:
        key = self._key(name)
        with self._store_errors(operation, name):
            try:
                call = requests.head(self._bucket, key)
                found = await self._calls.attempt(RequestKind.READ, operation, call)
            except Failed as failed:
                if failed.failure.outcome not in {RequestOutcome.ABSENT, RequestOutcome.REFUSED}:
                    raise
                # The reply to a HEAD has no body with the reason; that to a GET has one. The reason
                # tells a missing bucket from a missing object, and the kinds of refusals apart.
                why = requests.get(self._bucket, key, "bytes=0-0")
                await self._calls.attempt(RequestKind.READ, operation, why)
                raise  # the object was created between HEAD and GET: the HEAD counts
        return ObjectInfo(name, found.size_bytes, found.modified_ms)

    def _key(self, name: str) -> str:
        return self._root + name

    @contextmanager
    def _store_errors(self, operation: str, name: str) -> Iterator[None]:
        """Raise each `Failed` as a `StoreError`."""
        try:
            yield
        except Failed as failed:
            raise failed.failure.error(self.url, operation, name) from None
