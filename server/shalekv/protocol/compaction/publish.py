"""Edits of the manifest by compactions: claims of an epoch, reservations, published results. Pure.

Every edit of a *compactor* first checks that it still is the compactor, so that the older one of
two stops, and no result is published twice (I9). It also checks that its lease is still in the
manifest, so that the objects that it publishes were not collected meanwhile (F3). See
server/docs/protocol.md, "Compacting".

A *range job* merges a range of keys beside a compactor, and does not claim the epoch of the
compactor: that one merges the WAL, and writes would wait for its return. The edit of a range job
requires that its lease and all its inputs are still there, and that nothing was added to the level
of its outputs where these go, or below. Entries that are added meanwhile are newer, and are above.
So that it can succeed, its lease *reserves* its inputs: all entries that the levels held when the
lease was made. Compactors leave these alone while the lease lives (`compaction.policy`), and a
merge that began earlier is published only if it has none of them as an input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from shalekv.errors import IllegalState, LeaseLost, ManifestConflict, Superseded
from shalekv.protocol.compaction.jobs import MergeJob, MergeResult, Result, WalResult
from shalekv.protocol.compaction.range_job import RangeResult
from shalekv.protocol.lease import check_lease, protects, with_lease
from shalekv.protocol.loads import level_rows, with_committed
from shalekv.protocol.manifest import SYSTEM_LEVEL, Lease, Manifest, SortedRun
from shalekv.protocol.origins import without_unread
from shalekv.protocol.sst_table import SstInfo

# Committed loads, and streams of loads, that are remembered, so that none is applied twice. Each
# takes some 50 bytes of the manifest.
RECENT_LOADS_MAX_COUNT = 1_000
_MS_PER_S = 1_000


@dataclass(frozen=True, slots=True)
class CompactorId:
    """The name of one compactor: an epoch and a nonce.

    The nonce is needed because two processes can win one epoch at a recycled manifest id (F2).
    """

    epoch: int
    nonce: bytes


def claim_compactor_epoch(manifest: Manifest, nonce: bytes) -> Manifest:
    """Return the manifest whose compactor is the process with this nonce: it supersedes others."""
    return replace(manifest, compactor_epoch=manifest.compactor_epoch + 1, compactor_nonce=nonce)


def check_claimable(manifest: Manifest, after: CompactorId) -> None:
    """Raise `Superseded` if another compactor has taken over from `after` since.

    The own claim may be repeated: it may have landed although it seemed to fail. A lower epoch
    belongs to an older state, restored in place of what `after` has compacted.
    """
    if manifest.compactor_nonce != after.nonce and manifest.compactor_epoch >= after.epoch:
        check_compactor(manifest, after)


def check_unclaimed(manifest: Manifest, seen: Manifest, nonce: bytes) -> None:
    """Raise `Superseded` if another compactor has claimed its epoch since `seen` was read.

    The claim of a process that stalled is repeated (F2), but must not displace a later compactor.
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

    The same epoch with another nonce means that our claim was made at a recycled manifest id and
    never counted (F2): we are superseded as well. Raises `IllegalState` if the epoch went down.
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


def _is_compactor(manifest: Manifest, own: CompactorId) -> bool:
    return (manifest.compactor_epoch, manifest.compactor_nonce) == (own.epoch, own.nonce)


def publish(
    manifest: Manifest,
    own: CompactorId,
    result: Result,
    lease_id: bytes,
) -> Manifest:
    """Return the manifest with a result of a compactor, whose outputs were written under the lease.

    Raises `Superseded`, `LeaseLost`, and `IllegalState` if the result cannot follow the manifest:
    its first slot is not the one after c, or an input is not in its level any more.
    """
    check_compactor(manifest, own)
    check_lease(manifest, lease_id)
    for info in written(result):
        if not protects(lease_id, info.id):
            message = f"the SST {info.id.hex()} was not written under the lease {lease_id.hex()}"
            raise LeaseLost(message)
    if isinstance(result, WalResult):
        return _with_slots(manifest, result)
    return _with_merge(manifest, result)


def is_published(manifest: Manifest, own: CompactorId, result: Result) -> bool:
    """Return whether the edit `publish` with this result is contained in `manifest` (F2).

    The answer is exact as long as `own` is the compactor, since it publishes one result after the
    other. Later it is False for a result whose outputs were merged already; its compactor is
    superseded anyhow.
    """
    is_own = _is_compactor(manifest, own)
    if isinstance(result, WalResult) and is_own:  # a range job may have merged its outputs
        return result.job.slots.stop <= manifest.first_uncompacted_wal_id
    levels = {info.id: info.level for info in manifest.leveled_ssts}
    if any(levels.get(info.id) != info.level for info in _added_rows(result)):
        return False
    if isinstance(result, WalResult):
        return result.job.slots.stop <= manifest.first_uncompacted_wal_id
    if result.job.is_move:
        return True
    if not is_own and not result.outputs:
        return False
    return not any(info.id in levels for info in result.job.inputs)


def written(result: Result) -> Iterator[SstInfo]:
    """Iterate over the outputs that are new objects; a move has none."""
    if isinstance(result, MergeResult) and result.job.is_move:
        return iter(())
    return iter(result.outputs)


def _added_rows(result: Result) -> Iterator[SstInfo]:
    """Iterate over all rows that the result adds to the levels."""
    yield from result.outputs
    if isinstance(result, WalResult):
        for load in result.loads:
            yield from level_rows(load)


def _with_slots(manifest: Manifest, result: WalResult) -> Manifest:
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
            max_count=RECENT_LOADS_MAX_COUNT,
        )
    return replace(
        manifest,
        leveled_ssts=manifest.leveled_ssts.replace((), _added_rows(result)),
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


def reservations(manifest: Manifest, now_ms: float) -> list[Lease]:
    """Return the leases that reserve SSTs and have not expired at `now_ms` of the store's clock.

    Only the collector decides when a lease is gone. These are the jobs to wait for.
    """
    return [
        lease
        for lease in manifest.leases
        if lease.reserved_seq is not None
        and (not lease.expire_time_s or now_ms < lease.expire_time_s * _MS_PER_S)
    ]


def reserve(manifest: Manifest, lease: Lease, *, now_ms: int) -> Manifest:
    """Return the manifest with this lease, which reserves all entries of the levels.

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
    """Return the sequence number up to which the lease reserves the entries of the levels.

    Raises `LeaseLost`, and `ManifestConflict` if an older version, which does not know
    reservations, has written the manifest since and has dropped this one.
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
    """Raise `ManifestConflict` if a range job has reserved or merged inputs of a compactor's merge.

    `known` are the leases of the manifest from which the merge was picked: it may have been picked
    in spite of these.
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
    """Return the manifest with a result of a range job, whose outputs were written under the lease.

    The lease stays, but reserves nothing any more, which `is_range_published` relies on. Raises
    `LeaseLost`, and `ManifestConflict` if another process has merged an input, or has added an SST
    where an output goes: then the job has failed.
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
    _check_space_for(manifest, job.target_level, kept, result.outputs)
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
    """Return whether the edit `publish_range` with this result is contained in `manifest` (F2).

    This holds for outputs that were merged since, too: only that edit leaves the lease without a
    reservation.
    """
    ids = {info.id for info in manifest.leveled_ssts}
    if any(info.id in ids for info in result.outputs):
        return True
    is_done = any(each.id == lease_id and each.reserved_seq is None for each in manifest.leases)
    return is_done and not any(info.id in ids for info in result.job.inputs)


def _check_space_for(
    manifest: Manifest, target_level: int, kept: Iterable[SstInfo], outputs: Iterable[SstInfo]
) -> None:
    """Raise unless the outputs overlap no other SST in the target level or below it."""
    others = [info for info in kept if target_level <= info.level < SYSTEM_LEVEL]
    try:
        SortedRun.of(target_level, [*others, *outputs])
    except ValueError as error:
        message = (
            f"another process has put an SST into manifest {manifest.manifest_id} where an output "
            f"would go: {error}. Nothing was published: start again"
        )
        raise ManifestConflict(message) from None
