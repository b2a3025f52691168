"""Runs checks of a store, one after another, and clears up behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shalekv.errors import ObjectNotFound, StoreError
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.verify.checks import checks_of
from shalekv.store.verify.scratch import Effort, NotKept, Scratch, stores_of
from shalekv.store.verify.verdict import Check, Failed, Unanswered, Verdict


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check came to."""

    check: Check
    verdict: Verdict


class Verification:
    """The checks of one store."""

    def __init__(self, ground: Scratch) -> None:
        self._ground = ground
        self.checks: Sequence[Check] = checks_of(ground.stores[0].cas_mode)

    async def findings(self) -> AsyncIterator[Finding]:
        """What each check came to. Raises the errors of a store that cannot be reached at all."""
        await self._ground.listed()
        await self._ground.reader(0).recover()  # asks the records, where there are any
        for check in self.checks:
            yield Finding(check, await self._verdict(check))

    async def _verdict(self, check: Check) -> Verdict:
        try:
            return await check.run(self._ground)
        except NotKept as found:
            return Failed(str(found))
        except ObjectNotFound as error:
            return Failed(str(error))
        except StoreError as error:
            return Unanswered(str(error))


@asynccontextmanager
async def verification(
    open_one: Callable[[], ObjectStore],
    runtime: Runtime,
    settings: StoreSettings,
    effort: Effort,
    left: Callable[[Sequence[str]], None],
) -> AsyncIterator[Verification]:
    """Checks of the store that `open_one` opens, each time with connections of its own.

    What they make is deleted at the end, however it comes; `left` hears what could not be.
    """
    async with stores_of(open_one, effort.racers) as stores:
        ground = Scratch(stores, runtime, settings, effort)
        try:
            yield Verification(ground)
        finally:
            # A cancelled create may still be on its way in another thread, or at the server.
            remaining = await ground.clear()
            if remaining:
                left(remaining)
