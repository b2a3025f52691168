"""`shalekv admin recover`: complete creates of the two-phase protocol that have crashed."""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

import click

from shalekv.cli.console.bucket import edited_url_option, read_store
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import Format, format_option, print_record, printing
from shalekv.errors import DatabaseNotFound
from shalekv.protocol.manifest import CasMode
from shalekv.store.api import Repaired
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest

_HELP = """Complete creates of objects that have crashed half-way, with --cas two_phase.

Every writer does so when it opens, and the collector before it lists objects; this command is for
not waiting for either. It is safe at any time, while servers run, and can be repeated.

\b
completed    creates that were completed
unfinished   creates that cannot be completed: the next create of the name takes it over
forgotten    deleted records of objects that were collected

With --cas native a create is one request, and there is nothing to recover. A database that was
created with another --cas is refused. If no database exists, its creation may have crashed: that is
completed, too.

\b
Examples:
  shalekv admin recover --url s3://bucket/folder --cas two_phase --records-url dynamodb://records
  shalekv admin recover --url s3://bucket/folder --config shalekv.toml --format json
"""


@click.command(help=_HELP, epilog=exit_codes_text())
@edited_url_option
@format_option
def recover(*, url: str, output_format: Format) -> None:
    """Complete the creates, and print their numbers."""
    outcome = read_store(url, repair_store)
    if outcome.missing is not None and outcome.repaired == Repaired():
        raise outcome.missing
    with printing():
        record = {"cas": outcome.cas.name.lower(), **asdict(outcome.repaired)}
        print_record(output_format, record)
    if outcome.missing is not None:
        raise outcome.missing
    if outcome.cas is CasMode.NATIVE:
        click.echo("nothing to recover: with --cas native a create is one request", err=True)


class RepairOutcome(NamedTuple):
    """The outcome of `repair_store`."""

    cas: CasMode
    repaired: Repaired
    missing: DatabaseNotFound | None = None  # set if there is still no database


async def repair_store(store: CasStore) -> RepairOutcome:
    """Complete crashed creates. Raises `DatabaseMismatch`, `CorruptObject`, `StoreError`."""
    stored = StoredManifest(store)
    try:
        stored.check_cas_mode(await stored.refresh())
    except DatabaseNotFound:
        # The create of the first manifest may be the one that has crashed.
        repaired = await store.repair()
        try:
            await stored.refresh()
        except DatabaseNotFound as missing:
            return RepairOutcome(store.cas_mode, repaired, missing)
        return RepairOutcome(store.cas_mode, repaired)
    return RepairOutcome(store.cas_mode, await store.repair())
