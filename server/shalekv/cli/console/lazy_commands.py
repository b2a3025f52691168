"""A group of commands that imports one when it is called, so that every command starts fast."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import click
from click.shell_completion import CompletionItem

from shalekv.cli.console.exit_codes import ExitCode

# name -> where the command is, and what a list of commands says of it
CommandTable: TypeAlias = Mapping[str, tuple[str, str]]


class LazyCommands(click.Group):
    """A group that imports a command when it is called, not when it is listed."""

    def __init__(self, *args: Any, table: CommandTable, **kwargs: Any) -> None:
        """`table` has all that a list of the commands needs."""
        super().__init__(*args, **kwargs)
        self._table = table

    def list_commands(self, _context: click.Context) -> list[str]:
        """Their names, in the order of the table."""
        return list(self._table)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        """The command called `name`.

        A process may begin with its garbage collector disabled: it is enabled when the command is
        imported. What imports make stays, so that the collector need not look at it ever.
        """
        if name not in self._table:
            return None
        module, _, attribute = self._table[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        return command

    def members(self) -> Iterator[tuple[str, click.Command]]:
        """Every command with its name, imported."""
        for name in self._table:
            command = self.get_command(click.Context(self), name)
            if command is not None:
                yield name, command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; one that does not say more about Ctrl-C ends with its exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            raise SystemExit(ExitCode.INTERRUPTED) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names that begin with `incomplete`, from the table alone; else the options."""
        found = [
            CompletionItem(name, help=summary)
            for name, (_, summary) in self._table.items()
            if name.startswith(incomplete)
        ]
        return found or click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, _context: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self._table.items()])
