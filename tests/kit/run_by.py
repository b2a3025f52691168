"""Tests that are coroutine functions, run by another loop than that of pytest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeAlias

Main: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
P = ParamSpec("P")


def run_by(
    run: Callable[[Main], None],
) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Decorate a test whose coroutine `run` runs to its end, in virtual time for one."""

    def decorate(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run_test(*args: P.args, **kwargs: P.kwargs) -> None:
            run(lambda: test(*args, **kwargs))

        return run_test

    return decorate
