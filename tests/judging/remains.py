"""Why each object of a database exists, derived from the manifest alone (I8, no orphans).

Written without the code that collects. Needed objects must exist; unneeded ones must be gone after
the last collection.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shalekv.format import names
from shalekv.protocol.manifest import Manifest


def needed(manifests: Collection[Manifest]) -> dict[str, str]:
    """Return why each object is needed: by the current manifest, or by one that a snapshot names.

    Of the WAL only uncompacted objects are needed.
    """
    reasons: dict[str, str] = {}
    for manifest in manifests:
        whose = f"manifest {manifest.manifest_id}"
        reasons[names.manifest_name(manifest.manifest_id)] = "active"
        for info in manifest.leveled_ssts:
            reasons[names.level_name(info.id)] = f"level {info.level} of {whose}"
        for load in manifest.pending_loads:
            for info in load.ssts:
                reasons[names.level_name(info.id)] = f"load {load.load_id} of {whose}"
        if manifest.wal_id_last_seen is not None:
            for slot in range(manifest.first_uncompacted_wal_id, manifest.wal_id_last_seen + 1):
                reasons[names.wal_name(slot)] = f"not compacted in {whose}"
    return reasons


def missing(manifests: Collection[Manifest], objects: Collection[str]) -> dict[str, str]:
    """Return needed objects that do not exist, and why they are needed (I8)."""
    return {name: why for name, why in needed(manifests).items() if name not in objects}


def unexplained(
    manifests: Collection[Manifest], objects: Mapping[str, bool], *, current: Manifest
) -> list[str]:
    """Return the objects that are not needed.

    `objects` maps each to whether it is a fence, which stays for ever (F1). The collector keeps the
    last compacted slot.
    """
    reasons = needed(manifests)
    last = min((m.wal_id_last_compacted or 0 for m in manifests), default=0)
    left = []
    for name, is_fence in objects.items():
        slot = names.parse_wal_name(name)
        is_log = slot is not None and slot >= last
        if name not in reasons and not is_fence and not is_log:
            left.append(f"{name} (current manifest: {current.manifest_id})")
    return left
