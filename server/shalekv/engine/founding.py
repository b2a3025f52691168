"""The first manifest of a database: whoever creates it has made the database."""

from __future__ import annotations

from shalekv.errors import DatabaseExists, IllegalState
from shalekv.format import names
from shalekv.format.manifest import encode_manifest
from shalekv.protocol.manifest import Manifest
from shalekv.store.cas import CasStore
from shalekv.store.claim import Taken


async def check_vacant(cas: CasStore) -> None:
    """Raise `DatabaseExists` when any manifest is there: the first may have been collected."""
    if await _manifest_ids(cas):
        raise _exists(cas)


async def any_wal_object(cas: CasStore) -> str | None:
    """The name of the first WAL object; None: there is none."""
    async for info in cas.reads.list(names.WAL_FOLDER):
        if names.parse_wal_name(info.name) is not None:
            return info.name
    return None


async def found(cas: CasStore, manifest: Manifest) -> None:
    """Create the database whose first manifest this is. Raises `DatabaseExists`."""
    name = names.manifest_name(manifest.manifest_id)
    outcome = await cas.claim(name, encode_manifest(manifest))
    # Another process may have created the database, and collected its first manifest, since it was
    # looked for (F2).
    if isinstance(outcome, Taken) or await _manifest_ids(cas) != {manifest.manifest_id}:
        raise _exists(cas)


def remains(cas: CasStore, name: str) -> IllegalState:
    """The error of whoever would put a database on what is left of another."""
    return IllegalState(
        f"{cas.url} holds {name} and no manifest: the manifests of this database are lost. "
        "Put them back, restore the database from a copy, or create one at another URL"
    )


async def _manifest_ids(cas: CasStore) -> set[int]:
    listed = cas.reads.list(names.MANIFEST_FOLDER)
    ids = {names.parse_manifest_name(info.name) async for info in listed}
    return {manifest_id for manifest_id in ids if manifest_id is not None}


def _exists(cas: CasStore) -> DatabaseExists:
    return DatabaseExists(f"{cas.url} holds a database already")
