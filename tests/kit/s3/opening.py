"""Stores for tests, on a server that is given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.s3.store import S3Store
from shalekv.store.url import BucketUrl, Provider
from tests.kit.inline_runtime import InlineWorkers

BUCKET = "bucket"
FOLDER = "folder"
URL = f"s3://{BUCKET}/{FOLDER}"
MIB = 1024 * 1024


def real_runtime() -> Runtime:
    """Real time, since real sockets are waited for; no threads."""
    return Runtime(LoopClock(), Random(0), InlineWorkers())


def new_store(endpoint: str, **settings: Any) -> S3Store:
    """A store at `endpoint`; the credentials are those of the environment."""
    place = BucketUrl(Provider.S3, BUCKET, FOLDER)
    return S3Store(place, real_runtime(), StoreSettings(endpoint_url=endpoint, **settings))


@asynccontextmanager
async def opened(endpoint: str, **settings: Any) -> AsyncIterator[S3Store]:
    store = new_store(endpoint, **settings)
    try:
        yield store
    finally:
        await store.close()
