"""Checks the WAL: every object from c (inclusive) on, and how one follows on another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from shalekv.core.audit.log import LogAudit, Slot, future_epoch, missing_slots
from shalekv.engine.fsck.active import Active, read_active
from shalekv.engine.fsck.progress import Scope, in_chunks
from shalekv.format.footer import Footer
from shalekv.format.names import WAL_FOLDER, parse_wal_name, wal_name
from shalekv.jobs.fsck.objects import Audited, audit_object
from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.manifest import Manifest, PendingLoad


@dataclass(frozen=True, slots=True)
class Recorded:
    """A load that a WAL object commits."""

    wal_id: int
    load: PendingLoad


async def check_log(scope: Scope, active: Active, current: Manifest) -> AsyncIterator[Finding]:
    """The findings in the WAL. `current` is the current manifest of `active`."""
    sizes = await list_sizes(scope, active.first_wal_id)
    scope.progress.objects_total += len(sizes)
    scope.progress.bytes_total += sum(sizes.values())
    async for finding in _gaps(scope, active, current, frozenset(sizes)):
        yield finding

    async def audit(wal_id: int) -> Audited:
        return await audit_object(
            scope.store, wal_name(wal_id), sizes[wal_id], database_id=current.database_id
        )

    log = LogAudit(current)
    recent: list[Slot] = []
    recorded: list[Recorded] = []
    async for audited in in_chunks(sorted(sizes), audit, scope.parallel):
        scope.progress.wal_objects += 1
        scope.progress.size_bytes += audited.size_bytes
        for finding in audited.findings:
            yield finding
        if audited.is_missing:
            scope.missing.append(audited.name)
        if audited.footer is None:
            continue
        slot = _slot(audited.footer)
        scope.progress.fences += slot.is_fence
        for finding in log.see(audited.name, slot):
            yield finding
        if slot.epoch > current.writer_epoch:
            recent.append(slot)
        recorded += [Recorded(slot.wal_id, load) for load in audited.loads]
    scope.recorded.update(each.load.load_id for each in recorded)
    async for finding in _compared_with_newer(scope, recent, recorded):
        yield finding


async def list_sizes(scope: Scope, first: int) -> dict[int, int]:
    """The sizes of the WAL objects from slot `first` on."""
    start_after = wal_name(first - 1) if first else ""
    sizes = {}
    async for info in scope.store.reads.list(WAL_FOLDER, start_after=start_after):
        wal_id = parse_wal_name(info.name)
        if wal_id is not None:
            sizes[wal_id] = info.size_bytes
    return sizes


async def _gaps(
    scope: Scope, active: Active, current: Manifest, filled: frozenset[int]
) -> AsyncIterator[Finding]:
    """Slots that were filled once and are not, if a second look misses them as well."""
    suspects = _missing(current, active.first_wal_id, filled)
    if not suspects:
        return
    again = await read_active(scope.store)  # a list may be torn, and a collector may be at work
    if again.current is None:
        return
    listed = frozenset(await list_sizes(scope, again.first_wal_id))
    for gap in _missing(again.current, again.first_wal_id, listed):
        if not any(max(gap.start, s.start) < min(gap.stop, s.stop) for s in suspects):
            continue
        problem = "is missing although it was written"
        if len(gap) > 1:
            problem += f", and so are all slots up to {gap[-1]}"
        yield Finding(wal_name(gap.start), FindingKind.MISSING, problem)


def _missing(manifest: Manifest, first: int, filled: frozenset[int]) -> list[range]:
    known = (manifest.wal_id_last_compacted, manifest.wal_id_last_seen)
    last_filled = max((wal_id for wal_id in known if wal_id is not None), default=None)
    return missing_slots(
        filled,
        first=first,
        width=manifest.fence_width,
        last_filled=last_filled,
        left_out=manifest.wal_ids_left_out,
    )


def _slot(footer: Footer) -> Slot:
    properties, contents = footer.properties, footer.contents
    return Slot(
        wal_id=parse_wal_name(properties.name) or 0,
        epoch=properties.writer_epoch,
        nonce=properties.writer_nonce,
        min_seq=contents.min_seq,
        max_seq=contents.max_seq,
        is_fence=contents.entry_count == 0,
    )


async def _compared_with_newer(
    scope: Scope, recent: list[Slot], recorded: list[Recorded]
) -> AsyncIterator[Finding]:
    """What only a manifest can tell that is younger than the slots."""
    if not recent and not recorded:
        return
    newer = (await read_active(scope.store)).current
    if newer is None:
        return
    for slot in recent:
        for finding in future_epoch(wal_name(slot.wal_id), slot, newer):
            yield finding
    pending = {load.load_id: {*_ids(load)} for load in newer.pending_loads}
    for each in recorded:
        is_protected = _ids(each.load) <= pending.get(each.load.load_id, set())
        if each.wal_id >= newer.first_uncompacted_wal_id and not is_protected:
            problem = f"commits load {each.load.load_id!r}, whose files no manifest protects"
            yield Finding(wal_name(each.wal_id), FindingKind.LOAD, problem)


def _ids(load: PendingLoad) -> set[bytes]:
    return {info.id for info in load.ssts}
