"""Deadlines of many calls with one timer: they are kept in slots of 20 ms."""

from __future__ import annotations

import asyncio
import time
from typing import Generic, Protocol, TypeVar

DEADLINE_SLOT_S = 0.02  # deadlines are noticed at most twice as late


class Expiring(Protocol):
    """A call with a deadline."""

    deadline_s: float | None

    def expire(self) -> None:
        """End the call: its deadline has passed."""
        ...


ExpiringT = TypeVar("ExpiringT", bound=Expiring)


class Deadlines(Generic[ExpiringT]):
    """The calls that wait for something, by their deadlines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use one timer of `loop`, while there are deadlines."""
        self._loop = loop
        self._slots: dict[int, dict[int, ExpiringT]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: ExpiringT) -> None:
        """Expire `call` at its deadline."""
        assert call.deadline_s is not None
        slot = int(call.deadline_s / DEADLINE_SLOT_S) + 1
        self._slots.setdefault(slot, {})[id(call)] = call
        if self._timer is None:
            self._timer = self._loop.call_later(DEADLINE_SLOT_S, self._tick)

    def discard(self, call: ExpiringT) -> None:
        """Undo `add`, if it was called."""
        assert call.deadline_s is not None
        number = int(call.deadline_s / DEADLINE_SLOT_S) + 1
        slot = self._slots.get(number)
        if slot is not None and slot.pop(id(call), None) is not None and not slot:
            del self._slots[number]

    def close(self) -> None:
        """Forget all calls."""
        self._slots.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        now = int(time.monotonic() / DEADLINE_SLOT_S)
        self._timer = None
        for number in [number for number in self._slots if number <= now]:
            for call in [*self._slots.pop(number).values()]:
                call.expire()
        if self._slots and self._timer is None:
            self._timer = self._loop.call_later(DEADLINE_SLOT_S, self._tick)
