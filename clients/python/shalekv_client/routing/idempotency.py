"""Idempotency keys, by which a server recognizes a write that is repeated."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_RANDOM_BYTES = 8
_RANDOM_MASK = (1 << 62) - 1
_FIXED_BITS = (0b0111 << 76) | (0b10 << 62)
_TICKS_PER_MS = 4096
_NS_PER_MS = 1_000_000


class IdempotencyKeys:
    """Makes idempotency keys.

    A key is a UUID of version 7, 16 bytes, and greater than the key before it:

        48 bits  milliseconds since the Unix epoch
         4 bits  0111, the version
        12 bits  the rest of the time, in 1/4096 of a millisecond
         2 bits  10, the variant
        62 bits  random

    The server refuses a key whose time is before its window, since it may have forgotten it.
    """

    def __init__(
        self,
        now_ns: Callable[[], int] = time.time_ns,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Create a source of keys. `now_ns` is the time since the Unix epoch.

        Randomness comes from the operating system by default: two processes that are forked from
        one must not make the same keys.
        """
        self._now_ns = now_ns
        self._random_bytes = random_bytes
        self._last_ticks = 0

    def next(self) -> bytes:
        """Return a new key."""
        ticks = self._now_ns() * _TICKS_PER_MS // _NS_PER_MS
        self._last_ticks = ticks = max(ticks, self._last_ticks + 1)
        moment, rest = divmod(ticks, _TICKS_PER_MS)
        chance = int.from_bytes(self._random_bytes(_RANDOM_BYTES), "big") & _RANDOM_MASK
        return (moment << 80 | rest << 64 | _FIXED_BITS | chance).to_bytes(16, "big")
