"""Idempotency keys are UUIDs of version 7 that sort by the time they were made."""

from __future__ import annotations

import time
import uuid

from shalekv_client import IdempotencyKeys

NOW_NS = 1_790_000_000_123_456_789


def test_keys_are_uuids_of_version_7() -> None:
    """A key has version, variant and, in milliseconds, the time at which it was made."""
    before_ms = time.time_ns() // 1_000_000
    key = uuid.UUID(bytes=IdempotencyKeys().next())
    assert (key.version, key.variant) == (7, uuid.RFC_4122)
    assert before_ms <= key.int >> 80 <= time.time_ns() // 1_000_000


def test_layout() -> None:
    """Milliseconds, version, rest of the time, variant and randomness stand where they belong."""
    keys = IdempotencyKeys(lambda: NOW_NS, lambda count: b"\xff" * count)
    key = int.from_bytes(keys.next(), "big")
    assert key >> 80 == NOW_NS // 1_000_000
    assert (key >> 64) & 0xFFF == 456_789 * 4096 // 1_000_000
    assert key & (1 << 64) - 1 == 0b10 << 62 | (1 << 62) - 1


def test_each_key_is_greater_than_the_one_before() -> None:
    """Keys rise even when the clock stands still or goes back."""
    times = iter([NOW_NS, NOW_NS, NOW_NS - 10**9, NOW_NS + 1_000_000])
    keys = IdempotencyKeys(lambda: next(times), bytes)
    made = [keys.next() for _ in range(4)]
    assert made == sorted(set(made))


def test_two_makers_do_not_make_the_same_key() -> None:
    """Keys made at the same moment differ by their randomness."""
    made = {IdempotencyKeys(lambda: NOW_NS).next() for _ in range(100)}
    assert len(made) == 100
