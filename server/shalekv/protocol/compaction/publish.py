"""What a compactor does to the manifest: claim its epoch, publish results (protocol, "Compacting").

Every edit of a compactor first checks that it still is the compactor, so that the older one of
two stops and no result is published twice (I9), and that its lease is still there, so that what
it publishes was not collected meanwhile (F3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shalekv.errors import IllegalState, LeaseLost, Superseded
from shalekv.protocol.compaction.jobs import MergeJob, MergeResult, Result, WalResult
from shalekv.protocol.lease import check_lease, protects
from shalekv.protocol.loads import level_rows, with_committed
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.origins import without_unread
from shalekv.protocol.sst_table import SstInfo

RECENT_LOADS_COUNT = 1_000  # that are remembered unless the settings say otherwise


@dataclass(frozen=True, slots=True)
class CompactorId:
    """The name of one compactor: its epoch, and a nonce, since a recycled manifest id lets two
    processes win one epoch (protocol, F2).
    """

    epoch: int
    nonce: bytes


def claim_compactor_epoch(manifest: Manifest, nonce: bytes) -> Manifest:
    """The manifest whose compactor is the process with this nonce; an older one is superseded."""
    return replace(manifest, compactor_epoch=manifest.compactor_epoch + 1, compactor_nonce=nonce)


def check_unclaimed(manifest: Manifest, seen: Manifest, nonce: bytes) -> None:
    """Raise `Superseded` if another compactor has claimed its epoch since `seen` was read.

    A claim whose process stood still is made again (F2): it must not displace who came later.
    """
    if manifest.compactor_nonce in (seen.compactor_nonce, nonce):
        return
    epoch = manifest.compactor_epoch
    message = (
        f"manifest {manifest.manifest_id} belongs to the compactor with epoch {epoch}, which has "
        "taken over while this one began. Nothing was published"
    )
    raise Superseded(message, own_epoch=seen.compactor_epoch + 1, newer_epoch=epoch)


def check_compactor(manifest: Manifest, own: CompactorId) -> None:
    """Raise `Superseded` unless `manifest` shows `own` as the compactor.

    The same epoch in other hands means that our claim was made at a recycled manifest id and never
    counted (F2): that compactor is superseded just the same. Raises `IllegalState` when the epoch
    went down.
    """
    if _is_compactor(manifest, own):
        return
    if manifest.compactor_epoch < own.epoch:
        message = (
            f"manifest {manifest.manifest_id} shows compactor epoch {manifest.compactor_epoch} "
            f"although epoch {own.epoch} was won before: epochs never go down"
        )
        raise IllegalState(message)
    message = (
        f"this compactor (epoch {own.epoch}) was superseded: manifest {manifest.manifest_id} "
        f"belongs to the compactor with epoch {manifest.compactor_epoch}. Nothing was published"
    )
    raise Superseded(message, own_epoch=own.epoch, newer_epoch=manifest.compactor_epoch)


def publish(
    manifest: Manifest,
    own: CompactorId,
    result: Result,
    lease_id: bytes,
    *,
    recent_loads_max_count: int = RECENT_LOADS_COUNT,
) -> Manifest:
    """The manifest with this result, whose outputs were written under the lease.

    Raises `Superseded`, `LeaseLost`, and `IllegalState` when the manifest is not one that the
    result can follow: a slot is not the one after c, or an input is not in its level any more.
    """
    check_compactor(manifest, own)
    check_lease(manifest, lease_id)
    for info in written(result):
        if not protects(lease_id, info.id):
            message = f"the SST {info.id.hex()} was not written under the lease {lease_id.hex()}"
            raise LeaseLost(message)
    if isinstance(result, WalResult):
        return _with_slots(manifest, result, recent_loads_max_count)
    return _with_merge(manifest, result)


def is_published(manifest: Manifest, own: CompactorId, result: Result) -> bool:
    """Whether `publish` of this result is contained in `manifest` (F2).

    Exact as long as `own` is the compactor, since it publishes one result after the other. Later,
    a result whose outputs are merged already is denied: its compactor is superseded anyhow.
    """
    is_own = _is_compactor(manifest, own)
    if isinstance(result, WalResult) and is_own:  # a job over a range may have merged its outputs
        return result.job.slots.stop <= manifest.first_uncompacted_wal_id
    levels = {info.id: info.level for info in manifest.leveled_ssts}
    listed = _listed(result)
    if any(levels.get(info.id) != info.level for info in listed):
        return False
    if isinstance(result, WalResult):
        return result.job.slots.stop <= manifest.first_uncompacted_wal_id
    if result.job.is_move:
        return True
    if not is_own and not result.outputs:
        return False
    return not any(info.id in levels for info in result.job.inputs)


def written(result: Result) -> Iterator[SstInfo]:
    """The outputs that are new objects; a move has none."""
    if isinstance(result, MergeResult) and result.job.is_move:
        return iter(())
    return iter(result.outputs)


def _is_compactor(manifest: Manifest, own: CompactorId) -> bool:
    return (manifest.compactor_epoch, manifest.compactor_nonce) == (own.epoch, own.nonce)


def _listed(result: Result) -> Iterator[SstInfo]:
    """All rows that it adds to the levels."""
    yield from result.outputs
    if isinstance(result, WalResult):
        for load in result.loads:
            yield from level_rows(load)


def _with_slots(manifest: Manifest, result: WalResult, recent_loads_max_count: int) -> Manifest:
    slots = result.job.slots
    if not slots or slots.start != manifest.first_uncompacted_wal_id:
        message = (
            f"the WAL objects {slots.start} to {slots.stop - 1} do not follow what manifest "
            f"{manifest.manifest_id} has in its levels: that ends before slot "
            f"{manifest.first_uncompacted_wal_id}"
        )
        raise IllegalState(message)
    last = slots[-1]
    for load in result.loads:
        manifest = with_committed(
            manifest,
            load,
            logical_time_ms=result.logical_time_ms,
            max_count=recent_loads_max_count,
        )
    return replace(
        manifest,
        leveled_ssts=manifest.leveled_ssts.replace((), _listed(result)),
        wal_id_last_compacted=last,
        wal_id_last_seen=max(last, manifest.wal_id_last_seen or 0),
        last_compacted_seq=max(manifest.last_compacted_seq, result.last_seq),
        logical_time_ms=max(manifest.logical_time_ms, result.logical_time_ms),
    )


def _with_merge(manifest: Manifest, result: MergeResult) -> Manifest:
    job = result.job
    _check_inputs(manifest, job)
    removed = [info.id for info in (job.sources if job.is_move else job.inputs)]
    levels = manifest.leveled_ssts.replace(removed, result.outputs)
    return without_unread(replace(manifest, leveled_ssts=levels))


def _check_inputs(manifest: Manifest, job: MergeJob) -> None:
    levels = {info.id: info.level for info in manifest.leveled_ssts}
    for info in job.inputs:
        if levels.get(info.id) != info.level:
            message = (
                f"the SST {info.id.hex()} was merged, and is not in level {info.level} of manifest "
                f"{manifest.manifest_id}: another process must have edited the levels"
            )
            raise IllegalState(message)
