"""`shalekv safekeeper add|remove|replace|cancel|status`: the members of a quorum."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import click
from pydantic import Field

from shalekv.cli.console.bucket import (
    edited_url_option,
    read_store,
    remembered_flags,
    remembered_settings,
    url_option,
)
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import (
    Format,
    brief_format_option,
    format_option,
    print_line,
    print_record,
    print_rows,
    printing,
)
from shalekv.cli.process.peers import open_links
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.membership import Configuration
from shalekv.settings import Settings, TlsSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.quorum.links import Links
from shalekv.write.quorum.membership import (
    MemberProbe,
    Reconfiguration,
    configuration_of,
    probe_members,
)

ResultT = TypeVar("ResultT")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])

# What these commands connect with. The authorities of clients count as they do for a safekeeper, if
# these commands get its environment or its file.
SHOWN_FLAGS = frozenset({"tls_cert", "tls_key", "tls_server_ca"})

COLUMNS = (
    "address",
    "member",
    "place",
    "health",
    "epoch",
    "last_lsn",
    "committed_lsn",
    "archived_wal_id",
    "log_bytes",
    "is_archiver",
    "problem",
)
WAIT_POLL_MS = 200
WAIT_S_DEFAULT = 60
WAIT_S_MAX = 86_400

_HELP_CHANGE = """

A change takes two steps: this command takes the first, and the writer takes the second once a
majority of the new members holds its log. If no writer serves, the next one does it. While a change
is under way, a majority of the old members *and* a majority of the new ones is needed.
"""

_HELP_ADD = f"""Add safekeepers, which must be running, to a database.

Three members survive the loss of one, five the loss of two; four survive no more losses than
three.{_HELP_CHANGE}
\b
Example:
  shalekv safekeeper add sk4:7655 sk5:7655 --url s3://bucket/folder
"""

_HELP_REMOVE = f"""Remove safekeepers from a database. They delete their logs themselves.
{_HELP_CHANGE}
\b
Example:
  shalekv safekeeper remove sk5:7655 sk4:7655 --url s3://bucket/folder
"""

_HELP_REPLACE = f"""Replace the safekeeper OLD by the safekeeper NEW, which must be running.

Give the same address twice for a node that has lost its disk: it is a new member then, which is
refused until it has replaced the old one and has been filled.{_HELP_CHANGE}
\b
Examples:
  shalekv safekeeper replace sk2:7655 sk6:7655 --url s3://bucket/folder
  shalekv safekeeper replace sk2:7655 sk2:7655 --url s3://bucket/folder
"""

_HELP_CANCEL = """Cancel a change of members that is under way: the old members stay.

This is safe at any time, since nothing was decided without the old members. It is useful when the
change waits for a new node that does not start.
"""

_HELP_STATUS = """Print the status of the safekeepers of a database; each is asked directly.

\b
place            member; joining or leaving while a change is under way
health           sound; damaged (it has lost records, and waits for a writer to fill it);
                 refilling
epoch            the epoch of the writer that it follows
last_lsn         the last record on its disk
committed_lsn    the last record that it knows to be committed
archived_wal_id  the last WAL object that it has seen in the object store
"""

_brief_format = brief_format_option("a sentence")
_wait_option = click.option(
    "--wait-s",
    type=click.IntRange(0, WAIT_S_MAX),
    default=WAIT_S_DEFAULT,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the writer to take the second step. 0: not at all.",
)


class _PeerTls(TlsSettings):
    """TLS of the connections to safekeepers: the same settings, as they count for a command."""

    tls_cert: str = Field(
        default="",
        description="PEM file with the certificate that is shown to safekeepers, and those that "
        "lead from it to its authority.",
        json_schema_extra={"user": "security: safekeepers accept nobody without"},
    )
    tls_server_ca: str = Field(
        default="",
        description="PEM file with the authorities of the safekeepers. Given without --tls-cert, "
        "they are verified, and get no certificate. Not set: the authorities of clients that a "
        "safekeeper has, if SHALEKV_TLS__TLS_CLIENT_CA or the file of --config has them, or, if "
        "neither is set and --tls-cert is, the authorities of the system.",
        json_schema_extra={"user": "security: safekeepers of another authority than clients"},
    )


class _Peers(Settings):
    tls: _PeerTls = _PeerTls()


def links_options(command: CommandT) -> CommandT:
    """A decorator that adds the flags of `with_links`: those of TLS."""
    return remembered_flags(_Peers, SHOWN_FLAGS)(command)


def with_links(url: str, run: Callable[[CasStore, Links], Awaitable[ResultT]]) -> ResultT:
    """Run `run` with the store at `url` and connections to safekeepers, and return its result.

    REQUIRES: the command has `links_options`.
    """
    tls = remembered_settings(_Peers).tls

    async def opened(store: CasStore) -> ResultT:
        async with open_links(tls) as links:
            return await run(store, links)

    return read_store(url, opened)


@click.command(help=_HELP_ADD, epilog=exit_codes_text())
@click.argument("addresses", metavar="HOST:PORT...", nargs=-1, required=True)
@edited_url_option
@links_options
@_wait_option
@_brief_format
def add(*, addresses: Sequence[str], url: str, wait_s: int, output_format: Format | None) -> None:
    """Add members."""
    _change(url, wait_s, output_format, lambda changing: changing.add(addresses))


@click.command(help=_HELP_REMOVE, epilog=exit_codes_text())
@click.argument("addresses", metavar="HOST:PORT...", nargs=-1, required=True)
@edited_url_option
@links_options
@_wait_option
@_brief_format
def remove(
    *, addresses: Sequence[str], url: str, wait_s: int, output_format: Format | None
) -> None:
    """Remove members."""
    _change(url, wait_s, output_format, lambda changing: changing.remove(addresses))


@click.command(help=_HELP_REPLACE, epilog=exit_codes_text())
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@edited_url_option
@links_options
@_wait_option
@_brief_format
def replace(*, old: str, new: str, url: str, wait_s: int, output_format: Format | None) -> None:
    """Replace a member."""
    _change(url, wait_s, output_format, lambda changing: changing.replace(old, new))


@click.command(help=_HELP_CANCEL, epilog=exit_codes_text())
@edited_url_option
@links_options
@_brief_format
def cancel(*, url: str, output_format: Format | None) -> None:
    """Cancel a change."""
    _change(url, 0, output_format, lambda changing: changing.cancel())


@click.command(help=_HELP_STATUS, epilog=exit_codes_text())
@url_option
@links_options
@format_option
def status(*, url: str, output_format: Format) -> None:
    """Print all members."""

    async def ask(store: CasStore, links: Links) -> tuple[Configuration, Sequence[MemberProbe]]:
        manifest = await StoredManifest(store).refresh()
        configuration = configuration_of(manifest)
        everyone = configuration.everyone
        return configuration, await probe_members(links, manifest.database_id, everyone)

    configuration, probes = with_links(url, ask)
    with printing():
        print_rows(output_format, COLUMNS, [_row(configuration, each) for each in probes])


def _change(
    url: str,
    wait_s: int,
    output_format: Format | None,
    change: Callable[[Reconfiguration], Awaitable[Manifest]],
) -> None:
    """Begin a change, wait for its end, and print the outcome."""

    async def run(store: CasStore, links: Links) -> Manifest:
        manifest = await change(Reconfiguration(store, links))
        stored, clock = StoredManifest(store), store.runtime.clock
        deadline_ms = clock.monotonic_ms() + wait_s * 1_000
        while configuration_of(manifest).is_joint and clock.monotonic_ms() < deadline_ms:
            await clock.sleep_ms(WAIT_POLL_MS)
            manifest = await stored.refresh()
        return manifest

    configuration = configuration_of(with_links(url, run))
    with printing():
        _print_outcome(configuration, output_format)


def _print_outcome(configuration: Configuration, output_format: Format | None) -> None:
    members = [member.address for member in configuration.members]
    joint = [member.address for member in configuration.next]
    if output_format is not None:
        print_record(output_format, {"members": members, "next_members": joint})
    elif not joint:
        print_line(f"the members are {', '.join(members)}")
    else:
        print_line(f"the change from {', '.join(members)} to {', '.join(joint)} is under way")
    if joint:
        click.echo(
            "It ends when a writer serves and has filled a majority of the new members; until then "
            "majorities of both sets are needed. See `shalekv safekeeper status`.",
            err=True,
        )
    if len(configuration.next or configuration.members) % 2 == 0:
        click.echo(
            "An even number of members survives no more losses than one member less.", err=True
        )


def _row(configuration: Configuration, probe: MemberProbe) -> tuple[Any, ...]:
    member, found = probe.member, probe.status
    ids, ids_next = ({m.id for m in each} for each in (configuration.members, configuration.next))
    place = "member"
    if configuration.is_joint:
        place = "member" if member.id in ids & ids_next else "leaving"
        place = "joining" if member.id not in ids else place
    if found is None:
        unknown = (None,) * (len(COLUMNS) - 4)
        return member.address, member.id.hex(), place, *unknown, probe.problem
    return (
        member.address,
        member.id.hex(),
        place,
        found.health.value,
        found.promise.epoch,
        found.log.last.lsn,
        found.committed_lsn,
        found.archived_wal_id,
        found.log_bytes,
        found.is_archiver,
        found.archive_problem or found.full_problem,
    )
