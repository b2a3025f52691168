"""The requests about one object, each as a call of botocore's client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from shalekv.store.s3.answers import Failed, Failure, Verdict
from shalekv.store.s3.calls import Call

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client

CONTENT_TYPE = "application/octet-stream"
NOT_THERE = frozenset({"NoSuchKey", "InvalidRange"})


@dataclass(frozen=True, slots=True)
class Found:
    """What a store answered about an object, or a part of it if `is_part`."""

    data: bytes
    size_bytes: int  # of what was asked for: after a HEAD, of the object
    modified_ms: int
    metadata: Mapping[str, str]
    is_part: bool


def put(
    target: Mapping[str, str],
    data: bytes,
    metadata: Mapping[str, str],
    condition: Mapping[str, str],
) -> Call[None]:
    """Make `data` the object `target`, which is bucket and key."""

    async def call(client: S3Client) -> None:
        # Of bytes, botocore makes a file, and for files it waits for the server's "100 Continue":
        # another round trip in every commit. Memory it leaves as it is.
        options: dict[str, Any] = {**target, **condition, "Body": memoryview(data)}
        check_stored(
            await client.put_object(**options, Metadata=dict(metadata), ContentType=CONTENT_TYPE)
        )

    return call


def copy(bucket: str, source: str, destination: str) -> Call[None]:
    """Copy an object inside the store, with its metadata."""

    async def call(client: S3Client) -> None:
        # An error that comes when the status 200 was sent already is one to botocore as well.
        reply = await client.copy_object(
            Bucket=bucket,
            Key=destination,
            CopySource={"Bucket": bucket, "Key": source},
            MetadataDirective="COPY",
        )
        check_stored(reply.get("CopyObjectResult", {}))

    return call


def get(bucket: str, key: str, wanted: str = "") -> Call[Found]:
    """Read an object, or the range of it that `wanted` is in the words of HTTP."""

    async def call(client: S3Client) -> Found:
        options: dict[str, Any] = {"Range": wanted} if wanted else {}
        reply = await client.get_object(Bucket=bucket, Key=key, **options)
        async with reply["Body"] as body:
            data = await body.read()
        return Found(
            data,
            len(data),
            _modified_ms(reply),
            MappingProxyType(dict(reply.get("Metadata", {}))),
            is_part="ContentRange" in reply,
        )

    return call


def head(bucket: str, key: str) -> Call[Found]:
    """Ask for what `get` tells, without the bytes."""

    async def call(client: S3Client) -> Found:
        reply = await client.head_object(Bucket=bucket, Key=key)
        return Found(
            b"",
            reply["ContentLength"],
            _modified_ms(reply),
            MappingProxyType(dict(reply.get("Metadata", {}))),
            is_part=False,
        )

    return call


def time_of_day(bucket: str, key: str) -> Call[Mapping[str, Any]]:
    """A reply that has the time in its header, to a question about an object that is not there.

    It is a GET, since a reply to HEAD does not say that there is no bucket.
    """

    async def call(client: S3Client) -> Mapping[str, Any]:
        try:
            reply = await client.get_object(Bucket=bucket, Key=key, Range="bytes=0-0")
        except ClientError as error:
            if error.response["Error"].get("Code") not in NOT_THERE:
                raise
            return error.response
        async with reply["Body"] as body:  # somebody has made it
            await body.read()
        return reply

    return call


def check_stored(reply: Mapping[str, Any]) -> None:
    """Raise `Failed` unless the reply to an upload or a copy is that of a store: it has an ETag.

    A success that a proxy tells in its place, or a reply that was cut to nothing, is no answer.
    """
    if not reply.get("ETag"):
        problem = "a success without an ETag: another server than the store's answered"
        raise Failed(Failure(Verdict.UNCERTAIN, problem))


def _modified_ms(reply: Mapping[str, Any]) -> int:
    moment: datetime | None = reply.get("LastModified")
    if moment is None:
        problem = "an object without Last-Modified: another server than the store's answered"
        raise Failed(Failure(Verdict.UNCERTAIN, problem))
    return int(moment.timestamp()) * 1000
