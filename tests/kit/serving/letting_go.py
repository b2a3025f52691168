"""Writers that read new levels when they are told to, and let go of what these hold."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.kit.serving.roles import Serving

HOUR_MS = 3_600_000
NEVER_POLLED: dict[str, Any] = {"fence_poll_ms": HOUR_MS, "queue_wait_ms": 30_000}


async def follow(writer: Serving) -> None:
    """The writer reads the levels of the newest manifest."""
    before = writer.engine.levels.current
    await writer.engine.ownership.confirm()
    while writer.engine.levels.current is before:  # noqa: ASYNC110 - it is seen from outside alone
        await asyncio.sleep(0)


async def forgotten(writer: Serving) -> None:
    memtable = writer.engine.memtable
    while memtable.key_count or memtable.size_bytes:  # noqa: ASYNC110 - it is seen from outside alone
        await asyncio.sleep(0)
