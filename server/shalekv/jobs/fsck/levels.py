"""Checks the SSTs that manifests name, and finds those that nothing names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import fields, replace

from shalekv.core.tree import SYSTEM_LEVEL
from shalekv.engine.fsck.active import Active, NamedSst, same_sst
from shalekv.engine.fsck.progress import Scope, in_chunks
from shalekv.format.footer import Footer
from shalekv.format.names import LEVELS_FOLDER, is_uuid7, level_name, parse_level_name
from shalekv.jobs.fsck.objects import Audited, audit_object
from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.sst_table import SstInfo


async def list_levels(scope: Scope) -> dict[str, int]:
    """The sizes of all objects in ``levels/``, ours or not."""
    return {info.name: info.size_bytes async for info in scope.store.reads.list(LEVELS_FOLDER)}


async def check_ssts(
    scope: Scope, active: Active, listed: dict[str, int]
) -> AsyncIterator[Finding]:
    """The findings in the SSTs of all active manifests, each looked at once."""
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
    sizes = {sst.info.id: sst.info.size_bytes for sst in present}  # if it is not in this list
    sizes |= {id_: listed[name] for id_ in sizes if (name := level_name(id_)) in listed}
    scope.progress.bytes_total += sum(sizes.values())

    async def audit(sst: NamedSst) -> tuple[NamedSst, Audited]:
        info = sst.info
        place = scope.origins.locate(info.id)
        audited = await audit_object(
            place.store,
            level_name(info.id),
            sizes[info.id],
            database_id=place.database_id,
            checksum=info.checksum,
            listed_seq=info.max_seq,
        )
        return sst, audited

    async for sst, audited in in_chunks(present, audit, scope.parallel):
        scope.progress.ssts += 1
        scope.progress.size_bytes += audited.size_bytes
        if audited.is_missing:
            scope.missing.append(audited.name)
        for finding in (*audited.findings, *_compared(sst, audited)):
            yield replace(finding, name=scope.told(finding.name))


def orphans(active: Active, listed: dict[str, int]) -> Iterator[Finding]:
    """What nothing names and no lease protects; `active` was read after the list."""
    named = {sst.info.id for sst in active.ssts()}
    for name, size_bytes in listed.items():
        sst_id = parse_level_name(name)
        if sst_id is not None and (sst_id in named or active.protects(sst_id)):
            continue
        problem = f"{size_bytes} bytes that nothing names, and no lease protects"
        yield Finding(name, FindingKind.ORPHAN, problem)


def _compared(sst: NamedSst, audited: Audited) -> Iterator[Finding]:
    """What contradicts the manifest, or the rules of the level."""
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
        problem = f"key {audited.repeated_key.hex()} (hexadecimal) stands there more than once"
        yield Finding(name, FindingKind.REPEATED_KEY, problem)


# The checksum is compared when the footer is read, and that says nothing of expiries.
_NOT_COMPARED = frozenset(("checksum", "first_expiry_ms"))


def _differences(info: SstInfo, footer: Footer, *, level: int) -> list[str]:
    """Fields of the manifest's row that the footer contradicts."""
    found = footer.info(level)
    if footer.contents.is_unnumbered and info.min_seq == info.max_seq:
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
