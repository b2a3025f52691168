"""Golden databases as stores: what servers of this and earlier versions have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shalekv.store.api import ObjectInfo, StoredObject
from shalekv.store.memory import MemoryObjects, MemoryStore

DATABASES = Path(__file__).parent / "databases"
NAMES = sorted(path.parent.name for path in DATABASES.glob("*/database.json"))


def description_of(name: str) -> dict[str, Any]:
    """What a golden database holds."""
    text = (DATABASES / name / "database.json").read_text("ascii")
    description: dict[str, Any] = json.loads(text)
    return description


def store_of(name: str) -> MemoryStore:
    """A copy in memory, in which time stands still where the database was left."""
    now_ms = int(description_of(name)["now_ms"])
    objects = MemoryObjects()
    for path in sorted((DATABASES / name).glob("*/*")):
        data = path.read_bytes()
        info = ObjectInfo(str(path.relative_to(DATABASES / name)), len(data), now_ms)
        objects.add(StoredObject(info, data))
    return MemoryStore(lambda: now_ms, name=name.replace("_", "-"), objects=objects)
