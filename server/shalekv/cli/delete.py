"""`shalekv delete`: delete one key."""

from __future__ import annotations

import click

from shalekv.cli.connection import (
    Target,
    durability_option,
    exit_codes_of_calls,
    talk,
    target_options,
)
from shalekv.cli.keys import Encoding, argument_bytes, encoding_options
from shalekv.cli.output import print_line, printing
from shalekv_client import Client, Commit, Durability

_HELP = """Delete KEY, and print the sequence number of the commit.

Deleting a key that has no value succeeds.

\b
Examples:
  shalekv delete greeting
  shalekv delete --hex 00ff
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("key")
@encoding_options
@durability_option
@target_options
def delete(
    *, key: str, encoding: Encoding, durability: Durability, addr: str, timeout_ms: int
) -> None:
    """Delete, and print the sequence number."""
    wanted = argument_bytes(encoding, key, "KEY")

    async def call(client: Client) -> Commit:
        return await client.delete(wanted, durability=durability)

    commit = talk(Target(addr, timeout_ms), call, mutates=True)
    with printing():
        print_line(f"seq {commit.seq}")
