"""Lists all objects of a database, as the rules of retention judge them."""

from __future__ import annotations

from shalekv.core.collectable import Folder, Listed
from shalekv.format import names
from shalekv.store.api import ObjectInfo
from shalekv.store.cas import CasStore

_FOLDERS = {
    names.MANIFEST_FOLDER: Folder.MANIFEST,
    names.WAL_FOLDER: Folder.WAL,
    names.LEVELS_FOLDER: Folder.LEVELS,
}


async def list_objects(store: CasStore) -> list[Listed]:
    """Every object, in the order in which garbage is deleted: by folder, then by name."""
    return [as_listed(info) for prefix in _FOLDERS async for info in store.reads.list(prefix)]


def is_ours(name: str) -> bool:
    """Whether this is a name that we give."""
    parsers = (names.parse_manifest_name, names.parse_wal_name, names.parse_level_name)
    return any(parse(name) is not None for parse in parsers)


def as_listed(info: ObjectInfo) -> Listed:
    """An object below one of the three folders, as the rules judge it."""
    name = info.name
    folder = _FOLDERS[f"{name.partition('/')[0]}/"]
    number: int | None = None
    sst_id: bytes | None = None
    if folder is Folder.MANIFEST:
        number = names.parse_manifest_name(name)
    elif folder is Folder.WAL:
        number = names.parse_wal_name(name)
    else:
        sst_id = names.parse_level_name(name)
    return Listed(folder, name, info.size_bytes, info.modified_ms, number, sst_id)
