"""The short form of the checks: some 23 requests, before a store is trusted with a database."""

from __future__ import annotations

from contextlib import suppress

from shalekv.errors import StoreError, StoreUnfit
from shalekv.protocol.manifest import CasMode
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import log_retry
from shalekv.store.verify.guarantees import NO_GAP, NOT_BACK, ONE_WINNER, TIMELY
from shalekv.store.verify.listing import shown
from shalekv.store.verify.moments import now_ms
from shalekv.store.verify.races import race, refused
from shalekv.store.verify.reads import gone
from shalekv.store.verify.scratch import Effort, NotKept, Scratch

RACERS = 4
ROUNDS = 3


async def check_fit(store: ObjectStore, runtime: Runtime, settings: StoreSettings) -> None:
    """Raise `StoreUnfit` where the store shows that it does not keep what a database rests on.

    It is waited for as long as it takes to be answered, as when the first manifest is claimed. What
    is made is deleted again.
    """
    effort = Effort(racers=RACERS, rounds=ROUNDS, create_attempts=None)
    ground = Scratch([store], runtime, settings, effort, log_retry)
    guarantee = ONE_WINNER
    try:
        name, is_over = await refused(ground)
        for number in range(ROUNDS):
            await race(ground, ground.name(f"race-{number}"), at=0)
        guarantee = NO_GAP
        await shown(ground, name)
        guarantee = NOT_BACK
        await ground.reader(0).delete([name])
        if is_over:
            await gone(ground, name, at=0)
        guarantee = TIMELY
        await now_ms(ground, at=0)
    except NotKept as found:
        raise _unfit(store, found, guarantee) from found
    finally:
        with suppress(StoreError):  # what stays is told by its name, and disturbs nobody
            await ground.delete_all()


def _unfit(store: ObjectStore, found: NotKept, guarantee: str) -> StoreUnfit:
    is_native = store.cas_mode is CasMode.NATIVE
    other = ", or --cas two_phase" if is_native and guarantee is ONE_WINNER else ""
    return StoreUnfit(
        store.url,
        found.operation,
        found.name,
        f"{found.problem}. The store is unfit, and no database was created, for without this there "
        f"is no {guarantee}. Use another store{other}; `shalekv store verify` tells more",
    )
