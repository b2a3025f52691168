"""What a compactor does to the manifest: claim its epoch, publish results (protocol, "Compacting").

Every edit of a compactor first checks that it still is the compactor, so that the older one of
two stops and no result is published twice (I9), and that its lease is still there, so that what
it publishes was not collected meanwhile (F3).
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


# --- reserving
# A job over a range of keys beside a compactor: what the manifest says of it, and who yields.
#
# The job does not claim the epoch of the compactor, since whoever has that merges the WAL, and
# writes would wait for its return. It is sound without: its edit demands that its lease and all
# its inputs are still there, and that nothing has come into the level of its outputs where they
# are to stand. What is added meanwhile is newer and stands above.
#
# It also gets done, because its lease *reserves* its inputs: all that the levels held when the
# lease was made. Compactors leave that alone while the lease lives (see `standing_back`). A merge
# that began before is published only if it touches nothing of it.


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
