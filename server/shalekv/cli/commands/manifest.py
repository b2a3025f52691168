"""`shalekv manifest`: print the manifests of a database, read from the object store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any, TypeAlias

import click

from shalekv.cli.console.bucket import read_by_id, read_store, url_option
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.keys import Encoding, encoding_options
from shalekv.cli.console.output import (
    Format,
    Record,
    format_option,
    print_record,
    print_rows,
    printing,
    record_of,
)
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import (
    MANIFEST_FOLDER,
    MAX_ID,
    manifest_name,
    parse_manifest_name,
)
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.origins import unpacked
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest

Row: TypeAlias = tuple[int, int, int]

# Fields that are points in time, and their names in the output.
_MOMENTS = {
    "created_ms": "created_at_ms",
    "first_expiry_ms": "first_expiry_at_ms",
    "gc_cutoff_ms": "gc_cutoff_at_ms",
    "loads_forgotten_ms": "loads_forgotten_at_ms",
}

_HELP = """Print the current manifest of a database, read from the object store without a server.

Each change of the state of a database creates a manifest; the one with the highest id is current.
Old manifests are kept until they are collected.

\b
Examples:
  shalekv manifest --url file:///var/lib/shalekv
  shalekv manifest --url file:///var/lib/shalekv --list
  shalekv manifest --url file:///var/lib/shalekv --id 3 --format json
"""


@click.command(help=_HELP, epilog=exit_codes_text())
@url_option
@click.option(
    "--id",
    "manifest_id",
    type=click.IntRange(0, MAX_ID),
    metavar="ID",
    help="Print this manifest instead of the current one.",
)
@click.option("--list", "lists", is_flag=True, help="List id, bytes and time of all manifests.")
@encoding_options
@format_option
def manifest(
    *,
    url: str,
    manifest_id: int | None,
    lists: bool,
    encoding: Encoding,
    output_format: Format,
) -> None:
    """Print a manifest, or the list of manifests."""
    if lists:
        if manifest_id is not None:
            raise click.UsageError("--list and --id exclude each other")
        rows = read_store(url, _all)
        with printing():
            print_rows(output_format, ("id", "size_bytes", "modified_at_ms"), rows)
        return
    found = read_store(url, _current if manifest_id is None else _numbered(manifest_id))
    with printing():
        print_record(output_format, _with_moments(_record(found, encoding)))


async def _current(store: CasStore) -> Manifest:
    return await StoredManifest(store).refresh()


def _numbered(manifest_id: int) -> Callable[[CasStore], Awaitable[Manifest]]:
    async def read(store: CasStore) -> Manifest:
        name = manifest_name(manifest_id)
        return decode_manifest(name, await read_by_id(store, name))

    return read


async def _all(store: CasStore) -> list[Row]:
    rows = []
    async for info in store.list(MANIFEST_FOLDER):
        manifest_id = parse_manifest_name(info.name)
        if manifest_id is not None:
            rows.append((manifest_id, info.size_bytes, info.modified_ms))
    if not rows:
        await StoredManifest(store).refresh()  # raises if there is no database
    return rows


def _record(found: Manifest, encoding: Encoding) -> Record:
    """Convert all fields of a manifest; SSTs become records."""
    record: dict[str, Any] = {"manifest_id": found.manifest_id}
    for field in fields(Manifest):
        value = getattr(found, field.name)
        if field.name == "pending_loads":
            record[field.name] = [
                {"load_id": load.load_id, "ssts": _ssts(load.ssts, encoding)} for load in value
            ]
        elif field.name == "origins":
            record[field.name] = [
                record_of(origin) | {"sst_ids": [id_.hex() for id_ in unpacked(origin.sst_ids)]}
                for origin in value
            ]
        elif isinstance(value, SstTable):
            record[field.name] = _ssts(value, encoding)
        else:
            record[field.name] = record_of(value)
    return record


def _with_moments(value: Any) -> Any:
    """Rename points in time, so that a table does not print them as durations."""
    if isinstance(value, dict):
        return {_MOMENTS.get(name, name): _with_moments(each) for name, each in value.items()}
    return [_with_moments(each) for each in value] if isinstance(value, list) else value


def _ssts(table: SstTable, encoding: Encoding) -> list[Record]:
    return [_sst(sst, encoding) for sst in table]


def _sst(sst: SstInfo, encoding: Encoding) -> Record:
    keys = {name: encoding.encode(getattr(sst, name)) for name in ("first_key", "last_key")}
    return record_of(sst) | keys  # type: ignore[no-any-return] # a record, for a dataclass
