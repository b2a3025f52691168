"""Options that are combined into one argument of a command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def grouped_options(
    argument: str, options: Sequence[str], combine: Callable[..., object]
) -> Callable[[CommandT], CommandT]:
    """A decorator that replaces `options` by one `argument`: the result of `combine` for them.

    `combine` takes the values of `options` by name, and may raise `click.UsageError`, for example
    for options that exclude each other.
    """

    def decorate(command: CommandT) -> CommandT:
        @functools.wraps(command)
        def call(**given: Any) -> Any:
            values = {name: given.pop(name) for name in options}
            return command(**given, **{argument: combine(**values)})

        return cast("CommandT", call)

    return decorate
