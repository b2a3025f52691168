"""Checks that the databases which a clone shares SSTs with still keep them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from shalekv.engine.fsck.active import Active
from shalekv.engine.fsck.progress import Scope
from shalekv.errors import CorruptObject, DatabaseNotFound, StoreError
from shalekv.format.names import manifest_name
from shalekv.jobs.fsck.objects import finding_of, unreadable
from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.origins import is_pin, needed_pins
from shalekv.read.origins import OriginPins


async def check_origins(scope: Scope, active: Active) -> AsyncIterator[Finding]:
    """Pins that are gone, or that will be, of the manifests that may be read."""
    named = {
        (url, snapshot_id): manifest_name(manifest.manifest_id)
        for manifest in active.readable()
        for snapshot_id, url in needed_pins(manifest).items()
    }
    for (url, snapshot_id), name in sorted(named.items()):
        try:
            found = await OriginPins(scope.origins).find(url, snapshot_id)
        except DatabaseNotFound:
            found = None
        except StoreError as error:
            yield unreadable(name, error)
            continue
        except CorruptObject as error:
            yield finding_of(error)
            continue
        if found is not None and is_pin(found):
            continue
        pin = f"the snapshot {snapshot_id.hex()} of {url}, which keeps SSTs that this names,"
        if found is None:
            yield Finding(name, FindingKind.ORIGIN, f"{pin} is gone")
        else:
            problem = f"{pin} may expire: start a writer or a compactor, which mends it"
            yield Finding(name, FindingKind.ORIGIN, problem)
