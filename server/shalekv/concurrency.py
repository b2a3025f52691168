"""Calls that wait: each has a future of its own, so that one that is cancelled ends no other."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

from shalekv.errors import ShaleError

Waiter: TypeAlias = asyncio.Future[None]


def new_waiter() -> Waiter:
    """A waiter for the call that runs now."""
    return asyncio.get_running_loop().create_future()


def tell(waiter: Waiter, error: ShaleError | None = None) -> None:
    """End the wait, with `error` if there is one, unless the caller has gone already."""
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        fail(waiter, error)


def fail(future: asyncio.Future[Any], error: ShaleError) -> None:
    """Set the error of a future whose caller may be cancelled before it hears of it."""
    future.set_exception(error)
    future.exception()  # marks it as seen: what a caller that has gone did not hear is no news
