"""`shalekv sst`: print the parts of one SST, read from the object store or from a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click

from shalekv.cli.console.bucket import optional_url_option, read_store
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.keys import Encoding, encoding_options, json_field
from shalekv.cli.console.output import (
    Format,
    Record,
    format_option,
    print_json,
    print_record,
    print_rows,
    printing,
    record_of,
)
from shalekv.errors import DatabaseNotFound, ObjectNotFound
from shalekv.format.columns import SECTIONS, Section
from shalekv.format.filter import LINE_BYTES, Filter
from shalekv.format.footer import Footer, name_in_footer, needed_tail, read_footer
from shalekv.format.index import BlockIndex
from shalekv.format.names import (
    MAX_ID,
    is_uuid7,
    level_name,
    parse_level_name,
    parse_wal_name,
    wal_name,
)
from shalekv.format.sst import open_filter, read_block, read_index
from shalekv.format.statistics import statistics
from shalekv.protocol.entry import Entry
from shalekv.read.origins import Origins
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest

TAIL_BYTES = 64 << 10  # holds the footer, and of small SSTs everything
DEFAULT_LIMIT = 1_000
BLOCK_COLUMNS = ("block", "section", "offset", "length", "rows", "checksum", "first_key")
ENTRY_COLUMNS = ("section", "key", "seq", "kind", "value", "expire_at_ms")

ReadRange: TypeAlias = Callable[[int, int], Awaitable[bytes]]  # offset, length
Row: TypeAlias = tuple[Section, Entry]

_HELP = """Inspect SSTs, read from the object store without a server."""

_INSPECT_HELP = """Print the parts of an SST: footer, contents, filter, sizes.

NAME is the name of an object in wal/ or levels/, the UUID of one in levels/, or the number of one
in wal/. All printed parts are verified; `shalekv fsck` verifies a whole database.

\b
Examples:
  shalekv sst inspect --url file:///var/lib/shalekv 17
  shalekv sst inspect --url file:///var/lib/shalekv 0198c0de-0000-7000-8000-000000000001 --blocks
  shalekv sst inspect --file copy.sst --entries --limit 20
"""


@dataclass(frozen=True, slots=True)
class OpenedSst:
    """The verified footer, index and filter of an SST, and a function that reads the rest."""

    footer: Footer
    index: BlockIndex
    filter: Filter | None
    read: ReadRange

    async def entries(self, limit: int) -> list[Row]:
        """Read the first `limit` entries, in the order of the file."""
        found: list[Row] = []
        for number, handle in enumerate(self.index):
            if len(found) >= limit:
                break
            data = await self.read(handle.offset, handle.length)
            columns = read_block(self.index, number, data).columns()
            found += [(handle.section, entry) for entry in columns.entries()]
        return found[:limit]


@dataclass(frozen=True, slots=True)
class SstParts:
    """The SST to read, and how many of its entries."""

    name: str | None  # None: the name in its footer
    entries: int  # maximum number


@click.group(help=_HELP)
def sst() -> None:
    """Hold the commands about single SSTs."""


@sst.command(help=_INSPECT_HELP, epilog=exit_codes_text())
@click.argument("name", required=False)
@optional_url_option
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Read this file instead, with any name.",
)
@click.option("--blocks", is_flag=True, help="Print a line for each block instead.")
@click.option("--entries", is_flag=True, help="Print the entries instead.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=DEFAULT_LIMIT,
    show_default=True,
    metavar="N",
    help="Maximum number of entries.",
)
@encoding_options
@format_option
def inspect(
    *,
    name: str | None,
    url: str | None,
    path: Path | None,
    blocks: bool,
    entries: bool,
    limit: int,
    encoding: Encoding,
    output_format: Format,
) -> None:
    """Print one SST."""
    if blocks and entries:
        raise click.UsageError("--blocks and --entries exclude each other")
    wanted = SstParts(_object_name(name) if name else None, limit if entries else 0)
    if path is not None:
        opened, found = asyncio.run(_from_file(path, wanted))
    elif url is None or wanted.name is None:
        raise click.UsageError("expected NAME and --url, or --file")
    else:
        opened, found = read_store(url, partial(_from_store, wanted=wanted))
    with printing():
        if blocks:
            print_rows(output_format, BLOCK_COLUMNS, _block_rows(opened.index, encoding))
        elif not entries:
            print_record(output_format, _record(opened, encoding))
        elif output_format is Format.JSON:
            for section, entry in found:
                print_json(_entry_object(section, entry, encoding))
        else:
            print_rows(output_format, ENTRY_COLUMNS, (_entry_row(*row, encoding) for row in found))


def _object_name(text: str) -> str:
    """The name of the object for NAME; a usage error if it is none."""
    if parse_wal_name(text) is not None or parse_level_name(text) is not None:
        return text
    if text.isdecimal() and text.isascii() and int(text) <= MAX_ID:
        return wal_name(int(text))
    with contextlib.suppress(ValueError):
        sst_id = bytes.fromhex(text.replace("-", ""))
        if is_uuid7(sst_id):
            return level_name(sst_id)
    problem = f"{text!r} is no object in wal/ or levels/, no UUID of version 7, and no number"
    raise click.BadParameter(problem, param_hint="NAME")


async def _from_store(store: CasStore, wanted: SstParts) -> tuple[OpenedSst, list[Row]]:
    name = wanted.name or ""
    origins = Origins(store, b"")
    try:
        place, size_bytes = await _found(store, origins, name)
        opened = await _open(name, size_bytes, partial(place.get_range, name))
        return opened, await opened.entries(wanted.entries)
    finally:
        await origins.close()


async def _found(store: CasStore, origins: Origins, name: str) -> tuple[CasStore, int]:
    """Find the store that has the object, and its size: a clone reads SSTs of other databases."""
    try:
        return store, (await store.head(name)).size_bytes
    except ObjectNotFound as error:
        missing = error
    sst_id = parse_level_name(name)
    try:
        if sst_id is not None:
            origins.learn((await StoredManifest(store).refresh()).origins)
            if origins.is_foreign(sst_id):
                place = origins.locate(sst_id).store
                return place, (await place.head(name)).size_bytes
    except (ObjectNotFound, DatabaseNotFound) as error:
        missing = error if isinstance(error, ObjectNotFound) else missing
    raise click.BadParameter(f"{missing.store} has no {name}", param_hint="NAME")


async def _from_file(path: Path, wanted: SstParts) -> tuple[OpenedSst, list[Row]]:
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)

        async def read(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        opened = await _open(wanted.name, size_bytes, read, place=str(path))
        return opened, await opened.entries(wanted.entries)


async def _open(
    name: str | None, size_bytes: int, read: ReadRange, *, place: str = ""
) -> OpenedSst:
    """Open the SST `name` (None: the name in its footer), which is at `place`."""
    place = name or place
    tail_bytes = min(TAIL_BYTES, size_bytes)
    tail = await read(size_bytes - tail_bytes, tail_bytes)
    needed = needed_tail(place, tail, size_bytes)
    if tail_bytes < needed <= size_bytes:
        tail = await read(size_bytes - needed, needed)
    name = name or name_in_footer(place, tail, size_bytes)
    footer = read_footer(name, tail, size_bytes, database_id=None)
    layout = footer.layout
    key_filter = open_filter(footer, await read(layout.filter_offset, layout.filter_len))
    index = read_index(footer, await read(layout.index_offset, layout.index_len))
    return OpenedSst(footer, index, key_filter, read)


def _record(opened: OpenedSst, encoding: Encoding) -> Record:
    footer, contents = opened.footer, opened.footer.contents
    sizes = statistics(footer, opened.index)
    keys = {name: encoding.encode(getattr(contents, name)) for name in ("first_key", "last_key")}
    key_filter = opened.filter
    return {
        "properties": record_of(footer.properties),
        "checksum": f"{footer.checksum:08x}",
        "is_fence": contents.entry_count == 0,
        "contents": record_of(contents) | keys | {"entry_count": contents.entry_count},
        "layout": record_of(footer.layout),
        "filter": None
        if key_filter is None
        else {
            "keys": key_filter.keys,
            "probes": key_filter.probes,
            "lines": key_filter.lines,
            "bits_per_key": round(8 * LINE_BYTES * key_filter.lines / max(key_filter.keys, 1), 1),
        },
        "statistics": record_of(sizes) | {"stored_ratio": round(sizes.stored_ratio, 3)},
        "sections": {
            section.name.lower(): {
                "blocks": len(opened.index.blocks_of(section)),
                "rows": opened.index.rows_of(section),
            }
            for section in SECTIONS
            if len(opened.index.blocks_of(section))
        },
    }


def _block_rows(index: BlockIndex, encoding: Encoding) -> Iterator[Sequence[Any]]:
    for number, handle in enumerate(index):
        yield (
            number,
            handle.section.name.lower(),
            handle.offset,
            handle.length,
            handle.rows,
            f"{handle.checksum:08x}",
            encoding.encode(handle.first_key),
        )


def _entry_row(section: Section, entry: Entry, encoding: Encoding) -> Sequence[Any]:
    return (
        section.name.lower(),
        encoding.encode(entry.key),
        entry.seq,
        entry.kind.name.lower(),
        encoding.encode(entry.value),
        entry.expire_at_ms or None,
    )


def _entry_object(section: Section, entry: Entry, encoding: Encoding) -> Record:
    return {
        "section": section.name.lower(),
        **json_field("key", entry.key, encoding),
        "seq": entry.seq,
        "kind": entry.kind.name.lower(),
        **json_field("value", entry.value, encoding),
        "expire_at_ms": entry.expire_at_ms or None,
    }
