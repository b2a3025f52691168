"""What the parent's levels lack of the snapshot that is cloned becomes SSTs of the clone.

The parent's WAL is not copied: that would take a request for each object. Its effect is merged as a
compactor of the clone would do it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shalekv.engine.compaction.part import output_bytes
from shalekv.jobs.compact.outputs import Authorship, LevelWriter
from shalekv.jobs.compact.pace import Pace
from shalekv.jobs.compact.wal_job import merge_wal
from shalekv.protocol.compaction.jobs import WalJob
from shalekv.protocol.compaction.publish import (
    CompactorId,
    claim_compactor_epoch,
    publish,
    written,
)
from shalekv.protocol.lease import RANDOM_BYTES, new_lease_id, with_lease
from shalekv.protocol.manifest import Lease, Manifest
from shalekv.protocol.snapshot import NEVER
from shalekv.settings import MIB, LevelSettings
from shalekv.store.cas import CasStore

_NONCE_BYTES = 16
_MEMORY_BYTES = 64 * MIB  # of entries that are merged at once


@dataclass(frozen=True, slots=True)
class Merged:
    """What became of the log."""

    manifest: Manifest  # the parent's, as if all of its WAL were compacted
    own_ids: frozenset[bytes]  # SSTs of the clone
    own_bytes: int
    wal_objects: int


async def merge_tail(
    parent: CasStore,
    target: CasStore,
    manifest: Manifest,
    *,
    clone_id: bytes,
    levels: LevelSettings,
    keep_alive: Callable[[], Awaitable[None]],
    memory_bytes: int = _MEMORY_BYTES,
) -> Merged:
    """Merge the WAL after c, as far as the snapshot with this manifest of the parent has seen it.

    `keep_alive` is awaited again and again. Raises what reading the WAL and creating SSTs does.
    """
    random = target.runtime.random
    now_ms = await target.reads.now_ms()
    own = CompactorId(manifest.compactor_epoch + 1, random.randbytes(_NONCE_BYTES))
    lease = Lease(new_lease_id(now_ms, random.randbytes(RANDOM_BYTES)), NEVER, "clone")
    merged = with_lease(claim_compactor_epoch(manifest, own.nonce), lease)
    first, last = manifest.first_uncompacted_wal_id, manifest.wal_id_last_seen
    slots = range(first, first if last is None else last + 1)
    ids: set[bytes] = set()
    own_bytes = 0
    while slots:
        await keep_alive()
        author = Authorship(clone_id, own, lease.id, merged.logical_time_ms)
        outcome = await merge_wal(
            parent,
            WalJob(slots, "clone"),
            LevelWriter(target, author, levels, Pace(target.runtime.clock, 0)),
            manifest=merged,
            memory_bytes=memory_bytes,
            output_bytes=output_bytes(levels, memory_bytes),
        )
        merged = publish(merged, own, outcome.result, lease.id)
        ids.update(info.id for info in written(outcome.result))
        own_bytes += outcome.written_bytes
        slots = range(merged.first_uncompacted_wal_id, slots.stop)
    return Merged(merged, frozenset(ids), own_bytes, merged.first_uncompacted_wal_id - first)
