"""A cache bounded in bytes, in which concurrent loads of one key are done once (single flight).

The least recently used item is evicted first. The first caller that misses a key loads it, in its
own task; callers that come meanwhile wait for the result. If the loader is cancelled, one of the
waiting callers takes over. What the loader asks of the store is recorded for all that wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Token
from typing import Generic, NamedTuple, TypeVar

from shalekv.telemetry.activity import CURRENT, Activity, SharedActivity

K = TypeVar("K")
V = TypeVar("V")


class Sized(NamedTuple, Generic[V]):
    """An item, and the bytes of memory that it counts for."""

    item: V
    size_bytes: int


# One future for each waiting caller; its result is the item, or None: load it yourself. With what
# is recorded for that caller.
_Waiters = dict["asyncio.Future[Sized[V] | None]", Activity | None]


class _Load(Generic[V]):
    """The load of one key, and who waits for it."""

    __slots__ = ("activity", "waiters")

    def __init__(self) -> None:
        self.waiters: _Waiters[V] = {}
        self.activity = SharedActivity(None)

    def begin(self) -> Token[Activity | None]:
        """Record from now on, for all that wait, what this task does."""
        self.activity = SharedActivity(CURRENT.get())
        for activity in self.waiters.values():
            self.activity.join(activity)
        return CURRENT.set(self.activity)


class Cache(Generic[K, V]):
    """Items by key, bounded by the sum of their sizes, least recently used evicted first."""

    def __init__(self, bytes_max: int) -> None:
        """Hold at most `bytes_max` bytes. 0: nothing is kept, but loads are still shared."""
        self._bytes_max = bytes_max
        self._held: OrderedDict[K, Sized[V]] = OrderedDict()  # least recently used first
        # Items that the owner looks up often. It puts in what it has found, and counts its hits. As
        # all are dropped when an item is removed, each is marked as used again soon after that.
        self.often: dict[K, V] = {}
        self._loading: dict[K, _Load[V]] = {}
        self.held_bytes = 0
        self.hits = 0
        self.misses = 0  # waiting for another's load counts, too
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def find(self, key: K) -> V | None:
        """Return the item if it is here, and count a hit.

        A miss is not counted: `load`, which follows, counts it.
        """
        held = self._held.get(key)
        if held is None:
            return None
        self._held.move_to_end(key)
        self.hits += 1
        return held[0]

    def peek(self, key: K) -> V | None:
        """Return the item if it is here, without counting it or marking it as used."""
        held = self._held.get(key)
        return None if held is None else held[0]

    def is_loading(self, key: K) -> bool:
        """Return whether the key is being loaded now."""
        return key in self._loading

    def keep(self, key: K, item: V, size_bytes: int) -> None:
        """Hold the item, unless it is larger than the whole cache."""
        self.drop(key)
        if size_bytes > self._bytes_max:
            return
        self._held[key] = Sized(item, size_bytes)
        self.held_bytes += size_bytes
        while self.held_bytes > self._bytes_max:
            self.often.clear()
            _, oldest = self._held.popitem(last=False)
            self.held_bytes -= oldest.size_bytes
            self.evictions += 1

    def drop(self, key: K) -> None:
        """Remove the item, if it is here."""
        held = self._held.pop(key, None)
        if held is not None:
            self.often.clear()
            self.held_bytes -= held.size_bytes

    async def load(self, key: K, fetch: Callable[[], Awaitable[Sized[V]]]) -> V:
        """Return the item; if it is not here, load it with `fetch`, once for all callers.

        An error of `fetch` is raised to all of them, and nothing is kept. The cancellation of one
        caller does not end the wait of another.
        """
        found = self.find(key)
        if found is not None:
            return found
        self.misses += 1
        load = self._loading.get(key)
        if load is not None:
            given = await self._wait(key, load)
            if given is not None:
                return given.item
        else:
            load = self._loading[key] = _Load()
        token = load.begin()
        try:
            fetched = await fetch()
        except Exception as error:
            self._end(key, load)
            _fail(load.waiters, error)
            raise
        except BaseException:
            self._hand_over(key, load)
            raise
        finally:
            with suppress(ValueError):  # whoever closes a load that was left has another context
                CURRENT.reset(token)
        self._end(key, load)
        self.keep(key, *fetched)
        for waiter in load.waiters:
            if not waiter.done():
                waiter.set_result(fetched)
        return fetched.item

    async def _wait(self, key: K, load: _Load[V]) -> Sized[V] | None:
        """Return the item from the loader; None: the caller is the loader now."""
        waiter: asyncio.Future[Sized[V] | None] = asyncio.get_running_loop().create_future()
        load.waiters[waiter] = activity = CURRENT.get()
        load.activity.join(activity)
        try:
            return await waiter
        except asyncio.CancelledError:
            load.waiters.pop(waiter, None)
            # It may have been made the loader at the moment in which it was cancelled.
            if _is_loader(waiter):
                self._hand_over(key, load)
            raise
        finally:
            del waiter, load  # its error would hold this frame

    def _hand_over(self, key: K, load: _Load[V]) -> None:
        """Make the first caller that still waits the loader."""
        while load.waiters:
            waiter = next(iter(load.waiters))
            del load.waiters[waiter]
            if not waiter.done():
                waiter.set_result(None)
                return
        self._end(key, load)

    def _end(self, key: K, load: _Load[V]) -> None:
        """Note that the key is not being loaded any more."""
        if self._loading.get(key) is load:
            del self._loading[key]


def _fail(waiters: _Waiters[V], error: Exception) -> None:
    """Raise `error` to all waiting callers, and forget them.

    The traceback of `error` holds the frame of the loader, and so `waiters`, which hold `error`.
    """
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(error)
            waiter.exception()  # mark it as retrieved: a caller may have been cancelled before it
    waiters.clear()


def _is_loader(waiter: asyncio.Future[Sized[V] | None]) -> bool:
    """Return whether the caller that waited has become the loader."""
    return (
        waiter.done()
        and not waiter.cancelled()
        and waiter.exception() is None
        and waiter.result() is None
    )
