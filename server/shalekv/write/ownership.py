"""Ownership of the database: polled in the background, confirmed on demand.

One task asks the store. Linearizable reads wait for an answer to a request that was sent after they
arrived, and share it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from shalekv.concurrency import SingleFlight
from shalekv.errors import ShaleError, Stopping, StoreError
from shalekv.store.manifests import FencedManifest

log = structlog.get_logger()

STEP_MS = 200  # a longer wait checks so often whether the poll interval has become shorter


class Ownership:
    """Watches the manifest for another writer."""

    def __init__(
        self,
        manifest: FencedManifest,
        *,
        poll_ms: Callable[[], int],
        on_seen: Callable[[], None] = lambda: None,
    ) -> None:
        """Poll every `poll_ms` milliseconds, and on demand.

        `on_seen` is called after each poll that found no other writer.
        """
        self._manifest = manifest
        self._poll_ms = poll_ms
        self._on_seen = on_seen
        self._polls = SingleFlight()

    async def run(self) -> ShaleError:
        """Poll until another writer has taken over, or the manifest is damaged; returns that error.

        When the store does not answer, waiting calls get its error, and polling continues.
        """
        ended: ShaleError = Stopping("this writer is shutting down")
        try:
            while True:
                await self._wait_until_due()
                self._polls.begin()
                try:
                    await self._manifest.refresh()
                except StoreError as error:
                    log.warning("could not look for another writer", error=str(error))
                    self._polls.answer(error)
                except ShaleError as error:
                    ended = error
                    return error
                else:
                    self._polls.answer()
                    self._on_seen()
        finally:
            self.end(ended)

    def end(self, error: ShaleError) -> None:
        """Fail waiting and later calls with `error`, unless they were failed with another one
        before.

        REQUIRES: `run` has returned, or never began.
        """
        self._polls.end(error)

    async def confirm(self) -> None:
        """Confirm, by a request that is sent after this call, that no other writer has taken over.

        Raises `Fenced`, and `StoreUnavailable` when the store does not answer.
        """
        await self._polls.next()

    async def _wait_until_due(self) -> None:
        self._polls.asked.clear()
        if self._polls.is_wanted:
            return
        left_ms = self._poll_ms()
        while left_ms > 0:
            step_ms = min(left_ms, STEP_MS)
            try:
                async with asyncio.timeout(step_ms / 1000):
                    await self._polls.asked.wait()
            except TimeoutError:
                left_ms = min(left_ms - step_ms, self._poll_ms())
            else:
                return
