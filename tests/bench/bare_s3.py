"""S3 without our store: the reference for what a request takes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from tests.servers.s3 import S3Server

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client

CONNECTIONS = 32


class BareS3:
    """A bucket, and the requests that a database sends most."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    async def create(self, key: str, data: bytes) -> None:
        await self._client.put_object(Bucket=self._bucket, Key=key, Body=data, IfNoneMatch="*")

    async def get(self, key: str, wanted: str = "") -> bytes:
        options: dict[str, Any] = {"Range": wanted} if wanted else {}
        reply = await self._client.get_object(Bucket=self._bucket, Key=key, **options)
        async with reply["Body"] as body:
            return await body.read()


@asynccontextmanager
async def bare_s3(server: S3Server, bucket: str) -> AsyncIterator[BareS3]:
    config = AioConfig(
        max_pool_connections=CONNECTIONS,
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
