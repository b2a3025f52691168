"""The objects of a database in memory as files of a local store, and back."""

from __future__ import annotations

import os
from pathlib import Path

from shalekv.store.api import ObjectInfo, StoredObject
from tests.kit.engine.collection import Ground


def save(ground: Ground, root: Path) -> None:
    """Write the objects as files that are older than any collector asks for."""
    for name in ground.names():
        found = ground.objects.find(name)
        assert found is not None
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found.data)
        os.utime(path, (0, found.info.modified_ms / 1_000))


def load(root: Path, like: Ground) -> Ground:
    """The objects in a folder, to be looked at."""
    ground = Ground()
    ground.last_wal_id = like.last_wal_id
    for path in sorted(root.glob("*/*")):
        data = path.read_bytes()
        info = ObjectInfo(str(path.relative_to(root)), len(data), 0)
        ground.objects.add(StoredObject(info, data))
    return ground
