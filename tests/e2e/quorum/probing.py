"""One write after the other: what is told when writes are refused, and when they go on."""

from __future__ import annotations

import asyncio
import sys
import time

from shalekv_client import Client, NotApplied, OutcomeUnknown, RetryPolicy
from tests.e2e.history import History
from tests.e2e.load import send

ONE_ATTEMPT = RetryPolicy(attempts_max=1)
WITHIN_S = 60.0
KEY = b"tried"
FULL = ("RESOURCE_EXHAUSTED", "LOG_FULL")


async def until_full(history: History, address: str) -> None:
    """Write until a write is refused because the safekeepers have no room."""
    told: tuple[str, str] | None = None
    try:
        async with asyncio.timeout(WITHIN_S), Client(address, retry=ONE_ATTEMPT) as client:
            while told != FULL:
                told = await _try(history, client)
    except TimeoutError:
        raise AssertionError(f"not refused within {WITHIN_S} s; last told: {told}") from None


async def until_accepted(history: History, address: str) -> None:
    """Write until a write is acknowledged."""
    began_s = time.monotonic()
    async with asyncio.timeout(WITHIN_S), Client(address, retry=ONE_ATTEMPT) as client:
        while await _try(history, client) is not None:
            continue
    sys.stdout.write(f"writes go on after {time.monotonic() - began_s:.2f} s\n")


async def _try(history: History, client: Client) -> tuple[str, str] | None:
    """Write once. None: it was acknowledged; without a reason: nobody knows."""
    attempt = history.begin([KEY])
    try:
        commit = await send(client, attempt)
    except NotApplied as error:
        history.refused(attempt, error.reason)
        return error.code, error.reason
    except OutcomeUnknown as error:
        history.lost_sight(attempt, error.reason or error.code)
        return error.code, ""
    history.acknowledged(attempt, commit)
    return None
