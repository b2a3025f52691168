"""A database on disk, and loads of it by tasks without Spark."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from shalekv.jobs.bulk_load import LoadJob, LoadTicket
from shalekv.protocol.manifest import Manifest
from shalekv.server.database import create_database
from shalekv.settings import LevelCodec, LevelSettings, LimitSettings, StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.opening import open_store
from shalekv_spark.loading.rows import EXPIRE_AT, KEY, OP, ORDER, VALUE, PointRows, RowCheck
from shalekv_spark.loading.task import LoadTask, write_partition
from shalekv_spark.place import Place

LOAD_ID = "monday"
LEVELS = LevelSettings(sst_bytes=64 * 1024, block_bytes=1024, codec=LevelCodec.NONE)


@asynccontextmanager
async def database(folder: Path) -> AsyncIterator[tuple[Place, CasStore]]:
    place = Place(f"file://{folder}/database")
    async with place.open() as store:
        plain = open_store(place.url, store.runtime, StoreSettings())
        await create_database(plain, store.runtime, StoreSettings())
        yield place, store


async def begun(store: CasStore, load_id: str = LOAD_ID) -> LoadJob:
    return await LoadJob.begin(store, load_id, levels=LEVELS, limits=LimitSettings())


def write(
    place: Place, ticket: LoadTicket, rows: Sequence[Row], *, partition: int = 0, attempt: int = 0
) -> Sequence[Mapping[str, Any]]:
    task = LoadTask(place, ticket, has_rule=False)
    batches: Iterable[pa.RecordBatch] = iter([batch_of(rows)])
    report = write_partition(task, iter(batches), partition, attempt)
    return report.to_pylist()  # type: ignore[no-any-return]


async def current(store: CasStore) -> Manifest:
    return await StoredManifest(store).refresh()


async def files(store: CasStore) -> set[str]:
    """Return the names of all files in the folder of the levels."""
    return {info.name async for info in store.list("levels/")}


TIME = pa.timestamp("us", "UTC")


class Row(NamedTuple):
    """One row of a frame."""

    key: bytes | None
    value: bytes | None = b"v"
    op: str | None = "put"
    expire_at: datetime | None = None
    order: int | float | None = None


class Limits(NamedTuple):
    """Limits of keys and values, bytes."""

    key_bytes_max: int = 8
    value_bytes_max: int = 16


def batch_of(rows: Sequence[Row], *, large: bool = False) -> pa.RecordBatch:
    """The rows as one batch, with all columns; `large`: with offsets of 8 bytes."""
    binary = pa.large_binary() if large else pa.binary()
    types = {KEY: binary, VALUE: binary, OP: pa.string(), EXPIRE_AT: TIME, ORDER: pa.float64()}
    columns = zip(*rows, strict=True) if rows else [[]] * len(types)
    arrays = [
        pa.array(column, type_) for column, type_ in zip(columns, types.values(), strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=[*types])


def batches_of(rows: Sequence[Row], sizes: Iterable[int]) -> list[pa.RecordBatch]:
    """The rows in batches of these sizes, and the rest in one."""
    batches, at = [], 0
    for size in [*sizes, len(rows)]:
        batches.append(batch_of(rows[at : at + size]))
        at += size
    return batches


def taken(batches: Iterable[pa.RecordBatch], *, has_rule: bool = False) -> list[PointRows]:
    check = RowCheck(Limits(), partition=3, has_rule=has_rule)
    found = [check.take(batch) for batch in batches]
    return [rows for rows in found if rows is not None]
