"""`shalekv admin`: rare tasks of operators."""

from __future__ import annotations

from types import MappingProxyType

import click

from shalekv.cli.console.lazy_commands import CommandTable, LazyCommands

_HELP = """Print what a server costs, its slow calls, and where it spends its time; complete crashed
creates; repair a database after a wrong clock.

\b
Examples:
  shalekv admin stats --addr 10.0.0.5:7654
  shalekv admin slow --addr 10.0.0.5:7654
  shalekv admin profile --seconds 30 --output profile.html
  shalekv admin recover --url s3://bucket/folder --cas two_phase
  shalekv admin repair-time --url s3://bucket/folder
  shalekv admin leases list --url s3://bucket/folder
"""

# `stats`, `slow` and `profile` talk to a server, and need only the packages of the client.
MEMBERS: CommandTable = MappingProxyType(
    {
        "stats": (
            "shalekv.cli.commands.admin_stats:stats",
            "Print requests per minute and their cost.",
        ),
        "slow": ("shalekv.cli.commands.admin_slow:slow", "List calls that took long."),
        "profile": (
            "shalekv.cli.commands.admin_profile:profile",
            "Print where a server spends its time.",
        ),
        "recover": (
            "shalekv.cli.commands.admin_recover:recover",
            "Complete creates that have crashed.",
        ),
        "repair-time": (
            "shalekv.cli.commands.admin_repair_time:repair_time_",
            "Set logical time back after a wrong clock.",
        ),
        "leases": ("shalekv.cli.commands.admin_leases:leases", "List and remove leases."),
    }
)


@click.group(cls=LazyCommands, table=MEMBERS, help=_HELP)
def admin() -> None:
    """Hold the commands for operators."""
