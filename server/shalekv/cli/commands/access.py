"""`shalekv access`: whether the access policy is enforced, who the caller is, and the way back."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import click

from shalekv.cli.console.connection import Target, exit_codes_of_calls, target_options
from shalekv.cli.console.keys import Encoding, encoding_options
from shalekv.cli.console.lazy_commands import CommandTable, LazyCommands
from shalekv.cli.console.output import Format, format_option, print_record, printing
from shalekv.cli.console.policy_edits import (
    edit_policy,
    force_option,
    quota_record,
    read_policy,
    rule_record,
)
from shalekv.cli.console.talking import talk

_HELP = """Enforce the access policy, or open the database again; show who you are.

\b
Examples:
  shalekv access whoami
  shalekv access status
  shalekv access enforce
  shalekv access open
  shalekv access recover --url s3://bucket/folder --admin token:ann
"""

_HELP_ENFORCE = """Enforce the policy: from now on, what no role allows is refused.

Prepare roles and grants before, and run this with credentials that have the verb admin by them:
otherwise it is refused, so that nobody is locked out. All servers follow within seconds.
"""

_HELP_OPEN = """Enforce the policy no more: everything is allowed to everybody.

Roles and grants are kept, and count again after `shalekv access enforce`.
"""


@click.command(epilog=exit_codes_of_calls())
@target_options
@format_option
def status(*, target: Target, output_format: Format) -> None:
    """Print whether the policy is enforced, and how large it is."""
    policy = read_policy(target)
    with printing():
        print_record(
            output_format,
            {
                "version": policy.version,
                "enforced": policy.is_enforced,
                "roles": len(policy.roles),
                "grants": len(policy.grants),
            },
        )


@click.command(help=_HELP_ENFORCE, epilog=exit_codes_of_calls())
@target_options
@force_option
def enforce(*, target: Target, force: bool) -> None:
    """Enforce the policy."""
    policy = edit_policy(target, lambda policy: replace(policy, is_enforced=True), force=force)
    click.echo(f"the access policy is enforced (version {policy.version})", err=True)


@click.command("open", help=_HELP_OPEN, epilog=exit_codes_of_calls())
@target_options
def open_(*, target: Target) -> None:
    """Enforce the policy no more."""
    policy = edit_policy(target, lambda policy: replace(policy, is_enforced=False))
    click.echo(
        f"everything is allowed to everybody: the access policy is not enforced (version "
        f"{policy.version})",
        err=True,
    )


@click.command(epilog=exit_codes_of_calls())
@target_options
@encoding_options
@format_option
def whoami(*, target: Target, encoding: Encoding, output_format: Format) -> None:
    """Print who you are for the server, and what you may do."""
    found = talk(target, lambda client: client.who_am_i())
    with printing():
        print_record(
            output_format,
            {
                "principal": found.principal or "anonymous",
                "subjects": list(found.subjects),
                "enforced": found.is_enforced,
                "expires_at_ms": found.expires_at_ms or None,
                "rules": [rule_record(rule, encoding) for rule in found.rules],
                "limits": quota_record(found.quota),
            },
        )


_SELF = "shalekv.cli.commands.access"
MEMBERS: CommandTable = MappingProxyType(
    {
        "status": (f"{_SELF}:status", "Print whether the policy is enforced."),
        "enforce": (f"{_SELF}:enforce", "Enforce the policy."),
        "open": (f"{_SELF}:open_", "Enforce the policy no more."),
        "whoami": (f"{_SELF}:whoami", "Print who you are, and what you may do."),
        "recover": (
            "shalekv.cli.commands.access_recover:recover",
            "Change the policy in the object store, after a lock-out.",
        ),
    }
)


@click.group(cls=LazyCommands, table=MEMBERS, help=_HELP)
def access() -> None:
    """Hold the commands about access."""
