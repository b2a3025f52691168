"""Turns: who waits together goes on in the order in which they came."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shalekv.concurrency import Waiter, new_waiter, tell


class Turns:
    """A line in which everybody waits for those before to leave it."""

    def __init__(self) -> None:
        """An empty line."""
        self._line: dict[Waiter, None] = {}  # in the order of arrival; the first has been told

    def __bool__(self) -> bool:
        return bool(self._line)

    @contextmanager
    def take(self) -> Iterator[Waiter]:
        """Stand in line; what comes out is done when all who came before have left."""
        turn = new_waiter()
        if not self._line:
            tell(turn)
        self._line[turn] = None
        try:
            yield turn
        finally:
            del self._line[turn]
            for first in self._line:
                tell(first)
                break
