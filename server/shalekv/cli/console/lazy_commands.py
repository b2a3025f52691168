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

SIMILAR_MAX = 2  # names that are suggested in place of a misspelt one


class LazyCommands(click.Group):
    """A group that imports a command when it is called, not when it is listed."""

    def __init__(
        self,
        *args: Any,
        table: CommandTable,
        words: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        """`table` suffices to list the commands without importing them.

        `words` and `options` are those of similar products, and what is typed here instead.
        """
        super().__init__(*args, **kwargs)
        self._table = table
        self._words = words or {}
        self._options = options or {}

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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` name. Raises `UsageError` with suggestions."""
        name = args[0]
        if name in self._table or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        meant = [self._words[name]] if name in self._words else self._similar(name)
        commands = " or ".join(f"`{ctx.command_path} {each}`" for each in meant)
        hint = f" Did you mean {commands}?" if meant else ""
        raise click.UsageError(f"No such command '{name}'.{hint}", ctx)

    def _similar(self, name: str) -> list[str]:
        import difflib  # noqa: PLC0415 - slow

        return difflib.get_close_matches(name, self._table, n=SIMILAR_MAX)

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

            name = error.option_name
            advice = retirement(name, flag_of)
            if advice:
                raise click.UsageError(f"{name} {advice}", error.ctx) from None
            if name[1:2].isdigit():  # of a negative number, the first digit
                message = f"No such option '{name}'. Write -- before arguments that begin with -"
                raise click.UsageError(message, error.ctx) from None
            meant = self._options.get(name, "")
            if error.ctx is None or meant.split(" ")[0] not in _names(error.ctx.command):
                raise
            message = f"No such option '{name}'. Did you mean {meant}?"
            raise click.UsageError(message, error.ctx) from None
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


def _names(command: click.Command) -> set[str]:
    """The options of a command."""
    return {name for parameter in command.params for name in parameter.opts}
