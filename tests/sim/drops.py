"""I8: a collector drops no snapshot and no lease of a manifest before its time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shalekv.core.manifest import Manifest
from shalekv.core.snapshot import NEVER
from shalekv.format.names import MANIFEST_FOLDER, parse_manifest_name
from tests.sim.errors import Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.objects import Applied
from tests.sim.stored import Stored

_COLLECTOR = "collector"  # the names of their nodes begin so


@checks(8, "database")
def check_i8_nothing_is_dropped_before_its_time(stored: Stored, log: Iterable[Applied]) -> int:
    """What a collector leaves out of a manifest had expired when that landed; how much there was.

    What lives until a second is there while the clock of the store shows that second.
    """
    by_id = {each.manifest_id: each for each in stored.manifests}
    dropped_count = 0
    seen: set[int] = set()
    for applied in log:
        if applied.operation != "create" or not applied.name.startswith(MANIFEST_FOLDER):
            continue
        manifest_id = parse_manifest_name(applied.name) or 0
        before, after = by_id.get(manifest_id - 1), by_id.get(manifest_id)
        is_first = manifest_id not in seen  # one that is created again has no effect (F2)
        seen.add(manifest_id)
        if not is_first or before is None or after is None:
            continue
        if not applied.node.startswith(_COLLECTOR):
            continue
        for what, end_s in _dropped(before, after):
            dropped_count += 1
            if end_s == NEVER or 1_000 * end_s >= applied.clock_ms:
                raise Violation(
                    f"I8: {applied.node} drops {what} in manifest {manifest_id} at "
                    f"{applied.clock_ms}, which lives until {end_s}"
                )
    return dropped_count


def _dropped(before: Manifest, after: Manifest) -> Iterator[tuple[str, int]]:
    """What is in the one and not in the other, and until when it lives."""
    snapshots = {each.id for each in after.snapshots}
    leases = {each.id for each in after.leases}
    for snapshot in before.snapshots:
        if snapshot.id not in snapshots:
            yield f"the snapshot {snapshot.id.hex()}", snapshot.snapshot_expire_time_s
    for lease in before.leases:
        if lease.id not in leases:
            yield f"the lease {lease.id.hex()} of {lease.holder}", lease.expire_time_s
