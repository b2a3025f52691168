"""Snapshots live by the clock of the store, whatever becomes of our own."""

from __future__ import annotations

from shalekv.engine.snapshot_views import CLOCK_MS
from shalekv.errors import ObjectNotFound
from tests.unit.engine.snapshot_ground import GroundClock, filled, views_of


async def test_clock_that_jumps_ends_no_snapshot() -> None:
    """The store is asked for the time before a snapshot is said to have expired."""
    ground = await filled()
    created = await ground.snapshots().create(ttl_ms=10_000)
    views = await views_of(ground)
    await views.open(created.id)
    clock = views.store.runtime.clock
    assert isinstance(clock, GroundClock)
    clock.jumped_ms += CLOCK_MS / 2
    assert (await views.check(created.id)).id == created.id
    missed = ObjectNotFound(ground.store.url, "get", "wal/1", "it is not there")
    clock.jumped_ms += CLOCK_MS / 2
    assert await views.explain(missed, created.id) is missed
