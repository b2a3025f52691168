"""Some workers that share one list of work, and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def in_parallel(work: Callable[[], Awaitable[None]], count: int) -> None:
    """Run `work` so many times at once. The first error of one ends all, and is raised itself."""
    if count <= 1:
        if count:
            await work()
        return

    async def run() -> None:
        await work()

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(run())
    except BaseExceptionGroup as errors:
        # Of several, all say that reading failed: callers decide by the type of one.
        raise errors.exceptions[0] from None
