"""A store as manifest and log use it: reads that are repeated, and claims that are resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import structlog

from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import (
    NO_METADATA,
    IsCollected,
    ObjectStore,
    Recovered,
    nothing_is_collected,
)
from shalekv.store.claim import ClaimOutcome, claim
from shalekv.store.retry import Backoff, RetryingStore, RetryListener

log = structlog.get_logger()


class CasStore:
    """One database's store with the runtime and the settings for requests to it."""

    def __init__(self, store: ObjectStore, runtime: Runtime, settings: StoreSettings) -> None:
        """`store` is asked once per attempt; `reads` repeats."""
        self.runtime = runtime
        self.settings = settings
        self.backoff = Backoff(settings.retry_initial_ms, settings.retry_max_ms)
        self.url = store.url
        self.cas_mode = store.cas_mode
        self.sent = store.sent
        retrying = RetryingStore(
            store,
            runtime,
            attempts=settings.read_attempts,
            backoff=self.backoff,
            listener=log_retry,
        )
        self.reads: ObjectStore = retrying
        self.refusals = retrying.refusals
        self._store = store

    async def claim(
        self,
        name: str,
        data: bytes,
        metadata: Mapping[str, str] = NO_METADATA,
        *,
        is_patient: bool = False,
        listener: RetryListener | None = None,
    ) -> ClaimOutcome:
        """Create `name` unless a rival has, to its end: see `shalekv.store.claim.claim`.

        A refusal is repeated as `refusals` says; if `is_patient`, until somebody has mended its
        cause. `listener` hears of failed attempts, which are logged in any case.
        """

        def failed(failed_attempts: int, error: BaseException) -> None:
            log_retry(failed_attempts, error)
            if listener is not None:
                listener(failed_attempts, error)

        outcome = await claim(
            self._store,
            name,
            data,
            runtime=self.runtime,
            metadata=metadata,
            backoff=self.backoff,
            listener=failed,
            may_pass=(lambda _: True) if is_patient else self.refusals.begin(),
        )
        self.refusals.accepted()
        return outcome

    async def recover(self, is_collected: IsCollected = nothing_is_collected) -> Recovered:
        """Complete what crashed creates have left: see `ObjectStore.recover`."""
        recovered = await self.reads.recover(is_collected)
        if recovered != Recovered():
            log.info("creates recovered", url=self.url, **asdict(recovered))
        return recovered

    async def pause(self, failed_attempts: int) -> None:
        """Wait before a conflict is met again; `failed_attempts` is at least 1."""
        wait_ms = self.backoff.wait_ms(failed_attempts, self.runtime.random)
        await self.runtime.clock.sleep_ms(wait_ms)


def log_retry(failed_attempts: int, error: BaseException) -> None:
    """The listener that says in the log what is repeated, and why; less often as it goes on."""
    if failed_attempts & (failed_attempts - 1):  # no power of two
        return
    log.warning("store request repeated", failed_attempts=failed_attempts, error=str(error))
