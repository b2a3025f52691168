"""`shalekv admin leases`: list leases, and remove those created under a wrong clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from shalekv.cli.console.bucket import edited_url_option, read_store, url_option
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import (
    Format,
    brief_format_option,
    format_option,
    print_rows,
    printing,
)
from shalekv.protocol.snapshot import NEVER
from shalekv.store.cas import CasStore
from shalekv.wording import MS_PER_S
from shalekv.write.job_leases import LeaseView, list_leases, remove_leases

COLUMNS = (*("id", "holder", "made_at_ms", "expire_at_ms", "state", "wal_id_min", "reserved_seq"),)
LEASE_ID_BYTES = 16

_HELP = """List the leases of a database, and remove those created under a wrong clock.

A lease protects objects written by a compaction or a load until a manifest refers to them; it may
also reserve SSTs for a job. It expires by the clock of the store. If that clock was days ahead when
the lease was created, the lease stays as much longer, even if its job has ended: objects that it
protects are not collected, and SSTs that it reserves are not merged.

\b
Examples:
  shalekv admin leases list --url file:///var/lib/shalekv
  shalekv admin leases delete 0198c0de00007000800000000000ab01 --url file:///var/lib/shalekv
"""

_HELP_LIST = """List the leases.

\b
state  current, expired (until the next collection), or from the future: created by a clock that
       was ahead of the store's. A lease renewed by such a clock is current, and expires late.
made   time of creation; empty for leases that keep WAL objects: those of consumers and retention
"""

_HELP_DELETE = """Remove leases of jobs by their ids.

The next collection deletes objects that the lease protected, unless a manifest refers to them. If
the job of the lease still runs, it publishes nothing and ends with an error: its work is lost, but
no published data. Therefore a lease is removed only if it has expired or was created by a clock
that was ahead; --force removes any lease. For consumers use `shalekv consumers delete`.
"""


@click.group(help=_HELP, epilog=exit_codes_text())
def leases() -> None:
    """Hold the commands about leases."""


@leases.command("list", help=_HELP_LIST)
@url_option
@format_option
def list_(*, url: str, output_format: Format) -> None:
    """Print all leases."""
    found = read_store(url, list_leases)
    with printing():
        print_rows(output_format, COLUMNS, map(_row, found))


@leases.command(help=_HELP_DELETE)
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@edited_url_option
@click.option("--force", is_flag=True, help="Remove leases even if their jobs may be running.")
@brief_format_option("the ids")
def delete(*, ids: Sequence[str], url: str, force: bool, output_format: Format | None) -> None:
    """Remove leases, and print their ids."""
    lease_ids = [_lease_id(each) for each in ids]

    async def remove(store: CasStore) -> None:
        await remove_leases(store, lease_ids, is_forced=force)

    read_store(url, remove)
    with printing():
        print_rows(output_format or Format.RAW, ("id",), [(each.hex(),) for each in lease_ids])


def _lease_id(text: str) -> bytes:
    try:
        lease_id = bytes.fromhex(text)
    except ValueError:
        lease_id = b""
    if len(lease_id) != LEASE_ID_BYTES:
        raise click.BadParameter(f"{text!r} is not {2 * LEASE_ID_BYTES} hexadecimal digits")
    return lease_id


def _row(view: LeaseView) -> tuple[Any, ...]:
    lease = view.lease
    state = "expired" if view.is_expired else "current"
    return (
        lease.id.hex(),
        lease.holder,
        view.made_ms,
        None if lease.expire_time_s == NEVER else lease.expire_time_s * MS_PER_S,
        "from the future" if view.is_from_the_future else state,
        lease.wal_id_min,
        lease.reserved_seq,
    )
