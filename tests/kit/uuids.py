"""Ids of clients."""

from __future__ import annotations

import secrets
import time


def new_uuid7(*, age_ms: int = 0) -> bytes:
    """Return a UUID of version 7 (RFC 9562) made `age_ms` ago."""
    made_ms = time.time_ns() // 1_000_000 - age_ms
    with_time = made_ms << 80 | secrets.randbits(80)
    with_version = with_time & ~(0xF << 76) | 0x7 << 76
    return (with_version & ~(0x3 << 62) | 0x2 << 62).to_bytes(16, "big")
