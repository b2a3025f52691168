"""The loop that anybody would write with aiobotocore alone: no errors told apart, nothing counted.

Its client has the same options as that of the store, and the transport that comes with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from tests.bench.interleaved import at_once
from tests.servers.s3 import S3Server

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client
    from types_aiobotocore_s3.type_defs import CompletedPartTypeDef


@asynccontextmanager
async def bare_s3(server: S3Server, bucket: str, connections: int) -> AsyncIterator[BareS3]:
    """A client of its own on `bucket`."""
    config = AioConfig(
        max_pool_connections=connections,
        retries={"mode": "standard", "total_max_attempts": 1},
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        parameter_validation=False,
    )
    async with get_session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=server.region,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=config,
    ) as client:
        yield BareS3(client, bucket)


class BareS3:
    """What the store is compared with."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    async def create(self, key: str, data: bytes) -> None:
        """One conditional PUT."""
        await self._client.put_object(Bucket=self._bucket, Key=key, Body=data, IfNoneMatch="*")

    async def create_in_parts(self, key: str, data: bytes, part_bytes: int, together: int) -> None:
        """A conditional upload in parts, so many of them at a time."""
        target: dict[str, Any] = {"Bucket": self._bucket, "Key": key}
        upload_id = (await self._client.create_multipart_upload(**target))["UploadId"]
        done: list[CompletedPartTypeDef] = []

        async def send(number: int) -> None:
            part = data[number * part_bytes : (number + 1) * part_bytes]
            reply = await self._client.upload_part(
                **target, UploadId=upload_id, PartNumber=number + 1, Body=part
            )
            done.append({"PartNumber": number + 1, "ETag": reply["ETag"]})

        await at_once(-(-len(data) // part_bytes), together, send)
        done.sort(key=lambda part: part["PartNumber"])
        await self._client.complete_multipart_upload(
            **target, UploadId=upload_id, MultipartUpload={"Parts": done}, IfNoneMatch="*"
        )

    async def get(self, key: str, wanted: str = "") -> bytes:
        """The object, or a range of it."""
        options: dict[str, Any] = {"Range": wanted} if wanted else {}
        reply = await self._client.get_object(Bucket=self._bucket, Key=key, **options)
        async with reply["Body"] as body:
            return await body.read()
