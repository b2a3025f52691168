"""Golden databases as stores: what servers of this and earlier versions have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shalekv.core.two_phase import Destination, Record
from shalekv.store.api import ObjectInfo, ObjectStore, StoredObject
from shalekv.store.memory import MemoryObjects, MemoryStore
from shalekv.store.two_phase.memory import MemoryRecords
from shalekv.store.two_phase.store import TwoPhaseStore
from tests.golden.places import RECORDS_FILE
from tests.unit.store.inline_runtime import inline_runtime

DATABASES = Path(__file__).parent / "databases"
NAMES = sorted(path.parent.name for path in DATABASES.glob("*/database.json"))


def description_of(name: str) -> dict[str, Any]:
    """What a golden database holds."""
    text = (DATABASES / name / "database.json").read_text("ascii")
    description: dict[str, Any] = json.loads(text)
    return description


def store_of(name: str) -> ObjectStore:
    """A copy in memory, in which time stands still where the database was left."""
    now_ms = int(description_of(name)["now_ms"])
    objects = MemoryObjects()
    for path in sorted((DATABASES / name).glob("*/*")):
        data = path.read_bytes()
        info = ObjectInfo(str(path.relative_to(DATABASES / name)), len(data), now_ms)
        objects.add(StoredObject(info, data))
    store = MemoryStore(lambda: now_ms, name=name.replace("_", "-"), objects=objects)
    records = DATABASES / name / RECORDS_FILE
    if not records.exists():
        return store
    table: dict[Destination, Record] = {}
    for written, source, is_committed in json.loads(records.read_text("ascii")):
        destination = Destination(store.url, written)
        table[destination] = Record(destination, source, is_committed=is_committed)
    return TwoPhaseStore(store, MemoryRecords(table=table), inline_runtime())
