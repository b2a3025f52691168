"""What stands in the stores of a database, and what was kept of what was deleted there."""

from __future__ import annotations

from shalekv.format import names
from shalekv.store.api import ObjectStore
from tests.sim.stored import Stored

FOLDERS = (names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER)


async def gather(*stores: ObjectStore) -> Stored:
    """What the objects of all these stores hold; nobody knows when they had them.

    Of two objects of one name, that of the first store counts. Nobody may write or delete
    meanwhile.
    """
    objects: dict[str, bytes] = {}
    for store in stores:
        for folder in FOLDERS:
            async for info in store.list(folder):
                if info.name not in objects:
                    objects[info.name] = (await store.get(info.name)).data
    return Stored.decode(objects)
