"""Creating a database: its first manifest."""

from __future__ import annotations

from shalekv.core.manifest import Manifest
from shalekv.errors import DatabaseExists, IllegalState
from shalekv.format import names
from shalekv.format.manifest import encode_manifest
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.claim import Taken
from shalekv.store.verify.fit import check_fit


async def create_database(store: ObjectStore, runtime: Runtime, settings: StoreSettings) -> None:
    """Write manifest 0 of a new database.

    Raises `DatabaseExists` when any manifest is there: the first may have been collected. Raises
    `IllegalState` when there is none, but a log: another database would be put on its remains.
    Raises `StoreUnfit` where a few requests show that the store would lose data: a short form of
    `shalekv store verify` comes before the first manifest.
    """
    cas = CasStore(store, runtime, settings)
    if await _manifest_ids(cas):
        raise _exists(store)
    left = await _any_wal_object(cas)
    # A database has a manifest before it has a log, so one that is being created shows it now.
    if left is not None and not await _manifest_ids(cas):
        raise IllegalState(
            f"{store.url} holds {left} and no manifest: the manifests of this database are lost. "
            "Put them back, restore the database from a copy, or create one at another URL"
        )
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
    outcome = await cas.claim(names.manifest_name(0), encode_manifest(manifest))
    # Another process may have created the database, and collected manifest 0, since the list (F2).
    if isinstance(outcome, Taken) or await _manifest_ids(cas) != {0}:
        raise _exists(store)


async def _manifest_ids(cas: CasStore) -> set[int]:
    found = cas.reads.list(names.MANIFEST_FOLDER)
    ids = {names.parse_manifest_name(info.name) async for info in found}
    return {manifest_id for manifest_id in ids if manifest_id is not None}


async def _any_wal_object(cas: CasStore) -> str | None:
    async for info in cas.reads.list(names.WAL_FOLDER):
        if names.parse_wal_name(info.name) is not None:
            return info.name
    return None


def _exists(store: ObjectStore) -> DatabaseExists:
    return DatabaseExists(f"{store.url} holds a database already")
