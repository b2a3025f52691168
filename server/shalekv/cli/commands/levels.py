"""`shalekv levels`: print the contents of the levels, and what uses space in the object store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import click

from shalekv.cli.console.bucket import read_store, url_option
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.keys import Encoding, encoding_options
from shalekv.cli.console.output import (
    Format,
    Record,
    format_option,
    print_line,
    print_record,
    print_rows,
    printing,
)
from shalekv.cli.console.units import size
from shalekv.errors import CorruptObject
from shalekv.format.names import level_name
from shalekv.jobs.fsck.objects import ActiveManifestSet, Scope, read_active
from shalekv.jobs.fsck.wal_and_ssts import list_levels, list_sizes, orphans
from shalekv.protocol.manifest import (
    L0,
    SYSTEM_LEVEL,
    LevelSize,
    Manifest,
    level_sizes,
    most_over_one_key,
    read_amplification,
    space_amplification,
    total_bytes,
)
from shalekv.protocol.origins import unpacked
from shalekv.protocol.retention import LiveObjects, PinnedBytes, pinned_by_snapshots
from shalekv.protocol.sst_table import SstInfo
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.wording import counted

LEVEL_COLUMNS = (
    "level",
    "ssts",
    "size_bytes",
    "entries",
    "tombstones",
    "first_key",
    "last_key",
    "min_seq",
    "max_seq",
)
SST_COLUMNS = ("level", "name", *LEVEL_COLUMNS[2:])
SNAPSHOT_COLUMNS = ("snapshot", "manifest_id", "expires_at_ms", "pinned_bytes", "alone_bytes")

_HELP = """Print the contents of each level of a database, read from the store without a server.

Level 0 holds SSTs that may overlap, the levels below one sorted run each, level 63 records of the
system. Below the table are the size of the WAL that is not compacted, the amplification of space
and reads, the bytes that each snapshot pins (and pins alone), and the objects that nothing refers
to.

\b
Examples:
  shalekv levels --url file:///var/lib/shalekv
  shalekv levels --url file:///var/lib/shalekv --ssts
  shalekv levels --url file:///var/lib/shalekv --format json | jq .space_amplification
"""


@dataclass(frozen=True, slots=True)
class LevelsFound:
    """The state read from the store."""

    manifest: Manifest
    ssts: Sequence[SstInfo]
    wal_bytes: dict[int, int]  # sizes of WAL objects that are not compacted, by id
    pinned: Sequence[PinnedBytes]
    unnamed: dict[str, int]  # sizes of orphans, by name


@click.command(help=_HELP, epilog=exit_codes_text())
@url_option
@click.option("--ssts", is_flag=True, help="Print a line for each SST instead.")
@encoding_options
@format_option
def levels(*, url: str, ssts: bool, encoding: Encoding, output_format: Format) -> None:
    """Print the levels, or their SSTs."""
    found = read_store(url, _read)
    with printing():
        if ssts:
            ordered = sorted(found.ssts, key=_place)
            print_rows(output_format, SST_COLUMNS, (_sst_row(info, encoding) for info in ordered))
        elif output_format is Format.TABLE:
            _print_sections(found, encoding)
        else:
            print_record(output_format, _record(found, encoding))


async def _read(store: CasStore) -> LevelsFound:
    scope = Scope(store, parallel=1)
    listed = await list_levels(scope)
    active = await read_active(store)
    current = active.current
    if current is None or active.findings:
        await StoredManifest(store).refresh()  # raises if the current manifest is damaged
    if current is None:
        finding = active.findings[0]
        raise CorruptObject(finding.name, finding.offset or 0, finding.problem)
    sizes = await list_sizes(scope, active.first_wal_id)
    known = {id_: LiveObjects.of(manifest) for id_, manifest in active.manifests.items()}
    pinned = pinned_by_snapshots(current, known, now_s=active.now_s, wal_bytes=sizes)
    first = current.first_uncompacted_wal_id
    return LevelsFound(
        manifest=current,
        ssts=[*current.leveled_ssts],
        wal_bytes={wal_id: size for wal_id, size in sizes.items() if wal_id >= first},
        pinned=pinned,
        unnamed=_unnamed(active, listed),
    )


def _unnamed(active: ActiveManifestSet, listed: dict[str, int]) -> dict[str, int]:
    """The sizes of orphans by name; empty if some manifest could not be read."""
    if not active.is_complete:
        return {}
    return {finding.name: listed[finding.name] for finding in orphans(active, listed)}


def _place(info: SstInfo) -> tuple[int, int, bytes]:
    """Sort key of an SST: L0 and system records from the newest on, sorted runs by key."""
    is_run = info.level not in (L0, SYSTEM_LEVEL)
    return (info.level, 0 if is_run else -info.max_seq, info.first_key)


def _sst_row(info: SstInfo, encoding: Encoding) -> tuple[int | str | None, ...]:
    return (
        info.level,
        level_name(info.id),
        info.size_bytes,
        info.entry_count,
        info.tombstone_count,
        *_bounds([info], encoding),
        info.min_seq,
        info.max_seq,
    )


def _bounds(ssts: Iterable[SstInfo], encoding: Encoding) -> tuple[str | None, str | None]:
    """The first and the last key; None if there is none, or no bound."""
    keyed = [info for info in ssts if info.level != SYSTEM_LEVEL]
    if not keyed:
        return None, None
    first = encoding.encode(min(info.first_key for info in keyed))
    is_open = not all(info.last_key for info in keyed)
    return first, None if is_open else encoding.encode(max(info.last_key for info in keyed))


def _level_row(
    size: LevelSize, found: LevelsFound, encoding: Encoding
) -> tuple[int | str | None, ...]:
    ssts = [info for info in found.ssts if info.level == size.level]
    return (
        size.level,
        size.ssts,
        size.size_bytes,
        size.entries,
        size.tombstones,
        *_bounds(ssts, encoding),
        min(info.min_seq for info in ssts),
        max(info.max_seq for info in ssts),
    )


def _snapshot_row(pinned: PinnedBytes) -> tuple[str | int | None, ...]:
    snapshot = pinned.snapshot
    return (
        snapshot.name or snapshot.id.hex(),
        snapshot.manifest_id,
        1_000 * snapshot.snapshot_expire_time_s or None,
        pinned.size_bytes,
        pinned.alone_bytes,
    )


def _origins(found: LevelsFound) -> Iterable[Record]:
    """The part of the levels that is in other databases."""
    sizes = {info.id: info.size_bytes for info in found.ssts}
    for origin in found.manifest.origins:
        own = [sizes[sst_id] for sst_id in unpacked(origin.sst_ids) if sst_id in sizes]
        yield {
            "url": origin.url or None,
            "database_id": origin.database_id.hex(),
            "snapshot": origin.snapshot_id.hex() or None,
            "ssts": len(own),
            "size_bytes": sum(own),
        }


def _record(found: LevelsFound, encoding: Encoding) -> Record:
    sizes = level_sizes(found.manifest.leveled_ssts)
    rows = [_level_row(size, found, encoding) for size in sizes]
    return {
        "manifest_id": found.manifest.manifest_id,
        "levels": [dict(zip(LEVEL_COLUMNS, row, strict=True)) for row in rows],
        "total": {
            "ssts": sum(size.ssts for size in sizes),
            "size_bytes": total_bytes(sizes),
            "entries": sum(size.entries for size in sizes),
            "tombstones": sum(size.tombstones for size in sizes),
        },
        "not_compacted": {
            "wal_objects": len(found.wal_bytes),
            "size_bytes": sum(found.wal_bytes.values()),
        },
        "l0_overlap": most_over_one_key([info for info in found.ssts if info.level == L0]),
        "read_amplification": read_amplification(sizes),
        "space_amplification": round(space_amplification(sizes), 3),
        "origins": [*_origins(found)],
        "snapshots": [
            dict(zip(SNAPSHOT_COLUMNS, _snapshot_row(each), strict=True)) for each in found.pinned
        ],
        "unnamed": [
            {"object": name, "size_bytes": size} for name, size in sorted(found.unnamed.items())
        ],
    }


def _print_sections(found: LevelsFound, encoding: Encoding) -> None:
    record = _record(found, encoding)
    total, waiting = record["total"], record["not_compacted"]
    rows = [tuple(level.values()) for level in record["levels"]]
    if rows:
        rows.append(("all", *total.values(), None, None, None, None))
    print_rows(Format.TABLE, LEVEL_COLUMNS, rows)
    print_line(
        f"\nNot yet merged into the levels: {counted(waiting['wal_objects'], 'WAL object')}, "
        f"{size(waiting['size_bytes'])}."
    )
    if rows:
        print_line(
            f"Reading a key opens at most {counted(record['read_amplification'], 'SST')} "
            f"({record['l0_overlap']} in level 0)."
        )
        print_line(f"Space amplification: {record['space_amplification']}")
    for origin in record["origins"]:
        where = origin["url"] or f"as SSTs of database {origin['database_id']}"
        ssts, size_text = counted(origin["ssts"], "SST"), size(origin["size_bytes"])
        print_line(f"Shared with another database: {ssts} of {size_text}, {where}.")
    if record["snapshots"]:
        print_line("\nSnapshots, and the bytes that are kept only for them:")
        print_rows(Format.TABLE, SNAPSHOT_COLUMNS, map(_snapshot_row, found.pinned))
    if found.unnamed:
        print_line("\nObjects that nothing needs; the next collections delete them:")
        print_rows(Format.TABLE, ("object", "size_bytes"), sorted(found.unnamed.items()))
