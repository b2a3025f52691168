"""A job over a range of keys beside a compactor: what the manifest says of it, and who yields.

The job does not claim the epoch of the compactor, since whoever has that merges the WAL, and writes
would wait for its return. It is sound without: its edit demands that its lease and all its inputs
are still there, and that nothing has come into the level of its outputs where they are to stand.
What is added meanwhile is newer and stands above.

It also gets done, because its lease *reserves* its inputs: all that the levels held when the lease
was made. Compactors leave that alone while the lease lives (see `standing_back`). A merge that
began before is published only if it touches nothing of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from shalekv.core.tree import SYSTEM_LEVEL, SortedRun
from shalekv.errors import LeaseLost, ManifestConflict
from shalekv.protocol.compaction.jobs import MergeJob, Result, WalResult
from shalekv.protocol.compaction.range_job import RangeResult
from shalekv.protocol.lease import check_lease, protects, with_lease
from shalekv.protocol.manifest import Lease, Manifest
from shalekv.protocol.origins import without_unread
from shalekv.protocol.sst_table import SstInfo

_MS_PER_S = 1_000


def reservations(manifest: Manifest, now_ms: float) -> list[Lease]:
    """The leases that reserve SSTs and have not expired; `now_ms` is the store's clock.

    The collector decides when a lease is gone. This only tells who still has to be waited for.
    """
    return [
        lease
        for lease in manifest.leases
        if lease.reserved_seq is not None
        and (not lease.expire_time_s or now_ms < lease.expire_time_s * _MS_PER_S)
    ]


def reserve(manifest: Manifest, lease: Lease, *, now_ms: int) -> Manifest:
    """The manifest whose levels are reserved for the holder of this lease.

    Raises `ManifestConflict` while another job has reserved them.
    """
    for other in reservations(manifest, now_ms):
        if other.id != lease.id:
            message = (
                f"{other.holder} merges the levels already, under lease {other.id.hex()}. Nothing "
                f"was done: wait for its end. If it has died, the lease ends within "
                f"{max(other.expire_time_s - now_ms // _MS_PER_S, 0)} s"
            )
            raise ManifestConflict(message)
    return with_lease(manifest, replace(lease, reserved_seq=manifest.last_compacted_seq))


def reserved_seq(manifest: Manifest, lease_id: bytes) -> int:
    """Up to where the lease reserves the levels.

    Raises `LeaseLost`; and `ManifestConflict` when a process that does not know of reservations has
    written the manifest since, and has left this one out.
    """
    check_lease(manifest, lease_id)
    seq = next(each.reserved_seq for each in manifest.leases if each.id == lease_id)
    if seq is None:
        message = (
            f"lease {lease_id.hex()} reserves nothing in manifest {manifest.manifest_id}: an older "
            "version of ShaleKV has written it. Nothing was done: end its processes, or try again"
        )
        raise ManifestConflict(message)
    return seq


def check_not_reserved(manifest: Manifest, result: Result, known: Collection[bytes]) -> None:
    """Raise `ManifestConflict` if a compactor's merge has come too late for a job over a range.

    `known` are the leases in the manifest for which the merge was picked: it may have been picked
    in spite of those.
    """
    if isinstance(result, WalResult) or result.job.source_level == SYSTEM_LEVEL:
        return
    job: MergeJob = result.job
    levels = {info.id: info.level for info in manifest.leveled_ssts}
    if any(levels.get(info.id) != info.level for info in job.inputs):
        message = "a job over a range of keys has merged an input meanwhile. Nothing was published"
        raise ManifestConflict(message)
    oldest = min(info.min_seq for info in job.inputs)
    for lease in manifest.leases:
        seq = lease.reserved_seq
        if seq is not None and lease.id not in known and oldest <= seq:
            message = f"{lease.holder} has reserved an input meanwhile. Nothing was published"
            raise ManifestConflict(message)


def publish_range(manifest: Manifest, result: RangeResult, lease_id: bytes) -> Manifest:
    """The manifest with the result, whose outputs were written under the lease.

    The lease stays, but reserves nothing any more: so it is told from one that was collected.
    Raises `LeaseLost`, and `ManifestConflict` when another process has merged an input, or put
    something where an output is to stand: nothing is to be published then.
    """
    check_lease(manifest, lease_id)
    for info in result.outputs:
        if not protects(lease_id, info.id):
            message = f"the SST {info.id.hex()} was not written under the lease {lease_id.hex()}"
            raise LeaseLost(message)
    job = result.job
    levels = {info.id: info.level for info in manifest.leveled_ssts}
    for info in job.inputs:
        if levels.get(info.id) != info.level:
            message = (
                f"another process has merged the SST {info.id.hex()}, which is not in level "
                f"{info.level} of manifest {manifest.manifest_id} any more. Nothing was published: "
                "start again"
            )
            raise ManifestConflict(message)
    replaced = {info.id for info in job.inputs}
    kept = [info for info in manifest.leveled_ssts if info.id not in replaced]
    _check_room(manifest, job.target_level, kept, result.outputs)
    leases = (
        replace(each, reserved_seq=None) if each.id == lease_id else each
        for each in manifest.leases
    )
    edited = replace(
        manifest,
        leveled_ssts=manifest.leveled_ssts.replace(replaced, result.outputs),
        leases=tuple(leases),
    )
    return without_unread(edited)


def is_range_published(manifest: Manifest, result: RangeResult, lease_id: bytes) -> bool:
    """Whether `publish_range` of this result is contained in `manifest` (F2).

    Outputs that were merged since are not denied: only that edit leaves the lease without what it
    reserved.
    """
    ids = {info.id for info in manifest.leveled_ssts}
    if any(info.id in ids for info in result.outputs):
        return True
    is_done = any(each.id == lease_id and each.reserved_seq is None for each in manifest.leases)
    return is_done and not any(info.id in ids for info in result.job.inputs)


def _check_room(
    manifest: Manifest, target_level: int, kept: Iterable[SstInfo], outputs: Iterable[SstInfo]
) -> None:
    """Raise unless the outputs fit beside what is kept, and nothing is below them."""
    below = [info for info in kept if target_level <= info.level < SYSTEM_LEVEL]
    try:
        SortedRun.of(target_level, [*below, *outputs])
    except ValueError as error:
        message = (
            f"another process has put an SST into manifest {manifest.manifest_id} where an output "
            f"is to stand: {error}. Nothing was published: start again"
        )
        raise ManifestConflict(message) from None
