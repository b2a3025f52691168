"""One question to a second server when the first one is slow: the first answer counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shalekv_client.errors import ShaleKVError

ReplyT = TypeVar("ReplyT")


async def first_answer(
    first: Coroutine[Any, Any, ReplyT],
    second: Callable[[], Coroutine[Any, Any, ReplyT] | None],
    hedge_s: float,
) -> ReplyT:
    """The result of `first`, or of `second`, which is begun when there is none after `hedge_s`.

    Whoever is not waited for any more is cancelled. Raises the error of the one that failed last
    when both fail; a `first` that fails in time is not hedged. `second` may return None: nobody
    else is there.
    """
    tasks = {asyncio.create_task(first)}
    open_tasks = set(tasks)
    try:
        done, open_tasks = await asyncio.wait(tasks, timeout=hedge_s)
        if not done and (other := second()) is not None:
            open_tasks.add(asyncio.create_task(other))
            tasks |= open_tasks
        while True:
            if not done:
                done, open_tasks = await asyncio.wait(
                    open_tasks, return_when=asyncio.FIRST_COMPLETED
                )
            for task in done:
                if not isinstance(task.exception(), ShaleKVError):
                    return task.result()
            if not open_tasks:
                return next(iter(done)).result()
            done = set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
