"""Opens the store at a URL, with the CAS mode of the settings.

The modules of a kind of store are imported when one is opened: a process on a local folder loads
no cloud client.
"""

from __future__ import annotations

import time
from functools import cache
from urllib.parse import urlsplit

import structlog

from shalekv.errors import InvalidSetting
from shalekv.runtime import Runtime
from shalekv.settings import CasChoice, StoreSettings
from shalekv.store.api import ObjectStore, PlainStore
from shalekv.store.local import LocalStore
from shalekv.store.memory import MemoryStore, named_objects
from shalekv.store.url import BucketUrl, FileUrl, MemoryUrl, Provider, is_loopback, parse_url

log = structlog.get_logger()


def open_store(url: str, runtime: Runtime, settings: StoreSettings) -> ObjectStore:
    """Open the store at `url` without sending a request. Raises `InvalidUrl`, `InvalidSetting`."""
    store = _open(url, runtime, settings)
    _warn_if_readable(settings.endpoint_url)
    if settings.cas is CasChoice.NATIVE:
        if settings.records_url:
            raise InvalidSetting(
                "records_url is for --cas two_phase alone: take it out, or --cas native"
            )
        return store
    if not isinstance(store, PlainStore):
        raise InvalidSetting(
            f"{store.url} has conditional writes: --cas two_phase and records_url are for s3:// "
            "stores without them"
        )
    from shalekv.store.two_phase.opening import (  # noqa: PLC0415 (loads drivers)
        CheckedTwoPhaseStore,
        open_records,
    )

    records = open_records(runtime, settings)
    _warn_if_readable(settings.records_endpoint_url)
    return CheckedTwoPhaseStore(store, records, runtime)


def _open(url: str, runtime: Runtime, settings: StoreSettings) -> ObjectStore:
    match parse_url(url):
        case FileUrl(path):
            return LocalStore(path, runtime)
        case MemoryUrl(name):
            return MemoryStore(_wall_clock_ms, name=name, objects=named_objects(name))
        case BucketUrl(provider=Provider.S3) as place:
            from shalekv.store.s3.store import S3Store  # noqa: PLC0415

            return S3Store(place, runtime, settings)
        case BucketUrl() as place:
            from shalekv.store.obstore.opening import open_bucket  # noqa: PLC0415

            return open_bucket(place, runtime, settings)


@cache
def _warn_if_readable(endpoint: str) -> None:
    """Warn, once, of an endpoint without TLS on another machine."""
    parts = urlsplit(endpoint)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        place = f"{parts.scheme}://{parts.hostname}"
        problem = "whoever is between can read and change the database, and read credentials"
        log.warning("the object store is reached without TLS", endpoint=place, problem=problem)


def _wall_clock_ms() -> int:
    # This is the clock of the store. Its users have `runtime.clock`.
    return time.time_ns() // 1_000_000
