"""Lets go of what other databases keep for this one, a clone, when it reads none of it any more.

The pin there goes first, and the origin that tells of it last: after a crash it is tried again.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from shalekv.engine.editing import edit_deadline
from shalekv.errors import ShaleError
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.origins import drop_pins, spent_pins
from shalekv.protocol.retention import Pins
from shalekv.read.origins import origin_pins
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest

log = structlog.get_logger()


async def release_origins(
    store: CasStore, stored: StoredManifest, manifest: Manifest, pins: Iterable[Pins]
) -> None:
    """Remove the pins that no active manifest needs; `pins` are those of all of them.

    What cannot be removed now is left to the next collection. Raises what an edit of the own
    manifest does.
    """
    readable = {each.manifest_id for each in manifest.snapshots if not each.ssts_only}
    readable.add(manifest.manifest_id)
    needed = {pin for each in pins if each.manifest_id in readable for pin in each.origin_pins}
    spent = spent_pins(manifest, needed)
    if not spent:
        return
    released = set()
    async with origin_pins(store, manifest) as held:
        for snapshot_id, url in sorted(spent.items()):
            told = log.bind(origin=url, snapshot_id=snapshot_id.hex())
            try:
                await held.release(url, snapshot_id)
            except ShaleError as error:  # also of damage there: it is no business of this database
                told.warning("snapshot of an origin not removed", problem=str(error))
                continue
            told.info("snapshot of an origin removed")
            released.add(snapshot_id)
    if released:
        async with edit_deadline(store):
            await stored.edit(
                lambda current: drop_pins(current, released),
                lambda current: not any(o.snapshot_id in released for o in current.origins),
            )
