"""`shalekv wal`: list the WAL objects of a database, or the entries of one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import chain

import click

from shalekv.cli.console.bucket import read_by_id, read_store, url_option
from shalekv.cli.console.exit_codes import exit_code_of, exit_codes_text
from shalekv.cli.console.keys import Encoding, encoding_options, json_field
from shalekv.cli.console.output import (
    Format,
    Record,
    format_option,
    print_json,
    print_rows,
    printing,
)
from shalekv.errors import CorruptObject, IllegalState, ShaleError, StoreError
from shalekv.format.footer import Footer, needed_tail, read_footer
from shalekv.format.names import MAX_ID, WAL_FOLDER, parse_wal_name, wal_name
from shalekv.format.sst import open_sst
from shalekv.protocol.entry import Entry
from shalekv.store.api import ObjectInfo
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.wal import list_wal

TAIL_BYTES = 4096  # holds the footer unless its keys are long
READS_MAX = 16

LIST_COLUMNS = (
    "id",
    "size_bytes",
    "epoch",
    "min_seq",
    "max_seq",
    "entries",
    "is_fence",
    "problem",
)
ENTRY_COLUMNS = ("key", "seq", "kind", "value", "expire_at_ms")

_HELP = """List the WAL objects of a database, read from the object store without a server.

Each object is one group commit: a line has its size, the epoch of its writer, the range of its
sequence numbers and the number of entries. A fence is an empty object with which a new writer shut
out older ones. Objects that are damaged or cannot be read, and the first object that is missing
although it was written, have the problem in the last column, and change the exit code.

\b
Examples:
  shalekv wal --url file:///var/lib/shalekv
  shalekv wal --url file:///var/lib/shalekv --from 1000 --format json
  shalekv wal --url file:///var/lib/shalekv --id 17        the entries of one object
"""


@dataclass(frozen=True, slots=True)
class WalObject:
    """One WAL object with its footer, or with its problem."""

    wal_id: int
    size_bytes: int | None  # None: the object is missing
    footer: Footer | None
    problem: ShaleError | None

    def row(self) -> tuple[int | bool | str | None, ...]:
        """The cells of `LIST_COLUMNS`."""
        if self.footer is None:
            return (self.wal_id, self.size_bytes, *(None,) * 5, str(self.problem))
        contents = self.footer.contents
        is_fence = contents.entry_count == 0
        return (
            self.wal_id,
            self.size_bytes,
            self.footer.properties.writer_epoch,
            None if is_fence else contents.min_seq,
            None if is_fence else contents.max_seq,
            contents.entry_count,
            is_fence,
            None,
        )


@click.command(help=_HELP, epilog=exit_codes_text())
@url_option
@click.option(
    "--id",
    "wal_id",
    type=click.IntRange(0, MAX_ID),
    metavar="ID",
    help="Print the entries of this object.",
)
@click.option(
    "--from",
    "first_id",
    type=click.IntRange(0, MAX_ID),
    default=0,
    metavar="ID",
    help="List from this object on.",
)
@encoding_options
@format_option
def wal(
    *,
    url: str,
    wal_id: int | None,
    first_id: int,
    encoding: Encoding,
    output_format: Format,
) -> None:
    """Print the list, or the entries of one object."""
    if wal_id is not None:
        if first_id:
            raise click.UsageError("--id and --from exclude each other")
        entries = read_store(url, _entries(wal_id))
        with printing():
            _print_entries(entries, encoding, output_format)
        return
    found, is_archive = read_store(url, _objects(first_id))
    with printing():
        print_rows(output_format, LIST_COLUMNS, (wal_object.row() for wal_object in found))
    if is_archive:
        click.echo(
            "This is the archive: later commits are only in the logs of the safekeepers. See "
            "`shalekv safekeeper status`.",
            err=True,
        )
    problems = [wal_object.problem for wal_object in found if wal_object.problem]
    if problems:
        # The whole text: a table cuts its cells, and other formats are read by programs.
        count = f"{len(problems)} of {len(found)} objects cannot be used"
        click.echo(f"Error: {count}, the first of them: {problems[0]}", err=True)
        raise SystemExit(exit_code_of(problems[0]))


def _entries(wal_id: int) -> Callable[[CasStore], Awaitable[list[Entry]]]:
    async def read(store: CasStore) -> list[Entry]:
        name = wal_name(wal_id)
        sst = open_sst(name, await read_by_id(store, name), database_id=None)
        return list(chain(sst.entries(), sst.range_tombstones(), sst.control_entries()))

    return read


def _objects(first_id: int) -> Callable[[CasStore], Awaitable[tuple[list[WalObject], bool]]]:
    """Return a read of the objects from an id on, and of whether safekeepers may have more."""

    async def read(store: CasStore) -> tuple[list[WalObject], bool]:
        start_after = wal_name(first_id - 1) if first_id else ""
        listed = []
        async for info in store.list(WAL_FOLDER, start_after=start_after):
            wal_id = parse_wal_name(info.name)
            if wal_id is not None:
                listed.append((wal_id, info))
        if not listed:
            await StoredManifest(store).refresh()  # raises if there is no database
        slots = asyncio.Semaphore(READS_MAX)
        async with asyncio.TaskGroup() as tasks:
            reads = [
                tasks.create_task(_examine(store, wal_id, info, slots)) for wal_id, info in listed
            ]
        found = [read.result() for read in reads]
        missing = await _missing(store)
        if missing is not None and missing.wal_id >= first_id:
            found.append(missing)
        return sorted(found, key=lambda wal_object: wal_object.wal_id), await _is_archive(store)

    return read


async def _is_archive(store: CasStore) -> bool:
    """Return whether the log is in safekeepers, and the objects are only its archive."""
    try:
        return not (await StoredManifest(store).refresh()).is_log_in_store
    except CorruptObject:  # reported by `shalekv manifest`
        return False


async def _missing(store: CasStore) -> WalObject | None:
    """The first object that was written but is missing, in two lists in a row."""
    stored = StoredManifest(store)
    gaps = []
    for _attempt in range(2):  # one list may be inconsistent while a server writes
        try:
            manifest = await stored.refresh()
        except CorruptObject:  # unknown without it; reported by `shalekv manifest`
            return None
        folder = await list_wal(store, manifest.first_uncompacted_wal_id)
        if not folder.misses_an_object(
            width=manifest.upload_window, last_seen=manifest.wal_id_last_seen
        ):
            return None
        gaps.append(folder.first_gap)
    if gaps[0] != gaps[1]:
        return None
    name = wal_name(gaps[0])
    return WalObject(
        gaps[0], None, None, IllegalState(f"{name} is missing although it was written")
    )


async def _examine(
    store: CasStore, wal_id: int, info: ObjectInfo, slots: asyncio.Semaphore
) -> WalObject:
    async with slots:
        try:
            return WalObject(wal_id, info.size_bytes, await _footer(store, info), None)
        except (CorruptObject, StoreError) as error:
            return WalObject(wal_id, info.size_bytes, None, error)


async def _footer(store: CasStore, info: ObjectInfo) -> Footer:
    tail = await store.get_range(info.name, -TAIL_BYTES, TAIL_BYTES)
    needed = needed_tail(info.name, tail, info.size_bytes)
    if len(tail) < needed <= info.size_bytes:
        tail = await store.get_range(info.name, -needed, needed)
    return read_footer(info.name, tail, info.size_bytes, database_id=None)


def _print_entries(entries: list[Entry], encoding: Encoding, output_format: Format) -> None:
    if output_format is Format.JSON:
        for entry in entries:
            print_json(_object(entry, encoding))
        return
    rows = (
        (
            encoding.encode(entry.key),
            entry.seq,
            entry.kind.name.lower(),
            encoding.encode(entry.value),
            entry.expire_at_ms or None,
        )
        for entry in entries
    )
    print_rows(output_format, ENTRY_COLUMNS, rows)


def _object(entry: Entry, encoding: Encoding) -> Record:
    return {
        **json_field("key", entry.key, encoding),
        "seq": entry.seq,
        "kind": entry.kind.name.lower(),
        **json_field("value", entry.value, encoding),
        "expire_at_ms": entry.expire_at_ms or None,
    }
