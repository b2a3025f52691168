"""`shalekv grant`: the grants of the access policy, which give roles and quotas to principals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import click

from shalekv.cli.console.connection import Target, exit_codes_of_calls, target_options
from shalekv.cli.console.option_groups import grouped_options
from shalekv.cli.console.output import Format, format_option, print_json, print_rows, printing
from shalekv.cli.console.policy_edits import (
    confirm,
    edit_policy,
    force_option,
    quota_record,
    read_policy,
)
from shalekv_client import AccessGrant, AccessPolicy, AccessQuota

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

COLUMNS = ("subject", "roles", "limits")
_LIMITS = {
    "calls_per_s": "Calls and operations of sessions that begin in a second.",
    "bytes_per_s": "Bytes of requests and replies in a second.",
    "calls_in_flight": "Calls and operations of sessions in progress.",
    "bytes_in_flight": "Bytes of requests in progress.",
    "watches": "Open watches.",
    "scans": "Scans in progress.",
    "sessions": "Open sessions.",
}

_HELP = """List, set and remove the grants of the access policy.

A grant gives roles and limits to a subject. A principal has the roles of all its subjects: its
name, what else its credentials prove, authenticated, and anonymous. Of several limits of one kind
the smallest counts, for each principal and at each process on its own.

\b
Subjects:
  token:NAME          a static token
  uri:URI, dns:NAME   names in a client certificate; cn:NAME if it has neither
  oidc:SUBJECT        a JSON web token, by its claim `sub`
  claim:NAME=VALUE    a claim of a JSON web token
  authenticated       everybody with valid credentials
  anonymous           everybody

\b
Examples:
  shalekv grant set token:shop --role orders --calls-per-s 500
  shalekv grant set uri:spiffe://example.org/auditor --role auditor
  shalekv grant set claim:groups=operators --role root
  shalekv grant list
  shalekv grant remove token:shop
"""


@click.group(help=_HELP, epilog=exit_codes_of_calls())
def grant() -> None:
    """Hold the commands about grants."""


def _limit_options(command: CommandT) -> CommandT:
    command = grouped_options("quota", tuple(_LIMITS), AccessQuota)(command)
    for name, text in reversed(_LIMITS.items()):
        command = click.option(
            f"--{name.replace('_', '-')}",
            type=click.IntRange(1),
            callback=lambda _context, _option, value: value or 0,
            metavar="LIMIT",
            help=f"Most of: {text[0].lower()}{text[1:]}  [default: no limit]",
        )(command)
    return command


@grant.command("list")
@click.argument("subjects", metavar="[SUBJECT]...", nargs=-1)
@target_options
@format_option
def list_(*, subjects: tuple[str, ...], target: Target, output_format: Format) -> None:
    """Print all grants, or those of some subjects."""
    policy = read_policy(target)
    found = [each for each in policy.grants if not subjects or each.subject in subjects]
    missing = sorted({*subjects} - {each.subject for each in found})
    if missing:
        raise _missing(missing[0])
    with printing():
        if output_format is Format.JSON:
            for each in found:
                record = {"subject": each.subject, "roles": list(each.roles)}
                print_json({**record, "limits": quota_record(each.quota)})
            return
        print_rows(output_format, COLUMNS, map(_row, found))


@grant.command("set")
@click.argument("subject")
@click.option("--role", "roles", metavar="ROLE", multiple=True, help="A role; repeatable.")
@_limit_options
@target_options
@force_option
def set_(
    *, subject: str, roles: tuple[str, ...], quota: AccessQuota, target: Target, force: bool
) -> None:
    """Give a subject these roles and limits, in place of those that it has."""
    if not roles and quota == AccessQuota():
        raise click.UsageError("give a --role, or a limit; `grant remove` takes all away")
    made = AccessGrant(subject, tuple(dict.fromkeys(roles)), quota)

    def change(policy: AccessPolicy) -> AccessPolicy:
        if all(each.subject != subject for each in policy.grants):
            return replace(policy, grants=(*policy.grants, made))
        grants = tuple(made if each.subject == subject else each for each in policy.grants)
        return replace(policy, grants=grants)

    confirm(edit_policy(target, change, force=force), f"grant of {subject} is set")


@grant.command()
@click.argument("subject")
@target_options
@force_option
def remove(*, subject: str, target: Target, force: bool) -> None:
    """Take all roles and limits from a subject."""

    def change(policy: AccessPolicy) -> AccessPolicy:
        if all(each.subject != subject for each in policy.grants):
            raise _missing(subject)
        kept = tuple(each for each in policy.grants if each.subject != subject)
        return replace(policy, grants=kept)

    confirm(edit_policy(target, change, force=force), f"grant of {subject} is removed")


def _row(each: AccessGrant) -> tuple[str, str | None, str | None]:
    limits = quota_record(each.quota)
    limits_text = ",".join(f"{name}={limit}" for name, limit in limits.items())
    return each.subject, ",".join(each.roles) or None, limits_text or None


def _missing(subject: str) -> click.BadParameter:
    return click.BadParameter(f"there is no grant of {subject!r}", param_hint="SUBJECT")


assert tuple(_LIMITS) == tuple(limit.name for limit in fields(AccessQuota))
