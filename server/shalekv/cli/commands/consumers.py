"""`shalekv consumers`: list and delete named consumers of the WAL, in the object store."""

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
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.snapshot import NEVER
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.watch.consumers import Consumer, ConsumerLeases, consumers_of
from shalekv.wording import MS_PER_S

COLUMNS = (
    *("name", "wal_id_min", "wal_id_last_compacted"),
    *("expire_at_ms", "state", "principal"),
)

_HELP = """List and delete the named consumers of the WAL.

A watch with the name of a consumer keeps the WAL from its position on, so that it can continue
there after an interruption. The lease of a consumer expires by the clock of the store unless a
watch renews it; until then the collector keeps these objects. The commands need no server.

\b
Examples:
  shalekv consumers list --url file:///var/lib/shalekv
  shalekv consumers delete mirror --url file:///var/lib/shalekv
"""

_HELP_LIST = """List the consumers, and the first WAL object that each keeps.

A consumer that has expired keeps its objects until the next collection (state: expired).
"""


@click.group(help=_HELP, epilog=exit_codes_text())
def consumers() -> None:
    """Hold the commands about consumers."""


@consumers.command("list", help=_HELP_LIST)
@url_option
@format_option
def list_(*, url: str, output_format: Format) -> None:
    """Print all consumers."""

    async def read(store: CasStore) -> tuple[Manifest, int]:
        return await StoredManifest(store).refresh(), await store.now_ms()

    manifest, now_ms = read_store(url, read)
    with printing():
        rows = [_row(each, manifest, now_ms) for each in consumers_of(manifest)]
        print_rows(output_format, COLUMNS, rows)


@consumers.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option(
    "--principal", default="", help="The principal to which they belong. Not set: to none."
)
@edited_url_option
@brief_format_option("the names")
def delete(*, names: Sequence[str], principal: str, url: str, output_format: Format | None) -> None:
    """Delete consumers; the next collection deletes what only they have kept.

    A running watch with the name creates a new lease from its position on, if possible.
    """

    async def delete(store: CasStore) -> Sequence[str]:
        leases = ConsumerLeases(store, StoredManifest(store), ttl_s=0)
        known = [each.name for each in await leases.list() if each.principal == principal]
        found = [name for name in names if name in known]
        if len(found) == len(names):
            for name in found:
                await leases.release(name, principal=principal)
        return found

    found = read_store(url, delete)
    unknown = [name for name in names if name not in found]
    if unknown:
        called = f"{unknown[0]!r} of {principal!r}" if principal else repr(unknown[0])
        raise click.UsageError(f"there is no consumer called {called}: nothing was deleted")
    with printing():
        print_rows(output_format or Format.RAW, ("name",), [(name,) for name in found])


def _row(consumer: Consumer, manifest: Manifest, now_ms: int) -> tuple[Any, ...]:
    lease = consumer.lease
    is_expired = lease.expire_time_s != NEVER and lease.expire_time_s < now_ms / MS_PER_S
    return (
        consumer.name,
        lease.wal_id_min,
        manifest.wal_id_last_compacted,
        None if lease.expire_time_s == NEVER else lease.expire_time_s * MS_PER_S,
        "expired" if is_expired else "current",
        consumer.principal,
    )
