"""What a writer reads and decides by while the levels below its memory change."""

from __future__ import annotations

import asyncio

from shalekv.core.snapshot import find_snapshot
from shalekv.core.transaction import Needs
from shalekv.format import names
from shalekv.manifest.stored import StoredManifest
from shalekv.roles.compactor import Compactor
from shalekv.runtime import Runtime
from shalekv.settings import (
    CompactorSettings,
    CompactSettings,
    StoreSettings,
    UrlSettings,
)
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from tests.kit.engine.interposed import InterposedStore
from tests.kit.processes.in_process import (
    memory_store,
    put_at,
    real_runtime,
    running,
    serve_settings,
)

DEADLINE_S = 60


async def compact(store: ObjectStore, runtime: Runtime) -> None:
    """Compact what is in the log, and publish it."""
    settings = CompactSettings(
        database=UrlSettings(url=store.url), compactor=CompactorSettings(wal_trigger_age_ms=0)
    )
    hurry = asyncio.Event()
    compactor = await Compactor.open(store, settings=settings, runtime=runtime, hurry=hurry)
    await compactor.run(is_once=True)
    await compactor.close()


async def test_a_tree_is_that_of_the_manifest_that_its_snapshot_names() -> None:
    """When a compactor publishes right behind the edit that makes a snapshot, the edit has landed,
    and its result is a newer manifest: the writer still reads by the one that the snapshot names.
    """
    store = memory_store()
    settings = serve_settings(writer={"fence_poll_ms": 3_600_000})
    with real_runtime() as runtime, real_runtime(seed=2) as other:
        is_served, overtaken = False, asyncio.Event()

        async def after(operation: str, name: str) -> None:
            is_edit = operation == "create" and name.startswith(names.MANIFEST_FOLDER)
            if is_served and is_edit and not overtaken.is_set():
                overtaken.set()
                await compact(store, other)

        behind = InterposedStore(store, after=after)
        async with (
            asyncio.timeout(DEADLINE_S),
            running(behind, settings, runtime) as writer,
        ):
            levels = writer.engine.levels
            await put_at(writer, b"first", b"")
            before = levels.current
            await compact(store, other)
            await put_at(writer, b"second", b"")
            is_served = True
            await writer.engine.ownership.confirm()  # it looks, and follows what it sees
            while levels.current is before:
                await runtime.clock.sleep_ms(1)
            assert overtaken.is_set()
            held = levels.current
            stored = StoredManifest(CasStore(store, other, StoreSettings()))
            snapshot = find_snapshot(await stored.refresh(), held.snapshot_id)
            assert snapshot is not None
            assert held.tree.manifest_id == snapshot.manifest_id < stored.current.manifest_id


async def test_nobody_decides_by_memory_that_is_about_to_go() -> None:
    """What was looked up after the levels have changed, and before memory lets go of what they
    hold, does not rest on memory for that: it still holds when memory has let go.
    """
    store = memory_store()
    settings = serve_settings(writer={"fence_poll_ms": 3_600_000})
    needs = Needs(keys=(b"key",))
    with real_runtime() as runtime, real_runtime(seed=2) as other:
        async with asyncio.timeout(DEADLINE_S), running(store, settings, runtime) as writer:
            engine = writer.engine
            await put_at(writer, b"key", b"value")
            before, base = engine.levels.current, engine.levels.base
            await compact(store, other)
            await engine.ownership.confirm()
            while engine.levels.current is before:
                await runtime.clock.sleep_ms(1)
            assert engine.committed(b"key") is not None  # since `base` is held
            below = await engine.below.look(needs)
            del base
            while engine.committed(b"key") is not None:
                await runtime.clock.sleep_ms(1)
            assert engine.below.is_current(below, needs)
            assert below.found[b"key"].value == b"value"
