"""Whether the database is still ours: polled when idle, confirmed on demand.

One task asks the store; reads that must be linearizable wait for an answer to a question that was
sent after they arrived, and share it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from shalekv.concurrency import SingleFlight
from shalekv.errors import ShaleError, Stopping, StoreError
from shalekv.store.manifests import FencedManifest

log = structlog.get_logger()

STEP_MS = 200  # what waits for longer notices meanwhile that it should have looked sooner


class Ownership:
    """Watches the manifest for another writer."""

    def __init__(
        self,
        manifest: FencedManifest,
        *,
        poll_ms: Callable[[], int],
        on_seen: Callable[[], None] = lambda: None,
    ) -> None:
        """Look every `poll_ms` milliseconds, and whenever somebody asks.

        `on_seen` is called after each look that found the database to be ours.
        """
        self._manifest = manifest
        self._poll_ms = poll_ms
        self._on_seen = on_seen
        self._looks = SingleFlight()

    async def run(self) -> ShaleError:
        """Look until the database is no longer ours, or is damaged: the error that tells.

        A store that does not answer is told to those who wait, and asked again at the next look.
        """
        ended: ShaleError = Stopping("this writer is shutting down")
        try:
            while True:
                await self._wait_for_turn()
                self._looks.begin()
                try:
                    await self._manifest.refresh()
                except StoreError as error:
                    log.warning("could not look for another writer", error=str(error))
                    self._looks.answer(error)
                except ShaleError as error:
                    ended = error
                    return error
                else:
                    self._looks.answer()
                    self._on_seen()
        finally:
            self.end(ended)

    def end(self, error: ShaleError) -> None:
        """Tell `error` to those who wait, and to those who come, unless another one was told.

        REQUIRES: `run` has returned, or never began.
        """
        self._looks.end(error)

    async def confirm(self) -> None:
        """Return when the store has said, asked after this call, that the database is ours.

        Raises `Fenced`, and `StoreUnavailable` when the store does not say.
        """
        await self._looks.next()

    async def _wait_for_turn(self) -> None:
        self._looks.asked.clear()
        if self._looks.is_wanted:
            return
        left_ms = self._poll_ms()
        while left_ms > 0:
            step_ms = min(left_ms, STEP_MS)
            try:
                async with asyncio.timeout(step_ms / 1000):
                    await self._looks.asked.wait()
            except TimeoutError:
                left_ms = min(left_ms - step_ms, self._poll_ms())
            else:
                return
