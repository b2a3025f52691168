"""`shalekv access recover`: change the access policy in the object store, past all roles."""

from __future__ import annotations

from dataclasses import replace

import click

from shalekv.cli.console.bucket import edited_url_option, read_store
from shalekv.cli.console.exit_codes import exit_codes_text
from shalekv.cli.console.output import Format, brief_format_option, print_record, printing
from shalekv.errors import InvalidRequest, PolicyChanged
from shalekv.protocol.access import ROOT, Grant, Policy, check_subject
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest, edit_deadline
from shalekv.store.policies import StoredPolicy

_HELP = """Change the access policy in the object store, past all roles: the way back after a
lock-out.

It needs the credentials of the object store, and no server. Whoever has them can read and change
the whole database anyway. --admin gives the role root to a principal, beside what it has; the
policy stays enforced if it was, and the first one is enforced. --open makes it enforced no more:
everything is allowed to everybody. Servers follow within --policy-check-ms, 2 seconds by default.

\b
Examples:
  shalekv access recover --url s3://bucket/folder --admin token:ann
  shalekv access recover --url s3://bucket/folder --open
"""


@click.command(help=_HELP, epilog=exit_codes_text())
@edited_url_option
@click.option(
    "--admin",
    "admins",
    metavar="PRINCIPAL",
    multiple=True,
    help="Give the role root to this principal, such as token:ann; repeatable.",
)
@click.option("--open", "is_opened", is_flag=True, help="Enforce the policy no more.")
@brief_format_option("what was changed, on stderr")
def recover(
    *, url: str, admins: tuple[str, ...], is_opened: bool, output_format: Format | None
) -> None:
    """Change the policy, and say so."""
    if not admins and not is_opened:
        raise click.UsageError("give --admin, or --open")
    for admin in admins:
        try:
            check_subject("admin", admin)
        except InvalidRequest as error:
            raise click.BadParameter(error.problem, param_hint="--admin") from None

    async def edited(store: CasStore) -> Policy:
        async with edit_deadline(store):
            return await recover_access(store, admins, is_opened=is_opened)

    policy = read_store(url, edited)
    click.echo(f"WARNING: the access policy of {url} was changed past all roles:", err=True)
    for admin in admins:
        click.echo(f"  {admin} has the role {ROOT}: every right", err=True)
    if is_opened:
        click.echo("  it is not enforced: everything is allowed to everybody", err=True)
    elif not policy.is_enforced:
        click.echo("  it was not enforced, and still is not", err=True)
    elif policy.version == 1:
        click.echo("  it is the first policy, and enforced: others have no right yet", err=True)
    if output_format is not None:
        with printing():
            record = {"version": policy.version, "enforced": policy.is_enforced}
            print_record(output_format, record)


async def recover_access(store: CasStore, admins: tuple[str, ...], *, is_opened: bool) -> Policy:
    """Give the role root to `admins`, and open the database if `is_opened`; return the policy.

    Raises `DatabaseNotFound`, `InvalidRequest`, `CorruptObject` and `StoreError`.
    """
    manifests = StoredManifest(store)
    manifest = await manifests.refresh()
    manifests.check_cas_mode(manifest)
    stored = StoredPolicy(store, manifest.database_id)
    conflicts = 0
    while True:
        policy = await stored.refresh()
        grants = {grant.subject: grant for grant in policy.grants}
        for admin in admins:
            before = grants.get(admin, Grant(admin))
            grants[admin] = replace(before, roles=tuple(dict.fromkeys((*before.roles, ROOT))))
        # Without a policy, `--admins` of the servers may have refused everybody else.
        is_enforced = (policy.is_enforced or not policy.version) and not is_opened
        try:
            return await stored.replace(
                replace(policy, grants=tuple(grants.values()), is_enforced=is_enforced)
            )
        except PolicyChanged:
            conflicts += 1
            await store.pause(conflicts)
