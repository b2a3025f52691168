"""Where a database is that processes are killed on: in a folder, or in a bucket behind a proxy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit
from uuid import uuid4

from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.opening import open_store
from tests.e2e.crashes.faulty_proxy import FaultyProxy, faulty_proxy
from tests.servers.s3 import S3Server

FOLDER_IN_BUCKET = "a/database"
# Whoever is not answered asks again soon.
IMPATIENT = (
    *("--request-timeout-ms", "1200", "--connect-timeout-ms", "1000"),
    *("--retry-initial-ms", "20", "--retry-max-ms", "200"),
)


class Place(Protocol):
    """A database that processes reach by way of all faults, and the test without them."""

    @property
    def url(self) -> str:
        """Where processes find it."""
        ...

    @property
    def endpoint(self) -> str:
        """That of the store itself, past all faults; empty: it has none."""
        ...

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of each process."""
        ...

    @property
    def proxy(self) -> FaultyProxy | None:
        """What makes faults between them and the store, if anything does."""
        ...

    @property
    def troubled(self) -> Mapping[str, str]:
        """The environment of a process that meets all faults."""
        ...

    @property
    def untroubled(self) -> Mapping[str, str]:
        """The environment of one that meets none."""
        ...

    def open_store(self, runtime: Runtime) -> ObjectStore:
        """The store itself, past all faults; use it with `untroubled` in the environment."""
        ...


@dataclass(frozen=True, slots=True)
class InFolder:
    """A database on `file://`."""

    folder: Path
    endpoint: str = ""
    flags: tuple[str, ...] = ()
    proxy: FaultyProxy | None = None
    troubled: Mapping[str, str] = field(default_factory=dict)
    untroubled: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where processes find it."""
        return f"file://{self.folder}"

    def open_store(self, runtime: Runtime) -> ObjectStore:
        """Implements `Place`."""
        return open_store(self.url, runtime, StoreSettings())


@dataclass(frozen=True, slots=True)
class InBucket:
    """A database in a bucket of its own, between which and its processes stands a proxy."""

    s3: S3Server
    bucket: str
    proxy: FaultyProxy
    flags: tuple[str, ...] = IMPATIENT

    @property
    def url(self) -> str:
        """Where processes find it."""
        return f"s3://{self.bucket}/{FOLDER_IN_BUCKET}"

    @property
    def endpoint(self) -> str:
        """That of the server."""
        return self.s3.endpoint

    @property
    def troubled(self) -> Mapping[str, str]:
        """By way of the proxy."""
        return _environment(replace(self.s3, endpoint=f"http://{self.proxy.listen}"))

    @property
    def untroubled(self) -> Mapping[str, str]:
        """Past the proxy."""
        return _environment(self.s3)

    def open_store(self, runtime: Runtime) -> ObjectStore:
        """Implements `Place`."""
        return open_store(self.url, runtime, StoreSettings(endpoint_url=self.endpoint))


@asynccontextmanager
async def in_bucket(s3: S3Server, seed: int) -> AsyncIterator[InBucket]:
    """A new bucket behind a proxy whose faults are drawn by `seed`."""
    bucket = f"crashes-{uuid4().hex}"
    s3.create_bucket(bucket)
    async with faulty_proxy(urlsplit(s3.endpoint).netloc, seed) as proxy:
        yield InBucket(s3, bucket, proxy)


def _environment(server: S3Server) -> dict[str, str]:
    return server.environment | {"SHALEKV_STORE__ENDPOINT_URL": server.endpoint}
