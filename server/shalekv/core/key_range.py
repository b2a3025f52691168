"""Intervals of keys."""

from __future__ import annotations

from typing import NamedTuple

KEY_BYTES_MAX = 64 * 1024  # part of the API, not a setting
END_OF_KEYS = b"\xff" * (KEY_BYTES_MAX + 1)  # above every key: a bound where there is none


class KeyRange(NamedTuple):
    """Keys from `start` on and before `end`; an empty `end` is no bound."""

    start: bytes
    end: bytes

    @property
    def is_empty(self) -> bool:
        """Whether no key can be in it."""
        return bool(self.end) and self.start >= self.end


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all keys that begin with `prefix`; empty: there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b""


def coalesced(ranges: list[KeyRange]) -> list[KeyRange]:
    """The same keys in the fewest ranges, in order."""
    merged: list[KeyRange] = []
    for start, end in sorted(ranges):
        if merged and (not merged[-1].end or start <= merged[-1].end):
            last = merged[-1]
            if last.end and (not end or end > last.end):
                merged[-1] = KeyRange(last.start, end)
        else:
            merged.append(KeyRange(start, end))
    return merged
