"""A cache bounded in bytes, in which nothing is loaded twice at once.

What was used longest ago goes first. The first who misses a key loads it, in its own task; who
comes meanwhile waits for that. If the loader is cancelled, one of those who wait takes over.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Sized(NamedTuple, Generic[V]):
    """An item, and the bytes of memory that it counts for."""

    item: V
    size_bytes: int


# A future of each who waits for a load, told the item; None: the loader has gone, load it yourself.
_Line = dict["asyncio.Future[Sized[V] | None]", None]


class Cache(Generic[K, V]):
    """Items by key, as many as fit."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max` 0: nothing is kept, but nothing is loaded twice at once, either."""
        self._bytes_max = bytes_max
        self._held: OrderedDict[K, Sized[V]] = OrderedDict()  # used longest ago first
        self._lines: dict[K, _Line[V]] = {}  # of each key that is being loaded
        self.held_bytes = 0
        self.hits = 0
        self.misses = 0  # who waits for another's load counts, too
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def find(self, key: K) -> V | None:
        """The item if it is here: a hit. None is not counted: `load` follows, which does."""
        held = self._held.get(key)
        if held is None:
            return None
        self._held.move_to_end(key)
        self.hits += 1
        return held[0]

    def peek(self, key: K) -> V | None:
        """The item if it is here; no use of it, and nothing is counted."""
        held = self._held.get(key)
        return None if held is None else held[0]

    def is_loading(self, key: K) -> bool:
        """Whether somebody loads it now."""
        return key in self._lines

    def keep(self, key: K, item: V, size_bytes: int) -> None:
        """Hold the item, unless it is larger than all there is room for."""
        self.drop(key)
        if size_bytes > self._bytes_max:
            return
        self._held[key] = Sized(item, size_bytes)
        self.held_bytes += size_bytes
        while self.held_bytes > self._bytes_max:
            _, oldest = self._held.popitem(last=False)
            self.held_bytes -= oldest.size_bytes
            self.evictions += 1

    def drop(self, key: K) -> None:
        """Let go of the item, if it is here."""
        held = self._held.pop(key, None)
        if held is not None:
            self.held_bytes -= held.size_bytes

    async def load(self, key: K, fetch: Callable[[], Awaitable[Sized[V]]]) -> V:
        """The item; if it is not here, what `fetch` brings, for all who ask meanwhile.

        What `fetch` raises is raised to all of them, and nothing is kept. A caller that is
        cancelled ends nobody else's wait.
        """
        found = self.find(key)
        if found is not None:
            return found
        self.misses += 1
        line = self._lines.get(key)
        if line is not None:
            told = await self._wait(key, line)
            if told is not None:
                return told.item
        else:
            line = self._lines[key] = {}
        try:
            fetched = await fetch()
        except Exception as error:
            self._end(key, line)
            _fail(line, error)
            raise
        except BaseException:
            self._hand_over(key, line)
            raise
        self._end(key, line)
        self.keep(key, *fetched)
        for waiter in line:
            if not waiter.done():
                waiter.set_result(fetched)
        return fetched.item

    async def _wait(self, key: K, line: _Line[V]) -> Sized[V] | None:
        """What the loader tells; None: the caller is the loader now."""
        waiter: asyncio.Future[Sized[V] | None] = asyncio.get_running_loop().create_future()
        line[waiter] = None
        try:
            return await waiter
        except asyncio.CancelledError:
            line.pop(waiter, None)
            # It may have been made the loader in the moment in which it was cancelled.
            if _is_loader(waiter):
                self._hand_over(key, line)
            raise
        finally:
            del waiter, line  # an error of theirs would hold this frame

    def _hand_over(self, key: K, line: _Line[V]) -> None:
        """The loader has gone: the first of those who still wait becomes it."""
        while line:
            waiter = next(iter(line))
            del line[waiter]
            if not waiter.done():
                waiter.set_result(None)
                return
        self._end(key, line)

    def _end(self, key: K, line: _Line[V]) -> None:
        if self._lines.get(key) is line:
            del self._lines[key]


def _fail(line: _Line[V], error: Exception) -> None:
    """Tell `error` to all who wait, and let go of them: it holds the frame of the loader."""
    for waiter in line:
        if not waiter.done():
            waiter.set_exception(error)
            waiter.exception()  # seen: who has gone before it hears of it misses nothing
    line.clear()


def _is_loader(waiter: asyncio.Future[Sized[V] | None]) -> bool:
    return (
        waiter.done()
        and not waiter.cancelled()
        and waiter.exception() is None
        and waiter.result() is None
    )
