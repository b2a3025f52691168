"""`shalekv snapshot`: manage the snapshots of a database, in the object store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from shalekv.cli.console.bucket import edited_url_option, read_store, url_option
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import (
    Format,
    Record,
    brief_format_option,
    format_option,
    print_line,
    print_record,
    print_rows,
    printing,
)
from shalekv.cli.console.units import duration
from shalekv.jobs.pinned_clones import CheckedPin, CloneState, check_clones, removal_command
from shalekv.protocol.manifest import Snapshot
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.snapshots import GAP_WAIT_MS, Snapshots, SnapshotView

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
ResultT = TypeVar("ResultT")

HOUR_MS = 3_600_000
COLUMNS = (
    "id",
    "name",
    "manifest_id",
    "expires_at_ms",
    "is_expired",
    "wal_id_last_compacted",
    "wal_id_last_seen",
    "last_compacted_seq",
    "pinned_bytes",
    "pinned_alone_bytes",
    "clone",
)

_HELP = """Create, list, renew, share and delete the snapshots of a database.

A snapshot keeps the objects of one manifest: the state of the database at its creation, including
the WAL objects of that time. The commands need no server. A snapshot expires by the clock of the
store; after that its objects are deleted, and it cannot be renewed.

\b
Examples:
  shalekv snapshot create --url file:///var/lib/shalekv --name nightly --ttl 12h
  shalekv snapshot renew nightly --url file:///var/lib/shalekv --ttl 1d
  shalekv snapshot share nightly --url file:///var/lib/shalekv --name copy
  shalekv snapshot list --url file:///var/lib/shalekv
  shalekv snapshot delete nightly --url file:///var/lib/shalekv
"""

_HELP_LIST = """List the snapshots, including those of servers.

The pinned bytes are those of objects that the current manifest does not need; the bytes pinned
alone are freed when this snapshot is deleted. A snapshot that has expired pins nothing, and is
removed by the next collection. The column clone is for snapshots that keep SSTs for a clone, and
says whether that is there: needed, gone, or not known. The commands that remove those of clones
that are gone are printed below.
"""


@click.group(help=_HELP, epilog=exit_codes_text())
def snapshot() -> None:
    """Hold the commands about snapshots."""


def _life_options(command: CommandT) -> CommandT:
    ttl = click.option(
        "--ttl",
        "ttl_ms",
        callback=duration,
        metavar="TIME",
        help="Time until it expires, such as 30s, 10m, 12h or 7d.  [default: 1h]",
    )
    forever = click.option(
        "--forever", is_flag=True, help="Never expire: keep the objects until it is deleted."
    )
    return ttl(forever(command))


def _name_option(command: CommandT) -> CommandT:
    return click.option("--name", default="", metavar="NAME", help="A name of your choice.")(
        command
    )


_snapshot_argument = click.argument("name_or_id", metavar="ID|NAME")
_brief_format = brief_format_option("the id of the snapshot")


@snapshot.command()
@edited_url_option
@_name_option
@_life_options
@_brief_format
def create(
    *, url: str, name: str, ttl_ms: int | None, forever: bool, output_format: Format | None
) -> None:
    """Create a snapshot of the current state, and print its id."""
    life_ms = _life_ms(ttl_ms, forever=forever)
    found = _with_snapshots(
        url,
        lambda known: known.create(name=name, ttl_ms=life_ms, gap_wait_ms=GAP_WAIT_MS),
    )
    _print(found, output_format)


@snapshot.command()
@_snapshot_argument
@edited_url_option
@_name_option
@_life_options
@_brief_format
def share(
    *,
    name_or_id: str,
    url: str,
    name: str,
    ttl_ms: int | None,
    forever: bool,
    output_format: Format | None,
) -> None:
    """Create a second snapshot of the state of another one, and print its id."""
    life_ms = _life_ms(ttl_ms, forever=forever)
    found = _with_snapshots(url, lambda known: known.share(name_or_id, name=name, ttl_ms=life_ms))
    _print(found, output_format)


@snapshot.command()
@_snapshot_argument
@edited_url_option
@_life_options
@_brief_format
def renew(
    *, name_or_id: str, url: str, ttl_ms: int | None, forever: bool, output_format: Format | None
) -> None:
    """Extend the lifetime of a snapshot that has not expired, from now on."""
    life_ms = _life_ms(ttl_ms, forever=forever)
    found = _with_snapshots(url, lambda known: known.renew(name_or_id, ttl_ms=life_ms))
    _print(found, output_format)


@snapshot.command()
@_snapshot_argument
@edited_url_option
@click.option(
    "--force", is_flag=True, help="Delete it even if a clone needs it, which is then lost."
)
@_brief_format
def delete(*, name_or_id: str, url: str, force: bool, output_format: Format | None) -> None:
    """Delete a snapshot; the next collection deletes what only it has kept."""
    found = _with_snapshots(url, lambda known: known.delete(name_or_id, is_forced=force))
    _print(found, output_format)


@snapshot.command("list", help=_HELP_LIST)
@url_option
@format_option
def list_(*, url: str, output_format: Format) -> None:
    """Print all snapshots."""

    async def read(store: CasStore) -> tuple[Sequence[SnapshotView], dict[bytes, CheckedPin]]:
        stored = StoredManifest(store)
        checked = await check_clones(store, await stored.refresh())
        return await Snapshots(store, stored).list(), {pin.snapshot.id: pin for pin in checked}

    found, checked = read_store(url, read)
    with printing():
        print_rows(output_format, COLUMNS, (_row(view, checked) for view in found))
    for pin in checked.values():
        if pin.state is not CloneState.NEEDED:
            command = removal_command(url, pin.snapshot)
            is_gone = pin.state is CloneState.GONE
            advice = (
                "Remove its snapshot" if is_gone else "If it does not exist, remove its snapshot"
            )
            name = pin.snapshot.name
            click.echo(f"{name}: {pin.state.value}, {pin.remark}. {advice}: {command}", err=True)


def _with_snapshots(url: str, act: Callable[[Snapshots], Awaitable[ResultT]]) -> ResultT:
    async def opened(store: CasStore) -> ResultT:
        stored = StoredManifest(store)
        await stored.refresh()  # raises without a database, before a store writes to get the time
        return await act(Snapshots(store, stored))

    return read_store(url, opened)


def _life_ms(ttl_ms: int | None, *, forever: bool) -> int | None:
    if forever:
        if ttl_ms is not None:
            raise click.UsageError("--ttl and --forever exclude each other")
        return None
    return HOUR_MS if ttl_ms is None else ttl_ms


def _print(found: Snapshot, output_format: Format | None) -> None:
    with printing():
        if output_format is None:
            print_line(found.id.hex())
        else:
            print_record(output_format, _record(found))


def _record(found: Snapshot) -> Record:
    return {
        "id": found.id.hex(),
        "name": found.name or None,
        "manifest_id": found.manifest_id,
        "expires_at_ms": 1_000 * found.snapshot_expire_time_s or None,
    }


def _row(view: SnapshotView, checked: Mapping[bytes, CheckedPin]) -> tuple[Any, ...]:
    manifest, pinned, pin = view.manifest, view.pinned, checked.get(view.snapshot.id)
    cells = tuple(_record(view.snapshot).values())
    if manifest is None or pinned is None:
        return (*cells, True, *(None,) * 6)
    return (
        *cells,
        False,
        manifest.wal_id_last_compacted,
        manifest.wal_id_last_seen,
        manifest.last_compacted_seq,
        pinned.size_bytes,
        pinned.alone_bytes,
        None if pin is None else pin.state.value,
    )
