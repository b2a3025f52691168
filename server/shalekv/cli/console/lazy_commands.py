"""Command group that imports each command on first use, so that every command starts fast."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import click
from click.shell_completion import CompletionItem

from shalekv.cli.console.exit_codes import ExitCode

CommandTable: TypeAlias = Mapping[str, tuple[str, str]]
"""Name of a command -> ("module:attribute", one line for the list of commands)."""


class LazyCommands(click.Group):
    """A group that imports a command when it is called, not when it is listed."""

    def __init__(self, *args: Any, table: CommandTable, **kwargs: Any) -> None:
        """`table` suffices to list the commands without importing them."""
        super().__init__(*args, **kwargs)
        self._table = table

    def list_commands(self, _context: click.Context) -> list[str]:
        """The names of the commands, in the order of the table."""
        return list(self._table)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        """Import and return the command called `name`; None when there is none.

        A process may begin with its garbage collector disabled: it is enabled once the command is
        imported. The objects of the imports live as long as the process, so they are frozen: the
        collector skips them.
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
        """Import every command, and yield it with its name."""
        for name in self._table:
            command = self.get_command(click.Context(self), name)
            if command is not None:
                yield name, command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; exit with `INTERRUPTED` if it does not handle Ctrl-C itself.

        Raises `UsageError` that says what became of a retired setting whose flag is given.
        """
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            from shalekv.cli.console.settings_flags import flag_of  # noqa: PLC0415 - slow
            from shalekv.settings.retired import retirement  # noqa: PLC0415 - slow

            advice = retirement(error.option_name, flag_of)
            if not advice:
                raise
            raise click.UsageError(f"{error.option_name} {advice}", error.ctx) from None
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            raise SystemExit(ExitCode.INTERRUPTED) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The command names that begin with `incomplete`, else the options; imports nothing."""
        found = [
            CompletionItem(name, help=summary)
            for name, (_, summary) in self._table.items()
            if name.startswith(incomplete)
        ]
        return found or click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, _context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self._table.items()])
