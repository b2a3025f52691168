"""Multipart uploads, for large SSTs, which a single request would send over one connection.

The object does not exist before the upload is completed, by a request that carries the condition.
Until then every failure means that nothing was created. An upload that is not completed is aborted,
because its parts are charged for. A process that is killed during an upload leaves it behind, and
no list of objects shows it: `abort_stale_uploads` aborts such uploads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shalekv.store.api import RequestKind
from shalekv.store.s3.answers import Failed, FailedRequest, RequestOutcome
from shalekv.store.s3.requests import Call, Calls, T, check_stored

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client
    from types_aiobotocore_s3.type_defs import (
        CompletedPartTypeDef,
        ListMultipartUploadsOutputTypeDef,
        MultipartUploadTypeDef,
    )


PARTS_MAX = 10_000  # limit of S3
ABORT_S = 10.0  # timeout, after which the upload is left to the bucket's rule or the collector
ABORT_OPERATION = "abort"


@dataclass(frozen=True, slots=True)
class Parts:
    """Size of the parts, and how many are sent at once."""

    part_bytes: int
    uploads_max: int


@dataclass(frozen=True, slots=True)
class Upload:
    """One upload to `target` (bucket and key); the request that completes it has `condition`."""

    calls: Calls
    operation: str
    target: Mapping[str, Any]
    condition: Mapping[str, Any]
    metadata: Mapping[str, str]

    async def run(self, data: bytes, parts: Parts) -> None:
        """Upload `data`. Raises `Failed`."""
        upload_id = await self._begin()
        try:
            try:
                done = await self._send_parts(upload_id, data, parts)
            except Failed as failed:
                raise Failed(_nothing_created(failed)) from None
            await self._complete(upload_id, done)
        except BaseException:
            await _run_to_end(self._abort(upload_id))
            raise

    async def _begin(self) -> str:
        async def begin(client: S3Client) -> str:
            reply = await client.create_multipart_upload(
                **self.target,
                ContentType="application/octet-stream",
                Metadata=self.metadata,
            )
            if "UploadId" not in reply:
                problem = "an upload without an id: another server than the store's answered"
                raise Failed(FailedRequest(RequestOutcome.UNCERTAIN, problem))
            return reply["UploadId"]

        try:
            return await self._attempt(begin)
        except Failed as failed:
            raise Failed(_nothing_created(failed)) from None

    async def _send_parts(
        self, upload_id: str, data: bytes, parts: Parts
    ) -> list[CompletedPartTypeDef]:
        done: list[CompletedPartTypeDef] = []
        failures: list[Failed] = []
        waiting = _slices(data, parts.part_bytes)

        async def send_some() -> None:
            for number, part in waiting:  # shared by the tasks: each part goes to one of them
                if failures:
                    return
                call = partial(self._send, upload_id=upload_id, number=number, part=part)
                try:
                    done.append({"PartNumber": number, "ETag": await self._attempt(call)})
                except Failed as failed:
                    # The others are not cancelled: a part that arrives after the abort would stay.
                    failures.append(failed)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(parts.uploads_max):
                tasks.create_task(send_some())
        if failures:
            raise failures[0]
        return sorted(done, key=lambda part: part["PartNumber"])

    async def _send(self, client: S3Client, upload_id: str, number: int, part: memoryview) -> str:
        # The type stubs allow bytes and files; the transport accepts a memoryview (see `client`).
        options: dict[str, Any] = {"PartNumber": number, "UploadId": upload_id, "Body": part}
        reply = await client.upload_part(**self.target, **options)
        check_stored(reply)
        return reply["ETag"]

    async def _complete(self, upload_id: str, done: list[CompletedPartTypeDef]) -> None:
        async def complete(client: S3Client) -> None:
            reply = await client.complete_multipart_upload(
                **self.target,
                UploadId=upload_id,
                MultipartUpload={"Parts": done},
                **self.condition,
            )
            check_stored(reply)

        try:
            await self._attempt(complete)
        except Failed as failed:
            if failed.failure.outcome is RequestOutcome.ABSENT:
                # No such upload: it was aborted, or the server has completed and forgotten it.
                raise Failed(replace(failed.failure, outcome=RequestOutcome.UNCERTAIN)) from None
            raise

    async def _abort(self, upload_id: str) -> None:
        async def abort(client: S3Client) -> None:
            await client.abort_multipart_upload(**self.target, UploadId=upload_id)

        # The caller needs the error of the upload, not that of the abort.
        with suppress(Failed, TimeoutError):
            async with asyncio.timeout(ABORT_S):
                await self._attempt(abort)

    async def _attempt(self, call: Call[T]) -> T:
        return await self.calls.attempt(RequestKind.WRITE, self.operation, call)


def _slices(data: bytes, part_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """Iterate over the numbers, from 1, and the contents of the parts."""
    size = max(part_bytes, -(-len(data) // PARTS_MAX))
    view = memoryview(data)
    for number, first in enumerate(range(0, len(data), size), start=1):
        yield number, view[first : first + size]


def _nothing_created(failed: Failed) -> FailedRequest:
    """Return the failure of a request that could not have created the object."""
    if failed.failure.outcome is RequestOutcome.REFUSED:
        return failed.failure
    return replace(failed.failure, outcome=RequestOutcome.NOT_APPLIED)


async def _run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work`, which has a timeout, even when this task is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        while not task.done():
            try:
                await asyncio.wait({task})  # does not cancel `task` when it is cancelled itself
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled


async def abort_stale_uploads(calls: Calls, bucket: str, prefix: str, *, before_ms: int) -> int:
    """Abort uploads below `prefix` that were begun before this time; return how many.

    `before_ms` is a time of the store's clock. Raises `Failed`.
    """
    aborted = 0
    async for upload in _uploads(calls, bucket, prefix):
        if int(upload["Initiated"].timestamp() * 1_000) >= before_ms:
            continue
        target = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        try:
            await calls.attempt(RequestKind.WRITE, ABORT_OPERATION, partial(_abort, target=target))
        except Failed as failed:
            if failed.failure.outcome is not RequestOutcome.ABSENT:
                raise  # an absent upload was completed or aborted since the list
        else:
            aborted += 1
    return aborted


async def _uploads(calls: Calls, bucket: str, prefix: str) -> AsyncIterator[MultipartUploadTypeDef]:
    start: dict[str, str] = {}
    while True:
        options = {"Bucket": bucket, "Prefix": prefix, **start}
        call = partial(_page, options=options)
        page = await calls.attempt(RequestKind.LIST, ABORT_OPERATION, call)
        for upload in page.get("Uploads", []):
            if upload["Key"].startswith(prefix):  # some servers ignore the prefix
                yield upload
        if not page.get("IsTruncated", False):
            return
        start = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


async def _page(client: S3Client, options: dict[str, Any]) -> ListMultipartUploadsOutputTypeDef:
    return await client.list_multipart_uploads(**options)


async def _abort(client: S3Client, target: dict[str, Any]) -> None:
    await client.abort_multipart_upload(**target)
