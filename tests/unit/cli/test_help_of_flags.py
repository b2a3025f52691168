"""The help of flags, in each command that shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import click
import pytest

from shalekv.cli.console.lazy_commands import LazyCommands
from shalekv.cli.main import COMMANDS, shalekv

_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*(?![\w-])(?! of (?:the )?servers)")


def members_of(command: click.Command) -> Iterable[tuple[str, click.Command]]:
    if isinstance(command, LazyCommands):
        return command.members()
    return command.commands.items() if isinstance(command, click.Group) else ()


def all_commands(name: str) -> Iterator[tuple[str, click.Command]]:
    """A command and those that belong to it, by their names."""
    command = shalekv.get_command(click.Context(shalekv), name)
    assert command is not None
    waiting = [(name, command)]
    while waiting:
        found, each = waiting.pop()
        yield found, each
        waiting += [(f"{found} {member}", below) for member, below in members_of(each)]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_flags_that_the_command_has(name: str) -> None:
    """The help of a flag sends nobody to a flag that is not there, but to those of servers."""
    for found, command in all_commands(name):
        options = [each for each in command.params if isinstance(each, click.Option)]
        shown = [each for each in options if not each.hidden]
        flags = {flag for each in shown for flag in (*each.opts, *each.secondary_opts)}
        for each in shown:
            unknown = {*_FLAG.findall(each.help or "")} - flags
            assert not unknown, f"{found}: the help of {each.opts[0]} names {unknown}"
