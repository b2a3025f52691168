"""Rules that a manifest keeps by itself, and that one keeps beside an older one (I5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.manifest import Manifest

_NEVER_DOWN = (
    "writer_epoch",
    "compactor_epoch",
    "writer_first_seq",
    "last_compacted_seq",
    "gc_cutoff_ms",
    "loads_forgotten_ms",
    "logical_time_ms",
    "wal_generation",
    "wal_id_last_compacted",
    "wal_id_last_seen",
    "time_reset_wal_id",
)
_SET_BACK = ("loads_forgotten_ms", "logical_time_ms")  # when time_reset_wal_id goes up
_NEVER_CHANGED = ("database_id", "cas_mode")
_NONCES = (("writer_epoch", "writer_nonce"), ("compactor_epoch", "compactor_nonce"))


def manifest_findings(name: str, manifest: Manifest) -> Iterator[Finding]:
    """What contradicts itself in one manifest, its table of SSTs left aside."""
    for problem in _manifest_contradictions(manifest):
        yield Finding(name, FindingKind.MANIFEST_FIELD, problem)


def succession_findings(name: str, older: Manifest, newer: Manifest) -> Iterator[Finding]:
    """What the manifest `newer`, the object `name`, cannot be if `older` was before it."""
    before = f"than in manifest {older.manifest_id}"
    for field in _NEVER_CHANGED:
        if getattr(older, field) != getattr(newer, field):
            problem = f"{field} is another one {before}: it never changes"
            yield Finding(name, FindingKind.MANIFEST_ORDER, problem)
    for field in _NEVER_DOWN:
        old, new = getattr(older, field), getattr(newer, field)
        is_set_back = field in _SET_BACK and older.time_reset_wal_id != newer.time_reset_wal_id
        if old is not None and (new is None or new < old) and not is_set_back:
            problem = f"{field} is {new}, lower {before}, where it is {old}"
            yield Finding(name, FindingKind.MANIFEST_ORDER, problem)
    for epoch, nonce in _NONCES:
        is_same = getattr(older, epoch) == getattr(newer, epoch)
        if is_same and getattr(older, nonce) != getattr(newer, nonce):
            problem = f"{nonce} is another one {before}, and {epoch} is the same"
            yield Finding(name, FindingKind.MANIFEST_ORDER, problem)


def _manifest_contradictions(manifest: Manifest) -> Iterator[str]:
    if manifest.wal_id_last_compacted is None and manifest.leveled_ssts.count:
        yield "nothing is compacted (wal_id_last_compacted), and yet there are SSTs in the levels"
    if not 1 <= manifest.max_parallel_writes <= manifest.fence_width:
        yield (
            f"fence_width is {manifest.fence_width} and max_parallel_writes "
            f"{manifest.max_parallel_writes}: expected 1 or more, and as many fences as writes"
        )
    yield from _repeated("snapshots", (snapshot.id.hex() for snapshot in manifest.snapshots))
    yield from _repeated("snapshots", (s.name for s in manifest.snapshots if s.name))
    yield from _repeated("leases", (lease.id.hex() for lease in manifest.leases))
    yield from _repeated("pending_loads", (load.load_id for load in manifest.pending_loads))
    yield from _repeated("recent_loads", (load.load_id for load in manifest.recent_loads))
    for snapshot in manifest.snapshots:
        if snapshot.manifest_id > manifest.manifest_id:
            yield (
                f"snapshot {snapshot.id.hex()} is of manifest {snapshot.manifest_id}, which comes "
                "after this one"
            )


def _repeated(field: str, names: Iterable[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{field}: {name} stands there {count} times"
