"""`shalekv role`: the roles of the access policy."""

from __future__ import annotations

from dataclasses import replace

import click

from shalekv.cli.console.connection import Target, exit_codes_of_calls, target_options
from shalekv.cli.console.keys import Encoding, argument_bytes, encoding_options
from shalekv.cli.console.output import Format, format_option, print_json, print_rows, printing
from shalekv.cli.console.policy_edits import (
    confirm,
    edit_policy,
    force_option,
    keys_text,
    read_policy,
    rule_record,
    verbs_text,
)
from shalekv_client import AccessPolicy, AccessRole, AccessRule, AccessVerb

COLUMNS = ("role", "verbs", "keys")
_VERBS = {verb.name.lower(): verb for verb in AccessVerb}

_HELP = """List, set and remove the roles of the access policy.

A role is a list of rules, each of which allows some verbs on a range of keys. `shalekv grant` gives
roles to principals. Every policy also has the role root: all verbs on all keys. A change counts at
all servers within seconds, and ends streams that it no longer allows.

\b
The verbs:
  read          get, scan, comparisons, previous values of a watch
  write         put, delete and add to single keys; an add needs read as well
  delete_range  delete ranges
  watch         watch changes
  ingest        commit SST files
  admin         change the policy, manage snapshots, read statistics; has no keys

\b
Examples:
  shalekv role set orders --allow read,write:prefix=orders/ --allow watch:prefix=orders/
  shalekv role set auditor --allow read:start=2026-01,end=2026-07 --allow read:prefix=log/
  shalekv role set operator --allow admin
  shalekv role list
  shalekv role remove orders
"""

_HELP_SET = """Make a role, or replace all rules of one.

RULE is VERBS, or VERBS:KEYS. VERBS are names with commas between them. KEYS are prefix=KEY,
start=KEY, end=KEY, or start=KEY,end=KEY: the keys from start on and before end. Without KEYS: all
keys. With --escaped, a comma in a key can be written as \\x2c.
"""


@click.group(help=_HELP, epilog=exit_codes_of_calls())
def role() -> None:
    """Hold the commands about roles."""


@role.command("list")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@target_options
@encoding_options
@format_option
def list_(
    *, names: tuple[str, ...], target: Target, encoding: Encoding, output_format: Format
) -> None:
    """Print the rules of all roles, or of some."""
    policy = read_policy(target)
    found = [each for each in policy.roles if not names or each.name in names]
    missing = sorted({*names} - {each.name for each in found})
    if missing:
        raise click.BadParameter(f"there is no role {missing[0]!r}", param_hint="NAME")
    with printing():
        if output_format is Format.JSON:
            for each in found:
                rules = [rule_record(rule, encoding) for rule in each.rules]
                print_json({"role": each.name, "rules": rules})
            return
        print_rows(
            output_format,
            COLUMNS,
            [
                (each.name, verbs_text(rule), keys_text(rule, encoding))
                for each in found
                for rule in each.rules
            ],
        )


@role.command("set", help=_HELP_SET)
@click.argument("name")
@click.option(
    "--allow", "rules", metavar="RULE", multiple=True, required=True, help="A rule; repeatable."
)
@target_options
@encoding_options
@force_option
def set_(
    *, name: str, rules: tuple[str, ...], target: Target, encoding: Encoding, force: bool
) -> None:
    """Make or replace a role."""
    made = AccessRole(name, tuple(parse_rule(rule, encoding) for rule in rules))

    def change(policy: AccessPolicy) -> AccessPolicy:
        names = [each.name for each in policy.roles]
        if name not in names:
            return replace(policy, roles=(*policy.roles, made))
        return replace(
            policy, roles=tuple(made if each.name == name else each for each in policy.roles)
        )

    confirm(edit_policy(target, change, force=force), f"role {name} is set")


@role.command()
@click.argument("name")
@target_options
@force_option
def remove(*, name: str, target: Target, force: bool) -> None:
    """Remove a role that no grant has."""

    def change(policy: AccessPolicy) -> AccessPolicy:
        if all(each.name != name for each in policy.roles):
            raise click.BadParameter(f"there is no role {name!r}", param_hint="NAME")
        holders = [grant.subject for grant in policy.grants if name in grant.roles]
        if holders:
            problem = f"{name!r} is granted to {', '.join(holders[:5])}: change these grants first"
            raise click.BadParameter(problem, param_hint="NAME")
        return replace(policy, roles=tuple(each for each in policy.roles if each.name != name))

    confirm(edit_policy(target, change, force=force), f"role {name} is removed")


def parse_rule(text: str, encoding: Encoding) -> AccessRule:
    """Parse a RULE. Raises `click.BadParameter`."""
    names, _, keys = text.partition(":")
    unknown = [name for name in names.split(",") if name not in _VERBS]
    if unknown:
        raise _wrong(f"{unknown[0]!r} is no verb: {', '.join(_VERBS)}")
    verbs = frozenset(_VERBS[name] for name in names.split(","))
    if ":" not in text:
        return AccessRule(verbs)
    kind, is_given, rest = keys.partition("=")
    start, separator, end = rest.partition(",end=")
    if not is_given or not rest or (separator and not end):
        raise _wrong(f"{keys!r} names no keys")
    match kind:
        case "prefix":
            return AccessRule(verbs, prefix=_key(rest, encoding))
        case "start":
            bound = _key(end, encoding) if separator else b""
            return AccessRule(verbs, _key(start, encoding), bound)
        case "end":
            return AccessRule(verbs, end=_key(rest, encoding))
    raise _wrong(f"{keys!r} names no keys")


def _key(text: str, encoding: Encoding) -> bytes:
    return argument_bytes(encoding, text, "--allow")


def _wrong(problem: str) -> click.BadParameter:
    form = "a rule is VERBS, VERBS:prefix=KEY or VERBS:start=KEY,end=KEY"
    return click.BadParameter(f"{problem}; {form}", param_hint="--allow")
