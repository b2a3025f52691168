"""Checks of the SSTs that manifests reference, of orphans, and of the WAL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, fields, replace

from shalekv.format.footer import Footer
from shalekv.format.names import (
    LEVELS_FOLDER,
    WAL_FOLDER,
    is_uuid7,
    level_name,
    parse_level_name,
    parse_wal_name,
    wal_name,
)
from shalekv.jobs.fsck.objects import (
    ActiveManifestSet,
    NamedSst,
    ObjectAudit,
    Scope,
    audit_object,
    in_chunks,
    read_active,
    same_sst,
)
from shalekv.protocol.audit import (
    AuditedSlot,
    Finding,
    FindingKind,
    LogAudit,
    future_epoch,
    missing_slots,
)
from shalekv.protocol.manifest import SYSTEM_LEVEL, Manifest, PendingLoad
from shalekv.protocol.sst_table import SstInfo

# The checksum is compared when the footer is read; a footer does not contain expiries.
_NOT_COMPARED = frozenset(("checksum", "first_expiry_ms"))


async def list_levels(scope: Scope) -> dict[str, int]:
    """List all objects in ``levels/``, SSTs or not, with their sizes in bytes."""
    return {info.name: info.size_bytes async for info in scope.store.list(LEVELS_FOLDER)}


async def check_ssts(
    scope: Scope, active: ActiveManifestSet, listed: dict[str, int]
) -> AsyncIterator[Finding]:
    """Check the SSTs of all active manifests, each once."""
    named: dict[bytes, NamedSst] = {}
    for sst in active.ssts():
        first = named.setdefault(sst.info.id, sst)
        if not same_sst(first.info, sst.info):
            problem = f"SST {sst.info.id.hex()} is another one than {first.by} says"
            yield Finding(sst.by, FindingKind.SST_ROW, problem)
    present: list[NamedSst] = []
    for sst_id in sorted(named):
        sst = named[sst_id]
        if not is_uuid7(sst_id):
            problem = f"the id {sst_id.hex()} is not a UUID of version 7: no object has it"
            yield Finding(sst.by, FindingKind.SST_ROW, problem)
        elif level_name(sst_id) in listed or scope.origins.is_foreign(sst_id):
            present.append(sst)
        else:
            scope.missing.append(level_name(sst_id))
    scope.progress.objects_total += len(present)
    sizes = {
        sst.info.id: sst.info.size_bytes for sst in present
    }  # the default for those not in the list
    sizes |= {id_: listed[name] for id_ in sizes if (name := level_name(id_)) in listed}
    scope.progress.bytes_total += sum(sizes.values())

    async def audit(sst: NamedSst) -> tuple[NamedSst, ObjectAudit]:
        info = sst.info
        place = scope.origins.locate(info.id)
        audited = await audit_object(
            place.store,
            level_name(info.id),
            sizes[info.id],
            database_id=place.database_id,
            checksum=info.checksum,
            assigned_seq=info.max_seq,
        )
        return sst, audited

    async for sst, audited in in_chunks(present, audit, scope.parallel):
        scope.progress.ssts += 1
        scope.progress.size_bytes += audited.size_bytes
        if audited.is_missing:
            scope.missing.append(audited.name)
        for finding in (*audited.findings, *_compared(sst, audited)):
            yield replace(finding, name=scope.reported_name(finding.name))


def orphans(active: ActiveManifestSet, listed: dict[str, int]) -> Iterator[Finding]:
    """Find objects that no manifest references and no lease protects.

    REQUIRES: `active` was read after `listed`.
    """
    named = {sst.info.id for sst in active.ssts()}
    for name, size_bytes in listed.items():
        sst_id = parse_level_name(name)
        if sst_id is not None and (sst_id in named or active.protects(sst_id)):
            continue
        problem = f"{size_bytes} bytes that nothing needs: a collection deletes them"
        yield Finding(name, FindingKind.ORPHAN, problem)


def _compared(sst: NamedSst, audited: ObjectAudit) -> Iterator[Finding]:
    """Find what contradicts the manifest, or the rules of the level."""
    name, info = audited.name, sst.info
    if audited.footer is None:
        if audited.size_bytes != info.size_bytes and not audited.is_missing:
            problem = f"has {audited.size_bytes} bytes, {sst.by} says {info.size_bytes}"
            yield Finding(name, FindingKind.SST_MISMATCH, problem)
        return
    differing = _differences(info, audited.footer, level=info.level)
    if differing:
        problem = f"is not as {sst.by} says: {', '.join(differing)}"
        yield Finding(name, FindingKind.SST_MISMATCH, problem)
    contents = audited.footer.contents
    if info.level == SYSTEM_LEVEL and contents.bounded_count:
        problem = f"level {SYSTEM_LEVEL} is for records; it holds entries of clients"
        yield Finding(name, FindingKind.LEVEL_SECTION, problem)
    if info.level != SYSTEM_LEVEL and contents.other_count:
        problem = f"level {info.level} is for entries of clients; it holds records"
        yield Finding(name, FindingKind.LEVEL_SECTION, problem)
    if audited.repeated_key is not None:
        problem = f"key {audited.repeated_key.hex()} (hexadecimal) occurs more than once"
        yield Finding(name, FindingKind.REPEATED_KEY, problem)


def _differences(info: SstInfo, footer: Footer, *, level: int) -> list[str]:
    """Describe the fields of the manifest's row that the footer contradicts."""
    found = footer.info(level)
    if footer.contents.lacks_seqs and info.min_seq == info.max_seq:
        found = replace(found, min_seq=info.min_seq, max_seq=info.max_seq)
    return [
        f"{field.name} is {_shown(getattr(found, field.name))}, not "
        f"{_shown(getattr(info, field.name))}"
        for field in fields(SstInfo)
        if field.name not in _NOT_COMPARED
        and getattr(found, field.name) != getattr(info, field.name)
    ]


def _shown(value: object) -> str:
    return value.hex() or "empty" if isinstance(value, bytes) else str(value)


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """A load that a WAL object commits."""

    wal_id: int
    load: PendingLoad


async def check_log(
    scope: Scope, active: ActiveManifestSet, current: Manifest
) -> AsyncIterator[Finding]:
    """Check the WAL from `ActiveManifestSet.first_wal_id` on: each object, and their sequence.

    REQUIRES: `current` is the current manifest of `active`.
    """
    sizes = await list_sizes(scope, active.first_wal_id)
    scope.progress.objects_total += len(sizes)
    scope.progress.bytes_total += sum(sizes.values())
    async for finding in _gaps(scope, active, current, frozenset(sizes)):
        yield finding

    async def audit(wal_id: int) -> ObjectAudit:
        return await audit_object(
            scope.store, wal_name(wal_id), sizes[wal_id], database_id=current.database_id
        )

    log = LogAudit(current)
    recent: list[AuditedSlot] = []
    recorded: list[RecordedLoad] = []
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
        if any(future_epoch(audited.name, slot, current)):
            recent.append(slot)
        recorded += [RecordedLoad(slot.wal_id, load) for load in audited.loads]
    scope.recorded.update(each.load.load_id for each in recorded)
    async for finding in _compared_with_newer(scope, recent, recorded):
        yield finding


async def list_sizes(scope: Scope, first: int) -> dict[int, int]:
    """List the WAL objects from slot `first` on, with their sizes in bytes."""
    start_after = wal_name(first - 1) if first else ""
    sizes = {}
    async for info in scope.store.list(WAL_FOLDER, start_after=start_after):
        wal_id = parse_wal_name(info.name)
        if wal_id is not None:
            sizes[wal_id] = info.size_bytes
    return sizes


async def _gaps(
    scope: Scope, active: ActiveManifestSet, current: Manifest, filled: frozenset[int]
) -> AsyncIterator[Finding]:
    """Find slots that were filled and are empty, if a second list misses them as well."""
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
        width=manifest.upload_window,
        last_filled=last_filled,
        left_out=manifest.wal_ids_left_out,
    )


def _slot(footer: Footer) -> AuditedSlot:
    properties, contents = footer.properties, footer.contents
    return AuditedSlot(
        wal_id=parse_wal_name(properties.name) or 0,
        epoch=properties.writer_epoch,
        nonce=properties.writer_nonce,
        min_seq=contents.min_seq,
        max_seq=contents.max_seq,
        is_fence=contents.entry_count == 0,
    )


async def _compared_with_newer(
    scope: Scope, recent: list[AuditedSlot], recorded: list[RecordedLoad]
) -> AsyncIterator[Finding]:
    """Check slots of later epochs, and loads, by a manifest that is read after the slots.

    `recent` are slots whose epoch is higher than the manifest read before the slots has.
    """
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
