"""Aborts uploads in parts that were begun long ago and never completed: their parts are paid for.

A process that is killed in the middle of an upload leaves one. No list of objects shows it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any

from shalekv.store.requests import RequestKind
from shalekv.store.s3.answers import Failed, Verdict
from shalekv.store.s3.calls import Calls

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client
    from types_aiobotocore_s3.type_defs import (
        ListMultipartUploadsOutputTypeDef,
        MultipartUploadTypeDef,
    )

OPERATION = "abort"


async def abort_stale_uploads(calls: Calls, bucket: str, prefix: str, *, before_ms: int) -> int:
    """Abort what was begun before this time, by the store's clock, below a prefix; how many.

    Raises `Failed`.
    """
    aborted = 0
    async for upload in _uploads(calls, bucket, prefix):
        if int(upload["Initiated"].timestamp() * 1_000) >= before_ms:
            continue
        target = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        try:
            await calls.attempt(RequestKind.WRITE, OPERATION, partial(_abort, target=target))
        except Failed as failed:
            if failed.failure.verdict is not Verdict.ABSENT:  # completed, or aborted, since
                raise
        else:
            aborted += 1
    return aborted


async def _uploads(calls: Calls, bucket: str, prefix: str) -> AsyncIterator[MultipartUploadTypeDef]:
    start: dict[str, str] = {}
    while True:
        options = {"Bucket": bucket, "Prefix": prefix, **start}
        page = await calls.attempt(RequestKind.LIST, OPERATION, partial(_page, options=options))
        for upload in page.get("Uploads", []):
            if upload["Key"].startswith(prefix):  # some servers list more than they are asked for
                yield upload
        if not page.get("IsTruncated", False):
            return
        start = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


async def _page(client: S3Client, options: dict[str, Any]) -> ListMultipartUploadsOutputTypeDef:
    return await client.list_multipart_uploads(**options)


async def _abort(client: S3Client, target: dict[str, Any]) -> None:
    await client.abort_multipart_upload(**target)
