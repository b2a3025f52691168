"""Creation of a database whose manifest names many SSTs, none of which is there: for openings.

wide_database.py FOLDER SSTS
"""

from __future__ import annotations

import asyncio
import json
import sys

from shalekv.format.manifest import encode_manifest
from shalekv.format.names import manifest_name
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.settings import MIB, StoreSettings
from shalekv.store.opening import open_store
from tests.kit.processes.in_process import real_runtime

LOWEST = 3


async def create(folder: str, count: int) -> None:
    """Write its first manifest."""
    infos = [
        SstInfo(
            n.to_bytes(16, "big"), LOWEST, b"key%013d" % n, b"key%013d~" % n,
            0, 0, 1_000, 1_000, n, n + 1, 9_000, 0, MIB, n,
        )
        for n in range(count)
    ]  # fmt: skip
    manifest = Manifest(
        database_id=bytes(range(16)),
        manifest_id=0,
        write_id=bytes(16),
        wal_id_last_compacted=99,
        last_compacted_seq=count + 1,
        leveled_ssts=SstTable.from_infos(infos),
    )
    with real_runtime() as runtime:
        store = open_store(f"file://{folder}", runtime, StoreSettings())
        await store.create(manifest_name(0), encode_manifest(manifest))
        await store.close()


if __name__ == "__main__":
    asyncio.run(create(sys.argv[1], int(sys.argv[2])))
    print(json.dumps({}))
