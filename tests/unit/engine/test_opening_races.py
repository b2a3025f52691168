"""Several openers at once, on a store with latencies and faults."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from shalekv.core.manifest import Manifest
from shalekv.engine.opened_log import OpenedLog
from shalekv.engine.recover import open_log
from shalekv.errors import Fenced
from shalekv.format import names
from shalekv.manifest.stored import StoredManifest
from shalekv.roles.database import create_database
from shalekv.settings import StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from tests.sim.run import simulate
from tests.sim.world import World


def cas_of(world: World, node: str) -> CasStore:
    """The store as `node` reaches it; it does not give up reading."""
    settings = StoreSettings(read_attempts=1_000)
    return CasStore(world.store_for(node), world.runtime_for(node), settings)


async def is_owner(opened: OpenedLog) -> bool:
    """Whether the manifest still shows this opening."""
    try:
        await opened.manifest.refresh()
    except Fenced:
        return False
    return True


async def merge_all_but_the_last(world: World, stored: StoredManifest) -> None:
    """Say of all WAL objects but the last one that they are compacted, again and again."""
    while True:
        await world.sleep_ms(1.0)
        c = len(world.store.names(names.WAL_FOLDER)) - 2
        if c < (await stored.refresh()).first_uncompacted_wal_id:
            continue

        def merge(manifest: Manifest, c: int = c) -> Manifest:
            return replace(manifest, wal_id_last_compacted=c)

        await stored.edit(merge, lambda m, c=c: m.wal_id_last_compacted == c)  # type: ignore[misc]


def test_an_opening_ends_although_its_fences_are_merged_at_once() -> None:
    """A writer that needs many fences opens beside a compactor that merges each of them (I13)."""

    async def main(world: World) -> None:
        runtime = world.runtime_for("creator")
        await create_database(world.store_for("creator"), runtime, StoreSettings())
        compactor = world.node("compactor")
        stored = StoredManifest(cas_of(world, "compactor"))
        compactor.start(merge_all_but_the_last(world, stored))
        settings = WriterSettings(max_parallel_writes=16, open_timeout_ms=3_600_000)
        async with asyncio.timeout(60):
            opened = await world.node("a").run(open_log(cas_of(world, "a"), settings, address="a"))
        assert await is_owner(opened)
        assert opened.manifest.current.fence_width == settings.max_parallel_writes

    simulate(0, main)
