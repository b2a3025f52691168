"""Opens stores and record stores of every kind, on the servers that all tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from shalekv.runtime import Runtime
from shalekv.settings import CasChoice, S3Reads, StoreSettings
from shalekv.store.api import ObjectInfo, ObjectStore
from shalekv.store.opening import open_store as open_any
from shalekv.store.two_phase.records import RecordStore
from tests.kit.processes.in_process import real_runtime
from tests.servers.fixtures import BUCKET

OpenStore = Callable[[], ObjectStore]
OpenRecords = Callable[[], RecordStore]

RECORDS = ("sqlite", "mariadb", "postgres", "dynamodb")
AT_ONCE = 50


def records_settings(kind: str, context: pytest.FixtureRequest, table: str) -> dict[str, Any]:
    """The settings by which records of this kind are reached; `table` is DynamoDB's."""
    if kind == "sqlite":
        return {"records_url": f"sqlite://{context.getfixturevalue('tmp_path')}/records.db"}
    if kind == "mariadb":
        return {"records_url": context.getfixturevalue("maria_server").url("mysql")}
    if kind == "postgres":
        return {"records_url": context.getfixturevalue("postgres_server").url("postgresql")}
    server = context.getfixturevalue("dynamo_server")
    credentials(context, server.access_key, server.secret_key, server.region)
    return {"records_url": f"dynamodb://{table}", "records_endpoint_url": server.endpoint}


def credentials(context: pytest.FixtureRequest, key: str, secret: str, region: str) -> None:
    """Put the credentials of a server that speaks S3 or DynamoDB into the environment."""
    environment: pytest.MonkeyPatch = context.getfixturevalue("monkeypatch")
    environment.setenv("AWS_ACCESS_KEY_ID", key)
    environment.setenv("AWS_SECRET_ACCESS_KEY", secret)
    environment.setenv("AWS_DEFAULT_REGION", region)
    environment.setenv("AWS_EC2_METADATA_DISABLED", "true")


def place_of(kind: str, context: pytest.FixtureRequest) -> tuple[str, StoreSettings]:
    """The URL of a new database on a store of this kind, and the settings that reach it.

    `+botocore` behind it: parts of objects are read by botocore. A kind of `RECORDS` is S3 with
    two-phase compare-and-swap, decided by these records; `minio+` before it makes that MinIO.
    """
    if kind == "file":
        return f"file://{context.getfixturevalue('tmp_path')}/new/database", StoreSettings()
    if kind == "azure":
        azure = context.getfixturevalue("azure_server")
        environment: pytest.MonkeyPatch = context.getfixturevalue("monkeypatch")
        environment.setenv("AZURE_STORAGE_ACCOUNT_NAME", azure.account)
        environment.setenv("AZURE_STORAGE_ACCOUNT_KEY", azure.key)
        return f"az://{BUCKET}/a%20folder/{uuid4()}", StoreSettings(endpoint_url=azure.endpoint)
    if kind == "google":
        google = context.getfixturevalue("google_server")
        bucket = f"bucket-{uuid4()}"
        google.create_bucket(bucket)
        return f"gs://{bucket}", StoreSettings(endpoint_url=google.endpoint, anonymous=True)
    server = next((name for name in ("moto", "minio") if kind.startswith(name)), "s3")
    s3 = context.getfixturevalue(f"{server}_server")
    credentials(context, s3.access_key, s3.secret_key, s3.region)
    settings: dict[str, Any] = {"endpoint_url": s3.endpoint}
    if kind.endswith("+botocore"):
        settings["s3_reads"] = S3Reads.BOTOCORE
    records = kind.removeprefix("minio+")
    if records in RECORDS:
        # The credentials of both servers are the same.
        settings |= {"cas": CasChoice.TWO_PHASE, **records_settings(records, context, "records")}
    return f"s3://{BUCKET}/{uuid4()}", StoreSettings(**settings)


def opener(kind: str, context: pytest.FixtureRequest) -> Iterator[OpenStore]:
    """A function whose every call opens one and the same, at first empty, database."""
    url, settings = place_of(kind, context)
    with real_runtime() as runtime:
        yield lambda: open_any(url, runtime, settings)


def records_opener(runtime: Runtime, settings: dict[str, Any]) -> OpenRecords:
    """A function whose every call opens the same records, with connections of its own."""
    from shalekv.store.two_phase.opening import open_records  # noqa: PLC0415  (drivers are slow)

    chosen = StoreSettings(cas=CasChoice.TWO_PHASE, **settings)
    return lambda: open_records(runtime, chosen)


async def names_in(store: ObjectStore, prefix: str, start_after: str = "") -> list[str]:
    return [info.name for info in await listed(store, prefix, start_after)]


async def listed(store: ObjectStore, prefix: str, start_after: str = "") -> list[ObjectInfo]:
    return [info async for info in store.list(prefix, start_after=start_after)]


async def create_many(store: ObjectStore, names: list[str]) -> None:
    """Create an object of each name, some at a time."""
    for first in range(0, len(names), AT_ONCE):
        await asyncio.gather(*(store.create(n, n.encode()) for n in names[first : first + AT_ONCE]))
