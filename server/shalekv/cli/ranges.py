"""The options that name a range of keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import click

from shalekv.cli.console.keys import Encoding, argument_bytes
from shalekv.cli.console.option_groups import gathered

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class RangeArguments(TypedDict):
    """The arguments of the client that say which keys."""

    start: bytes
    end: bytes
    prefix: bytes


@dataclass(frozen=True, slots=True)
class RangeWords:
    """A range as it was typed; an end that was left out is empty."""

    start: str
    end: str
    prefix: str

    @property
    def is_given(self) -> bool:
        """Whether it is anything but all keys."""
        return bool(self.start or self.end or self.prefix)

    def decoded(self, encoding: Encoding) -> RangeArguments:
        """The arguments of the calls of the client."""
        return {
            "start": argument_bytes(encoding, self.start, "--start"),
            "end": argument_bytes(encoding, self.end, "--end"),
            "prefix": argument_bytes(encoding, self.prefix, "--prefix"),
        }


def range_options(command: CommandT) -> CommandT:
    """A decorator that adds --start, --end and --prefix, as the argument `key_range`."""
    command = gathered("key_range", ("start", "end", "prefix"), _range)(command)
    texts = {
        "prefix": "The keys that begin with this.",
        "end": "The first key that is left out.",
        "start": "The first key.",
    }
    for name, text in texts.items():
        command = click.option(f"--{name}", metavar="KEY", default="", help=text)(command)
    return command


def _range(*, start: str, end: str, prefix: str) -> RangeWords:
    if prefix and (start or end):
        raise click.UsageError("--prefix excludes --start and --end")
    return RangeWords(start, end, prefix)
