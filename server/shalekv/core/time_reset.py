"""Setting logical time back, the only exception from I5 (protocol, "Logical time")."""

from __future__ import annotations

from dataclasses import replace

from shalekv.core.compaction.publish import claim_compactor_epoch
from shalekv.core.fencing import WriterId, check_owner
from shalekv.core.manifest import Manifest


def reset_time(
    manifest: Manifest, own: WriterId, *, now_ms: int, last_wal_id: int, compactor_nonce: bytes
) -> Manifest:
    """The edit that sets logical time to `now_ms`. Raises `Fenced`.

    `last_wal_id` is the last slot of `own`, whose fences stand: whatever an older writer has put
    into the log, or still will, is before it, and its times do not count any more. A compactor that
    has read them is superseded. REQUIRES: `own` has finished its opening, and written nothing.
    """
    check_owner(manifest, own)
    recent = (
        replace(load, logical_time_ms=min(load.logical_time_ms, now_ms))
        for load in manifest.recent_loads
    )
    return replace(
        claim_compactor_epoch(manifest, compactor_nonce),
        logical_time_ms=now_ms,
        time_reset_wal_id=last_wal_id,
        recent_loads=tuple(recent),
        loads_forgotten_ms=min(manifest.loads_forgotten_ms, now_ms),
    )
