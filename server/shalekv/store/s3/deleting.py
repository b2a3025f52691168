"""Deleting many objects of an S3 bucket by one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shalekv.store.requests import RequestKind
from shalekv.store.s3.answers import Failure, Verdict
from shalekv.store.s3.calls import Calls

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client
    from types_aiobotocore_s3.type_defs import DeleteObjectsOutputTypeDef


@dataclass(frozen=True, slots=True)
class NotDeleted:
    """An object that is still there, and why."""

    key: str
    failure: Failure


async def delete_batch(calls: Calls, bucket: str, keys: Sequence[str]) -> NotDeleted | None:
    """Delete at most 1,000 objects. None if all are gone, else one that is not.

    A refusal of any stands for all: it has to be mended, while the others may pass.
    """

    async def call(client: S3Client) -> DeleteObjectsOutputTypeDef:
        objects: Any = [{"Key": key} for key in keys]
        return await client.delete_objects(
            Bucket=bucket, Delete={"Objects": objects, "Quiet": True}
        )

    reply = await calls.attempt(RequestKind.DELETE, "delete", call)
    failures = [
        NotDeleted(error.get("Key", keys[0]), calls.judge_part(error, "delete"))
        for error in reply.get("Errors", [])
    ]
    failures = [at for at in failures if at.failure.verdict is not Verdict.ABSENT]
    failures.sort(key=lambda at: at.failure.verdict is not Verdict.REFUSED)
    return failures[0] if failures else None
