"""A database on disk, and loads of it by tasks that Spark does not know of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from shalekv.core.manifest import Manifest
from shalekv.engine.bulk.job import LoadJob, LoadTicket
from shalekv.manifest.stored import StoredManifest
from shalekv.roles.database import create_database
from shalekv.settings import LevelCodec, LevelSettings, LimitSettings, StoreSettings
from shalekv.store.cas import CasStore
from shalekv_spark.loading.task import LoadTask, write_partition
from shalekv_spark.place import Place
from tests.unit.spark_load.batches import Row, batch_of

LOAD_ID = "monday"
LEVELS = LevelSettings(sst_bytes=64 * 1024, block_bytes=1024, codec=LevelCodec.NONE)


@asynccontextmanager
async def database(folder: Path) -> AsyncIterator[tuple[Place, CasStore]]:
    """A new one, and its store."""
    place = Place(f"file://{folder}/database")
    async with place.open() as store:
        await create_database(store.reads, store.runtime, StoreSettings())
        yield place, store


async def begun(store: CasStore, load_id: str = LOAD_ID) -> LoadJob:
    """A load that has begun."""
    return await LoadJob.begin(store, load_id, levels=LEVELS, limits=LimitSettings())


def write(
    place: Place, ticket: LoadTicket, rows: Sequence[Row], *, partition: int = 0, attempt: int = 0
) -> Sequence[Mapping[str, Any]]:
    """What a task reports that has got these rows."""
    task = LoadTask(place, ticket, has_rule=False)
    batches: Iterable[pa.RecordBatch] = iter([batch_of(rows)])
    report = write_partition(task, iter(batches), partition, attempt)
    return report.to_pylist()  # type: ignore[no-any-return]


async def current(store: CasStore) -> Manifest:
    """The manifest as it is now."""
    return await StoredManifest(store).refresh()


async def files(store: CasStore) -> set[str]:
    """The names of all files in the folder of the levels."""
    return {info.name async for info in store.reads.list("levels/")}
