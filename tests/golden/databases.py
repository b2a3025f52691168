"""Golden databases as stores: what servers of this and earlier versions have written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from shalekv.format.coding import crc32c
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.format.names import parse_manifest_name
from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.store.api import ObjectInfo, ObjectStore, StoredObject
from shalekv.store.memory import MemoryObjects, MemoryStore, named_objects
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.kit.inline_runtime import inline_runtime
from tests.kit.memory_records import MemoryRecords

DATABASES = Path(__file__).parent / "databases"
MEMORY = "memory://"
RECORDS_FILE = "records.json"  # of a database in two phases
PARENT_FOLDER = "parent"  # of a clone
LONG_BYTES = 64  # of a value, from which on its checksum replaces it
NAMES = sorted(path.parent.name for path in DATABASES.glob("*/database.json"))


def description_of(name: str) -> dict[str, Any]:
    text = (DATABASES / name / "database.json").read_text("ascii")
    description: dict[str, Any] = json.loads(text)
    return description


def text_of(data: bytes) -> str:
    return data.decode("latin-1")


def described(value: bytes) -> str:
    if len(value) < LONG_BYTES:
        return text_of(value)
    return f"{len(value)} bytes {crc32c(value):08x}"


def store_of(name: str) -> ObjectStore:
    """Return a copy in memory, with a constant clock at the time when the database was left."""
    now_ms = int(description_of(name)["now_ms"])
    objects = MemoryObjects()
    parent = DATABASES / name / PARENT_FOLDER
    parent_url = f"{MEMORY}{name.replace('_', '-')}-parent" if parent.exists() else ""
    _load(objects, DATABASES / name, now_ms, parent_url)
    store = MemoryStore(lambda: now_ms, name=name.replace("_", "-"), objects=objects)
    if parent_url:
        _load(named_objects(parent_url.removeprefix(MEMORY)), parent, now_ms, "")
    records = DATABASES / name / RECORDS_FILE
    if not records.exists():
        return store
    table: dict[Destination, CreateRecord] = {}
    for written, source, is_committed in json.loads(records.read_text("ascii")):
        destination = Destination(store.url, written)
        table[destination] = CreateRecord(destination, source, is_committed=is_committed)
    return TwoPhaseStore(store, MemoryRecords(table=table), inline_runtime())


def _load(objects: MemoryObjects, folder: Path, now_ms: int, parent_url: str) -> None:
    """Copy objects into memory; of a clone, which finds its parent at another URL there."""
    for path in sorted(folder.glob("*/*")):
        if not path.is_file():
            continue
        name, data = str(path.relative_to(folder)), path.read_bytes()
        if parent_url and parse_manifest_name(name) is not None:
            manifest = decode_manifest(name, data)
            moved = tuple(replace(each, url=parent_url) for each in manifest.origins)
            data = encode_manifest(replace(manifest, origins=moved))
        objects.replace(StoredObject(ObjectInfo(name, len(data), now_ms), data))
