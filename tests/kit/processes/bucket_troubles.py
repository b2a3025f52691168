"""A bucket of its own on an S3 server, reached through a proxy with faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from tests.servers.process import free_port
from tests.servers.proxy import Proxy, proxy_before
from tests.servers.s3 import S3Server


class TroubledBucket:
    """The bucket; the proxy can go away as a whole."""

    def __init__(self, s3: S3Server, records: Path | None) -> None:
        """With `records`, a file of SQLite decides which create was first, in two phases."""
        self.url = f"s3://troubled-{uuid4().hex}/a"
        self.s3 = s3
        self.env = s3.environment  # environment of a process that goes through the proxy
        if records is not None:
            self.env["SHALEKV_STORE__CAS"] = "two_phase"
            self.env["SHALEKV_STORE__RECORDS_URL"] = f"sqlite://{records}"
        self.proxy: Proxy
        self._port = free_port()
        self._stack = AsyncExitStack()

    async def appear(self) -> None:
        """The store can be reached, at the same port each time."""
        self.proxy = await self._stack.enter_async_context(proxy_before(self.s3, self._port))
        self.env["SHALEKV_STORE__ENDPOINT_URL"] = self.proxy.server.endpoint

    async def vanish(self) -> None:
        """All connections break, and no new one is accepted."""
        await self._stack.aclose()


@asynccontextmanager
async def troubled_bucket(
    s3: S3Server, records: Path | None = None
) -> AsyncIterator[TroubledBucket]:
    bucket = TroubledBucket(s3, records)
    s3.create_bucket(urlsplit(bucket.url).netloc)
    await bucket.appear()
    try:
        yield bucket
    finally:
        await bucket.vanish()
