"""A lease that is held: renewed in time, and given up in time when it cannot be.

    held ---- renewed every third of the TTL ----> held
     |
     +------ somebody else has it ----------------> lost
     +------ not renewed for HOLD_SHARE of it ----> lost, before anybody else may take it

How it is renewed and released is the affair of a `RenewableLease`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from shalekv.clock import Clock
from shalekv.core.leasing import lapses_ms, renew_wait_ms
from shalekv.server.election.elector import RenewableLease


class Tenure:
    """A `Term` that rests on a lease."""

    def __init__(
        self, lease: RenewableLease, clock: Clock, *, ttl_ms: int, acquired_ms: float
    ) -> None:
        """`acquired_ms` is when the request was *sent* that has acquired the lease."""
        self._lease = lease
        self._clock = clock
        self._ttl_ms = ttl_ms
        self._renewed_ms = acquired_ms
        self._is_lost = False

    async def keep(self) -> str:
        """As `Term.keep`."""
        async with asyncio.TaskGroup() as tasks:
            ways = (tasks.create_task(self._renew()), tasks.create_task(self._lapse()))
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for each in ways:
                each.cancel()
        self._is_lost = True
        return "; ".join(each.result() for each in ways if each in done)

    async def resign(self) -> None:
        """As `Term.resign`; takes no longer than the lease would have lasted."""
        if self._is_lost:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._ttl_ms / 1_000):
                await self._lease.release()

    async def _renew(self) -> str:
        while True:
            await self._clock.sleep_ms(renew_wait_ms(self._ttl_ms))
            sent_ms = self._clock.monotonic_ms()
            why = await self._lease.renew()
            if why is not None:
                return why
            self._renewed_ms = sent_ms

    async def _lapse(self) -> str:
        while True:
            left_ms = lapses_ms(self._renewed_ms, self._ttl_ms) - self._clock.monotonic_ms()
            if left_ms <= 0:
                return f"the lease could not be renewed within its {self._ttl_ms} ms"
            await self._clock.sleep_ms(left_ms)
