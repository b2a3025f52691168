"""Shared parts of the commands that read and change the access policy: edits, and their output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import click

from shalekv.cli.console.connection import Target
from shalekv.cli.console.keys import Encoding, json_field
from shalekv.cli.console.talking import talk
from shalekv_client import (
    AccessPolicy,
    AccessQuota,
    AccessRule,
    AccessVerb,
    Client,
    PolicyChanged,
)

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
Change = Callable[[AccessPolicy], AccessPolicy]

EDITS_MAX = 10  # each of which lost to another change


def read_policy(target: Target) -> AccessPolicy:
    """Ask a server for the policy."""
    return talk(target, lambda client: client.access_policy())


def edit_policy(target: Target, change: Change, *, force: bool = False) -> AccessPolicy:
    """Apply `change` to the policy, again after each change of others; return what is stored.

    A policy that `change` leaves as it is, is not stored again.
    """

    async def edit(client: Client) -> AccessPolicy:
        for left in range(EDITS_MAX - 1, -1, -1):
            before = await client.access_policy()
            after = change(before)
            if after == before:
                return before
            try:
                version = await client.set_access_policy(after, force=force)
            except PolicyChanged:
                if not left:
                    raise
            else:
                return replace(after, version=version)
        raise AssertionError(EDITS_MAX)

    return talk(target, edit, mutates=True)


def force_option(command: CommandT) -> CommandT:
    """A decorator that adds --force, as the argument `force`."""
    return click.option(
        "--force",
        is_flag=True,
        help="Store it even if it is enforced, and you, or all but the --admins of the servers, "
        "lose the verb admin by it.",
    )(command)


def confirm(policy: AccessPolicy, text: str) -> None:
    """Tell on stderr what was stored, and whether that counts already."""
    click.echo(f"{text} (policy version {policy.version})", err=True)
    if not policy.is_enforced:
        click.echo("It is not enforced yet: see `shalekv access enforce --help`.", err=True)


def verbs_text(rule: AccessRule) -> str:
    """Format the verbs of a rule, in the order of the protocol."""
    names = [verb.name.lower() for verb in AccessVerb if verb in rule.verbs]
    return ",".join([*names, *(["unknown"] if None in rule.verbs else [])])


def keys_text(rule: AccessRule, encoding: Encoding) -> str:
    """Format the keys of a rule as --allow takes them; all keys: "all keys"."""
    prefix = _prefix_of(rule)
    if prefix is not None:
        return f"prefix={encoding.encode(prefix)}" if prefix else "all keys"
    bounds = {"start": rule.start, "end": rule.end}
    return ",".join(f"{name}={encoding.encode(key)}" for name, key in bounds.items() if key)


def rule_record(rule: AccessRule, encoding: Encoding) -> dict[str, Any]:
    """Return a rule as a record of JSON; without keys: all keys."""
    prefix = _prefix_of(rule)
    keys = {"prefix": prefix} if prefix is not None else {"start": rule.start, "end": rule.end}
    record: dict[str, Any] = {"verbs": verbs_text(rule).split(",")}
    for name, key in keys.items():
        record |= json_field(name, key, encoding) if key else {}
    return record


def quota_record(quota: AccessQuota) -> Mapping[str, int]:
    """Return the limits of a quota that are set."""
    limits = {each.name: getattr(quota, each.name) for each in fields(quota)}
    return {name: limit for name, limit in limits.items() if limit}


def _prefix_of(rule: AccessRule) -> bytes | None:
    """Return the prefix that all keys of the rule have, and no others; None: there is none."""
    if rule.prefix or (not rule.start and not rule.end):
        return rule.prefix
    stem = rule.start.rstrip(b"\xff")
    end = stem[:-1] + bytes([stem[-1] + 1]) if stem else b""
    return rule.start if rule.start and rule.end == end else None
