"""Whether the store tells the time: leases, snapshots and the collector go by its clock."""

from __future__ import annotations

from itertools import pairwise

from shalekv.errors import StoreUnavailable
from shalekv.store.verify.scratch import NotKept, Scratch
from shalekv.store.verify.verdict import Passed

READINGS = 10
SLACK_MS = 5_000  # stores tell whole seconds, and consist of several machines
_DATE = "Date"


async def clock(ground: Scratch) -> Passed:
    """The store's clock is there, does not go back, and is the one that dates new objects."""
    readings = [await now_ms(ground, at=0)]
    name = await ground.created("dated", b"dated", at=1)
    readings += [await now_ms(ground, at=at) for at in range(READINGS)]
    for before, after in pairwise(readings):
        if after < before - SLACK_MS:
            raise NotKept("now_ms", _DATE, f"the clock went back by {before - after:,} ms")
    modified_ms = (await ground.reader(0).head(name)).modified_ms
    if not readings[0] - SLACK_MS <= modified_ms <= readings[-1] + SLACK_MS:
        apart_ms = modified_ms - readings[0]
        raise NotKept("head", name, f"a new object is dated {apart_ms:+,} ms off the store's clock")
    return Passed(f"{len(readings)} readings")


async def now_ms(ground: Scratch, *, at: int) -> int:
    """What the store's clock shows."""
    try:
        now = await ground.reader(at).now_ms()
    except StoreUnavailable as error:
        raise NotKept("now_ms", _DATE, f"the store does not tell its time: {error}") from error
    if now <= 0:
        raise NotKept("now_ms", _DATE, f"the store's clock shows {now}")
    return now
