"""Creating a database: its first manifest."""

from __future__ import annotations

from shalekv.core.manifest import Manifest
from shalekv.engine.founding import any_wal_object, check_vacant, found, remains
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.verify.fit import check_fit


async def create_database(store: ObjectStore, runtime: Runtime, settings: StoreSettings) -> None:
    """Write manifest 0 of a new database.

    Raises `DatabaseExists` when any manifest is there: the first may have been collected. Raises
    `IllegalState` when there is none, but a log: another database would be put on its remains.
    Raises `StoreUnfit` where a few requests show that the store would lose data: a short form of
    `shalekv store verify` comes before the first manifest.
    """
    cas = CasStore(store, runtime, settings)
    await check_vacant(cas)
    left = await any_wal_object(cas)
    if left is not None:
        # A database has a manifest before it has a log, so one that is being created shows it now.
        await check_vacant(cas)
        raise remains(cas, left)
    # What decides creates, if it is another store, has to answer: creates are repeated for ever.
    await cas.recover()
    await check_fit(store, runtime, settings)
    manifest = Manifest(
        database_id=runtime.random.randbytes(16),
        manifest_id=0,
        write_id=runtime.random.randbytes(16),
        cas_mode=cas.cas_mode,
        logical_time_ms=await cas.reads.now_ms(),
    )
    await found(cas, manifest)
