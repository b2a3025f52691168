"""`shalekv delete`: delete a key, or a range of keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click

from shalekv.cli.console.connection import (
    Target,
    durability_option,
    exit_codes_of_calls,
    target_options,
)
from shalekv.cli.console.keys import Encoding, argument_bytes, encoding_options
from shalekv.cli.console.options import RangeFlags, condition_options, range_options
from shalekv.cli.console.output import Format, brief_format_option, print_commit
from shalekv.cli.console.talking import talk_once
from shalekv.wording import counted
from shalekv_client import Commit, Durability, PermissionDenied
from shalekv_client.one_call import OneCallClient

if TYPE_CHECKING:
    from shalekv_client import Condition

_HELP = """Delete KEY, or all keys of a range, and print the sequence number of the commit.

A key without a value is no error: the exit code is 0, and stderr says so, unless a condition
forbids it. A range is deleted in one
commit. There is no confirmation, but --all requires --yes.

stderr says how many keys were deleted. For that the server reads them, up to 10,000, which takes
longer than the delete itself, and needs the permission to read them: without it, they are deleted
and not counted. With --no-count nothing is read, and with --durability memory by default.

\b
Examples:
  shalekv delete greeting
  shalekv delete --hex 00ff
  shalekv delete lock/cron --if-seq 1207   only if the value is from this commit
  shalekv delete --prefix session/
  shalekv delete --start 2024 --end 2025   the end is excluded
  shalekv delete --all --yes               the whole database
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("key", required=False)
@range_options
@click.option(
    "--all", "all_keys", is_flag=True, help="Delete all keys of the database; needs --yes."
)
@click.option("--yes", is_flag=True, help="Confirm --all.")
@click.option(
    "--count/--no-count",
    "counts",
    default=None,
    help="Say on stderr how many keys were deleted.  [default: unless --durability is memory]",
)
@condition_options
@encoding_options
@brief_format_option("the sequence number")
@durability_option
@target_options
def delete(  # noqa: PLR0913 (click passes each option by its name)
    *,
    key: str | None,
    key_range: RangeFlags,
    all_keys: bool,
    yes: bool,
    counts: bool | None,
    condition: Condition | None,
    encoding: Encoding,
    output_format: Format | None,
    durability: Durability,
    target: Target,
) -> None:
    """Delete, and print the sequence number."""
    _refuse_contradictions(key, key_range, condition, all_keys=all_keys, yes=yes)
    wanted = None if key is None else argument_bytes(encoding, key, "KEY")
    keys = key_range.decoded(encoding)
    if counts is None:  # what is counted is durable before it is answered
        counts = durability is not Durability.MEMORY

    async def call(client: OneCallClient) -> tuple[Commit, str]:
        async def delete(count: bool) -> Commit:
            if wanted is not None:
                return await client.delete(
                    wanted, condition=condition, count=count, durability=durability
                )
            return await client.delete_range(
                **keys, all_keys=all_keys, count=count, durability=durability
            )

        return await counted_delete(delete) if counts else (await delete(count=False), "")

    commit, why_not = talk_once(target, call, mutates=True, refused="Not deleted")
    print_commit(commit, output_format)
    if counts:
        click.echo(deleted_text(commit, key, why_not), err=True)


async def counted_delete(delete: Callable[[bool], Awaitable[Commit]]) -> tuple[Commit, str]:
    """Delete and count; who may not read the keys may still delete them, without a count.

    `delete` is told whether to count. Returns also the reason if it is not counted.
    """
    try:
        return await delete(True), "the server is older than this client"  # noqa: FBT003
    except PermissionDenied as denied:
        if denied.verb != "read":
            raise
    return await delete(False), "you may not read the keys"  # noqa: FBT003


def deleted_text(commit: Commit, key: str | None, why_not: str) -> str:
    """Say how many keys a delete has deleted, of a range or of one `key`; else `why_not`."""
    if commit.deleted is None:
        return f"not counted: {why_not}"
    if key is not None and not commit.deleted:
        return f"not found: {key}"
    bound = "at least " if commit.deleted_more else ""
    return f"deleted {bound}{counted(commit.deleted, 'key')}"


def _refuse_contradictions(
    key: str | None,
    key_range: RangeFlags,
    condition: Condition | None,
    *,
    all_keys: bool,
    yes: bool,
) -> None:
    if (key is not None) + key_range.is_given + all_keys != 1:
        raise click.UsageError(
            "give exactly one of KEY, a range (--prefix, or --start and --end), and --all"
        )
    if condition is not None and key is None:
        raise click.UsageError("conditions are for one KEY, not for a range")
    if all_keys and not yes:
        raise click.UsageError("--all deletes every key of the database; add --yes if you mean it")
