"""A claim ends with the true owner of a name, whatever replies were lost."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from shalekv.errors import StoreBroken
from shalekv.settings import StoreSettings
from shalekv.store.api import Created
from shalekv.store.cas import CasStore, Claimed, ClaimOutcome, Taken
from tests.kit.inline_runtime import InlineClock, inline_runtime
from tests.kit.scripted_store import Fate, ScriptedStore
from tests.kit.store import claim

NAME = "wal/1.sst"
OURS = b"write id 1: ours"
THEIRS = b"write id 2: theirs"
UNANSWERED = (Fate.REQUEST_LOST, Fate.REPLY_LOST, Fate.LATE, Fate.REFUSED)
ONCE = [f"create {NAME}", f"get {NAME}"]


@pytest.mark.parametrize(
    ("creates", "is_taken", "outcome", "log"),
    [
        ([], False, Claimed(), ONCE[:1]),
        ([], True, Taken(THEIRS), ONCE),
        ([Fate.REPLY_LOST], False, Claimed(), ONCE),
        ([Fate.REQUEST_LOST] * 2, False, Claimed(), ONCE * 2 + ONCE[:1]),
        ([Fate.LATE], False, Claimed(), ONCE * 2),
        # Our object may have existed before the rival's.
        ([Fate.REQUEST_LOST], True, Taken(THEIRS, is_first_owner=False), ONCE),
    ],
)
async def test_requests_of_a_claim(
    creates: list[Fate], outcome: ClaimOutcome, log: list[str], *, is_taken: bool
) -> None:
    """A create that is answered with success needs no read. After any other outcome the object is
    read, and while it is absent the create is sent again, after a wait, with the same metadata.
    """
    store, clock, metadata = ScriptedStore(), InlineClock(), {"writer_epoch": "3"}
    if is_taken:
        await store.inner.create(NAME, THEIRS, metadata)
    store.creates = list(creates)
    runtime = inline_runtime(clock=clock)
    assert await claim(store, NAME, OURS, runtime=runtime, metadata=metadata) == outcome
    assert store.log == log
    assert len(clock.waits_ms) == log.count(f"create {NAME}") - 1
    found = await store.get(NAME)
    assert found.data == (THEIRS if is_taken else OURS)
    assert found.metadata == ({} if Fate.LATE in creates else metadata)


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("reads", [(), (Fate.REFUSED,), (Fate.REFUSED, Fate.ANSWERED) * 3])
async def test_every_script_ends_with_the_truth(reads: tuple[Fate, ...], *, taken: bool) -> None:
    """After any three unanswered creates and any refused reads, claim and store agree."""
    for creates in product(UNANSWERED, repeat=3):
        store = ScriptedStore()
        if taken:
            await store.inner.create(NAME, THEIRS)
        store.creates = list(creates)
        store.read_fates = list(reads)
        outcome = await claim(store, NAME, OURS, runtime=inline_runtime())
        store.read_fates.clear()
        holder = (await store.get(NAME)).data
        is_certain = not {Fate.REQUEST_LOST, Fate.REPLY_LOST, Fate.LATE} & {*creates}
        assert outcome == (Taken(THEIRS, is_certain) if taken else Claimed()), creates
        assert holder == (THEIRS if taken else OURS), creates


async def test_an_object_that_is_collected_meanwhile() -> None:
    """A rival's object that is gone when it is read leads to another attempt."""
    store = ScriptedStore()
    await store.inner.create(NAME, THEIRS)
    store.collected = {NAME}
    assert await claim(store, NAME, OURS, runtime=inline_runtime()) == Claimed()
    assert (await store.get(NAME)).data == OURS


async def test_a_broken_store_ends_a_claim() -> None:
    """`StoreBroken` is not retried, neither at once nor after an unknown outcome."""
    store = ScriptedStore()
    store.creates = [Fate.REQUEST_LOST, Fate.BROKEN]
    with pytest.raises(StoreBroken):
        await claim(store, NAME, OURS, runtime=inline_runtime())
    store.creates = [Fate.REPLY_LOST]
    store.read_fates = [Fate.BROKEN]
    with pytest.raises(StoreBroken):
        await claim(store, "wal/2.sst", OURS, runtime=inline_runtime())


async def test_a_claim_does_not_give_up_and_can_be_cancelled() -> None:
    """A claim outlasts any outage; its owner can cancel it, and the store stays usable."""
    store, long_enough = ScriptedStore(), asyncio.Event()

    class LongWait(InlineClock):
        async def sleep_ms(self, duration_ms: float) -> None:
            await super().sleep_ms(duration_ms)
            if len(self.waits_ms) == 2_000:
                long_enough.set()
                await asyncio.Event().wait()

    runtime = inline_runtime(clock=LongWait())
    store.creates = [Fate.REFUSED] * 3_000
    async with asyncio.TaskGroup() as tasks:
        claiming = tasks.create_task(claim(store, NAME, OURS, runtime=runtime))
        await long_enough.wait()
        claiming.cancel()
    assert claiming.cancelled()
    store.creates.clear()
    assert await store.create(NAME, THEIRS) == Created()


async def test_waits_double_within_limits_and_repeat_with_the_seed() -> None:
    """Waits grow from the first to the longest and are equal for a seed; attempts whose number is a
    power of two are logged, with their cause.
    """
    logged: list[list[EventDict]] = []
    clocks = [InlineClock() for _ in range(3)]
    for clock, seed in zip(clocks, (1, 1, 2), strict=True):
        store = ScriptedStore()
        store.creates = [Fate.REFUSED, Fate.REQUEST_LOST] * 25
        with capture_logs() as lines:
            await CasStore(store, inline_runtime(seed, clock), StoreSettings()).claim(NAME, OURS)
        logged.append(lines)
    waits_ms = clocks[0].waits_ms
    assert waits_ms == pytest.approx(clocks[1].waits_ms)
    assert waits_ms != clocks[2].waits_ms
    for number, wait_ms in enumerate(waits_ms):
        full_ms = min(2_000, 50 * 2**number)
        assert full_ms / 2 - 0.001 <= wait_ms <= full_ms + 0.001
    for lines in logged:
        assert [line["failed_attempts"] for line in lines] == [1, 2, 4, 8, 16, 32]
        assert "the script says so" in lines[0]["error"]
        assert "REQUEST_LOST" in lines[1]["error"]
