"""Creating a database: its first manifest."""

from __future__ import annotations

from shalekv.core.manifest import Manifest
from shalekv.errors import DatabaseExists
from shalekv.format import names
from shalekv.format.manifest import encode_manifest
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.claim import Taken


async def create_database(store: ObjectStore, runtime: Runtime, settings: StoreSettings) -> None:
    """Write manifest 0 of a new database.

    Raises `DatabaseExists` when any manifest is there: the first may have been collected.
    """
    cas = CasStore(store, runtime, settings)
    if await _manifest_ids(cas):
        raise _exists(store)
    manifest = Manifest(
        database_id=runtime.random.randbytes(16),
        manifest_id=0,
        write_id=runtime.random.randbytes(16),
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


def _exists(store: ObjectStore) -> DatabaseExists:
    return DatabaseExists(f"{store.url} holds a database already")
