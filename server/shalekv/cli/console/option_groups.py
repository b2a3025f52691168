"""Several options that make one argument of a command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def gathered(
    argument: str, options: Sequence[str], gather: Callable[..., object]
) -> Callable[[CommandT], CommandT]:
    """A decorator: `gather` gets the values of `options`, the command its result as `argument`.

    `gather` may raise `click.UsageError`, as for options that exclude each other.
    """

    def decorate(command: CommandT) -> CommandT:
        @functools.wraps(command)
        def call(**given: Any) -> Any:
            values = {name: given.pop(name) for name in options}
            return command(**given, **{argument: gather(**values)})

        return cast("CommandT", call)

    return decorate
