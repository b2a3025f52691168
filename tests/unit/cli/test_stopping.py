"""Signals that ask to stop."""

from __future__ import annotations

import asyncio
import os
import signal

from shalekv.cli.stopping import StopRequest


async def test_what_may_be_interrupted_is_cancelled() -> None:
    """An opening that waits for a store ends at once, quietly, and the task goes on."""
    with StopRequest() as stop:
        with stop.interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        assert stop.asked.is_set()
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


async def test_a_cancellation_by_others_is_not_swallowed() -> None:
    """Only the signal is answered for."""

    async def open_for_ever(stop: StopRequest, opening: asyncio.Event) -> None:
        with stop.interrupts():
            opening.set()
            await asyncio.Event().wait()

    with StopRequest() as stop:
        opening = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(open_for_ever(stop, opening))
            await opening.wait()
            task.cancel()
    assert task.cancelled()
    assert not stop.asked.is_set()
