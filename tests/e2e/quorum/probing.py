"""One write after the other: what is told when writes are refused, and when they go on."""

from __future__ import annotations

import asyncio
import sys
import time

from shalekv_client import Client, NotApplied, OutcomeUnknown, RetryPolicy
from tests.kit.processes.history import History
from tests.kit.processes.load import TIMEOUT_MS, send

ONE_ATTEMPT = RetryPolicy(attempts_max=1)
WITHIN_S = 200.0
# The first write that finds no room is held until nobody waits for it; a later one is refused.
ASK_AGAIN_MS = 2_000
KEY = b"tried"
FULL = ("RESOURCE_EXHAUSTED", "LOG_FULL")


async def until_full(history: History, address: str) -> None:
    """Write until a write is refused because the safekeepers have no room."""
    told: tuple[str, str] | None = None
    try:
        async with asyncio.timeout(WITHIN_S), _client(address, ASK_AGAIN_MS) as client:
            while told != FULL:
                told = await _try(history, client)
    except TimeoutError:
        raise AssertionError(f"not refused within {WITHIN_S} s; last told: {told}") from None


async def until_accepted(history: History, address: str) -> None:
    """Write until a write is acknowledged."""
    began_s = time.monotonic()
    async with asyncio.timeout(WITHIN_S), _client(address, TIMEOUT_MS) as client:
        while await _try(history, client) is not None:
            continue
    sys.stdout.write(f"writes go on after {time.monotonic() - began_s:.2f} s\n")


def _client(address: str, timeout_ms: int) -> Client:
    return Client(address, timeout_ms=timeout_ms, retry=ONE_ATTEMPT)


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
