"""Renewal of what protects a backup, for as long as the copying lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shalekv.errors import ManifestConflict, ShaleError, StoreUnavailable
from shalekv.store.cas import CasStore, log_retry

T = TypeVar("T")

RENEWALS_IN_A_LIFE = 3


async def protected(
    store: CasStore,
    renew_once: Callable[[], Awaitable[None]],
    ttl_ms: int,
    work: Callable[[], Awaitable[T]],
) -> T:
    """The result of ``work()``, while ``renew_once()`` is called some times in each `ttl_ms`.

    Raises what both raise, but for errors of a renewal that pass.
    """
    outcome: list[T] = []

    async def run() -> None:
        outcome.append(await work())

    async def renew() -> None:
        failures = 0
        while True:
            await store.runtime.clock.sleep_ms(ttl_ms / RENEWALS_IN_A_LIFE)
            try:
                await renew_once()
                failures = 0
            except (StoreUnavailable, ManifestConflict) as error:
                failures += 1  # the next renewal comes before the end, unless two have failed
                log_retry(failures, error)

    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run())
            renewing = tasks.create_task(renew())
            running.add_done_callback(lambda _: renewing.cancel())
    except BaseExceptionGroup as errors:
        raise _told(errors) from None
    return outcome[0]


def _told(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that tells what went wrong: callers decide by its type."""
    return next((e for e in errors.exceptions if isinstance(e, ShaleError)), errors.exceptions[0])
