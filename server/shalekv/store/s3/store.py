"""An object store in a bucket that is reached by S3's protocol.

`create` is one PutObject with ``If-None-Match: *``; SSTs of the levels that are large are uploaded
in parts, and the condition stands on the request that completes the upload.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import structlog

from shalekv.format.names import LEVELS_FOLDER
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import (
    NO_METADATA,
    Created,
    CreateOutcome,
    Exists,
    IsCollected,
    ObjectInfo,
    PlainStore,
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
from shalekv.store.s3 import requests
from shalekv.store.s3.answers import Failed, RequestOutcome, S3Place
from shalekv.store.s3.client import ClientOptions
from shalekv.store.s3.requests import Calls, delete_batch, list_objects
from shalekv.store.s3.uploads import Parts, Upload, abort_stale_uploads
from shalekv.store.url import BucketUrl

DELETED_AT_ONCE = 1_000  # the most that S3 takes
IF_ABSENT: Mapping[str, str] = MappingProxyType({"IfNoneMatch": "*"})
ALWAYS: Mapping[str, str] = MappingProxyType({})
LOOK_FOR_UPLOADS_MS = 3_600_000
NO_OBJECT = "clock"  # beside the folders of objects; asked for to hear what time it is

log = structlog.get_logger()


class S3Store(PlainStore):
    """A store in `place`. Stores of one configuration share a client and its connections."""

    def __init__(self, place: BucketUrl, runtime: Runtime, settings: StoreSettings) -> None:
        """Touches nothing. Raises `InvalidSetting` when no client can be made of `settings`."""
        options = ClientOptions.of(settings)
        self.url = str(place)
        self.sent = RequestCounts()
        self._bucket = place.bucket
        self._root = f"{place.folder}/" if place.folder else ""
        self._parts = Parts(settings.multipart_part_bytes, settings.multipart_uploads_max)
        self._multipart_bytes = settings.multipart_bytes
        self._abort_age_ms = 1_000 * settings.multipart_abort_age_s
        self._clock = runtime.clock
        self._next_look_ms = -math.inf
        told = S3Place(place.bucket, options.endpoint_url or "Amazon S3", options.region)
        self._calls = Calls(told, options, runtime, self.sent)

    async def create(
        self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA
    ) -> CreateOutcome:
        check_new_name(name)
        try:
            await self._upload("create", name, data, metadata, IF_ABSENT)
        except Failed as failed:
            match failed.failure.verdict:
                case RequestOutcome.EXISTS:
                    return Exists()
                case (
                    RequestOutcome.UNCERTAIN | RequestOutcome.ABSENT
                ):  # no store answers that to a create
                    return Unknown(failed.failure.problem)
                case _:
                    raise failed.failure.error(self.url, "create", name) from None
        return Created()

    async def put(self, name: str, data: bytes, metadata: Mapping[str, str] = NO_METADATA) -> None:
        check_new_name(name)
        with self._told_as("put", name):
            await self._upload("put", name, data, metadata, ALWAYS)

    async def copy(self, source: str, destination: str) -> None:
        check_name(source)
        check_new_name(destination)
        call = requests.copy(self._bucket, self._key(source), self._key(destination))
        try:
            await self._calls.attempt(RequestKind.WRITE, "copy", call)
        except Failed as failed:
            is_absent = failed.failure.verdict is RequestOutcome.ABSENT
            name = source if is_absent else destination
            raise failed.failure.error(self.url, "copy", name) from None

    async def get(self, name: str) -> StoredObject:
        check_name(name)
        with self._told_as("get", name):
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
        # The end of an object is asked for whole: where it begins is not known before.
        wanted = f"bytes={offset}" if offset < 0 else f"bytes={offset}-{offset + length - 1}"
        with self._told_as("get_range", name):
            try:
                call = requests.get(self._bucket, self._key(name), wanted)
                found = await self._calls.attempt(RequestKind.READ, "get_range", call)
            except Failed as failed:
                if failed.failure.verdict is RequestOutcome.BEHIND_THE_END:
                    return b""
                raise
        if found.is_part:
            return found.data[:length]
        first, taken = byte_range(len(found.data), offset, length)  # it knows no ranges
        return found.data[first : first + taken]

    async def head(self, name: str) -> ObjectInfo:
        check_name(name)
        return await self._head("head", name)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        with self._told_as("list", prefix):
            found = list_objects(self._calls, self._bucket, self._root, prefix, start_after)
            async for info in found:
                yield info

    async def delete(self, names: Iterable[str]) -> None:
        doomed = list(dict.fromkeys(names))
        for name in doomed:
            check_name(name)
        for first in range(0, len(doomed), DELETED_AT_ONCE):
            batch = [self._key(name) for name in doomed[first : first + DELETED_AT_ONCE]]
            with self._told_as("delete", doomed[first]):
                failed = await delete_batch(self._calls, self._bucket, batch)
            if failed is not None:
                name = failed.key.removeprefix(self._root)
                raise failed.failure.error(self.url, "delete", name)

    async def now_ms(self) -> int:
        with self._told_as("now", NO_OBJECT):
            call = requests.time_of_day(self._bucket, self._key(NO_OBJECT))
            return self._calls.clock_ms(await self._calls.attempt(RequestKind.READ, "now", call))

    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        """As the interface says. Uploads are looked for once an hour, and only by collectors."""
        clock_ms = self._clock.monotonic_ms()
        if is_collected is nothing_is_collected or clock_ms < self._next_look_ms:
            return Recovered()
        self._next_look_ms = clock_ms + LOOK_FOR_UPLOADS_MS
        before_ms = await self.now_ms() - self._abort_age_ms
        prefix = self._root + LEVELS_FOLDER
        try:
            aborted = await abort_stale_uploads(
                self._calls, self._bucket, prefix, before_ms=before_ms
            )
        except Failed as failed:
            # Parts that stay cost money and nothing else: no reason not to collect.
            error = failed.failure.error(self.url, "abort", LEVELS_FOLDER)
            log.warning("stale uploads are left", problem=str(error))
            return Recovered()
        return Recovered(aborted=aborted)

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
        with self._told_as(operation, name):
            try:
                call = requests.head(self._bucket, key)
                found = await self._calls.attempt(RequestKind.READ, operation, call)
            except Failed as failed:
                if failed.failure.verdict not in {RequestOutcome.ABSENT, RequestOutcome.REFUSED}:
                    raise
                # A reply to HEAD has no body that says why. One to GET has: no bucket is no
                # missing object, and each refusal has a remedy of its own.
                why = requests.get(self._bucket, key, "bytes=0-0")
                await self._calls.attempt(RequestKind.READ, operation, why)
                raise  # it is there by now, which is too late
        return ObjectInfo(name, found.size_bytes, found.modified_ms)

    def _key(self, name: str) -> str:
        return self._root + name

    @contextmanager
    def _told_as(self, operation: str, name: str) -> Iterator[None]:
        try:
            yield
        except Failed as failed:
            raise failed.failure.error(self.url, operation, name) from None
