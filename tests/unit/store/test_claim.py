"""A claim ends with the truth about who has a name, whatever replies were lost on the way."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from shalekv.errors import StoreBroken, StoreUnavailable
from shalekv.store.api import Created
from shalekv.store.claim import Claimed, Taken, claim
from shalekv.store.retry import Backoff
from tests.kit.inline_runtime import InlineClock, inline_runtime
from tests.kit.lossy_store import Fate, LossyStore

NAME = "wal/1.sst"
OURS = b"write id 1: ours"
THEIRS = b"write id 2: theirs"
UNANSWERED = (Fate.REQUEST_LOST, Fate.REPLY_LOST, Fate.LATE, Fate.REFUSED)


@pytest.fixture
def store() -> LossyStore:
    """The store; its script is empty."""
    return LossyStore()


async def test_a_free_name_takes_one_request(store: LossyStore) -> None:
    """A claim that is answered needs no read."""
    assert await claim(store, NAME, OURS, runtime=inline_runtime()) == Claimed()
    assert store.log == [f"create {NAME}"]


async def test_a_rival_is_shown(store: LossyStore) -> None:
    """A claim on a taken name returns the rival's bytes, and leaves them."""
    await store.create(NAME, THEIRS)
    assert await claim(store, NAME, OURS, runtime=inline_runtime()) == Taken(THEIRS)
    assert (await store.get(NAME)).data == THEIRS


async def test_a_lost_reply_of_our_own_success_is_ours(store: LossyStore) -> None:
    """A create that landed without a reply is found by its bytes, and not sent again."""
    store.creates = [Fate.REPLY_LOST]
    assert await claim(store, NAME, OURS, runtime=inline_runtime()) == Claimed()
    assert store.log == [f"create {NAME}", f"get {NAME}"]


async def test_a_lost_request_is_sent_again(store: LossyStore) -> None:
    """A create that never landed is sent again after a wait, with the same bytes."""
    clock = InlineClock()
    store.creates = [Fate.REQUEST_LOST, Fate.REQUEST_LOST]
    assert await claim(store, NAME, OURS, runtime=inline_runtime(clock=clock)) == Claimed()
    assert store.log == 2 * [f"create {NAME}", f"get {NAME}"] + [f"create {NAME}"]
    assert len(clock.waits_ms) == 2
    assert (await store.get(NAME)).data == OURS


async def test_a_create_that_lands_late_is_ours(store: LossyStore) -> None:
    """A create that lands after it was found absent makes the next one fail, and is ours."""
    store.creates = [Fate.LATE]
    assert await claim(store, NAME, OURS, runtime=inline_runtime()) == Claimed()
    assert store.log == 2 * [f"create {NAME}", f"get {NAME}"]


async def test_a_rival_is_not_us(store: LossyStore) -> None:
    """An unknown outcome behind which a rival stands is not taken for our success.

    Nor for certain failure: ours may have stood there before the rival's.
    """
    await store.create(NAME, THEIRS)
    store.creates = [Fate.REQUEST_LOST]
    outcome = await claim(store, NAME, OURS, runtime=inline_runtime())
    assert outcome == Taken(THEIRS, is_certain=False)


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("reads", [(), (Fate.REFUSED,), (Fate.REFUSED, Fate.ANSWERED) * 3])
async def test_every_script_ends_with_the_truth(reads: tuple[Fate, ...], *, taken: bool) -> None:
    """After any three unanswered creates and any refused reads, claim and store agree."""
    for creates in product(UNANSWERED, repeat=3):
        store = LossyStore()
        if taken:
            await store.create(NAME, THEIRS)
        store.creates = list(creates)
        store.reads = list(reads)
        outcome = await claim(store, NAME, OURS, runtime=inline_runtime())
        store.reads.clear()
        holder = (await store.get(NAME)).data
        is_certain = not {Fate.REQUEST_LOST, Fate.REPLY_LOST, Fate.LATE} & {*creates}
        assert outcome == (Taken(THEIRS, is_certain) if taken else Claimed()), creates
        assert holder == (THEIRS if taken else OURS), creates


async def test_refused_reads_are_repeated(store: LossyStore) -> None:
    """When the object cannot be read for now, the claim goes on until it can."""
    await store.create(NAME, THEIRS)
    store.reads = [Fate.REFUSED] * 20
    assert await claim(store, NAME, OURS, runtime=inline_runtime()) == Taken(THEIRS)


async def test_an_object_that_is_collected_meanwhile(store: LossyStore) -> None:
    """A rival's object that is gone when it is read leads to another attempt."""
    await store.create(NAME, THEIRS)
    store.collected = {NAME}
    assert await claim(store, NAME, OURS, runtime=inline_runtime()) == Claimed()
    assert (await store.get(NAME)).data == OURS


async def test_a_broken_store_ends_a_claim(store: LossyStore) -> None:
    """`StoreBroken` is not tried again, neither at once nor after an unknown outcome."""
    store.creates = [Fate.REQUEST_LOST, Fate.BROKEN]
    with pytest.raises(StoreBroken):
        await claim(store, NAME, OURS, runtime=inline_runtime())
    store.creates = [Fate.REPLY_LOST]
    store.reads = [Fate.BROKEN]
    with pytest.raises(StoreBroken):
        await claim(store, "wal/2.sst", OURS, runtime=inline_runtime())


async def test_a_claim_does_not_give_up_and_can_be_cancelled(store: LossyStore) -> None:
    """A claim outlasts any outage; its owner can end it, and the store stays usable."""
    long_enough = asyncio.Event()

    class Patience(InlineClock):
        async def sleep_ms(self, duration_ms: float) -> None:
            await super().sleep_ms(duration_ms)
            if len(self.waits_ms) == 2_000:
                long_enough.set()
                await asyncio.Event().wait()

    runtime = inline_runtime(clock=Patience())
    store.creates = [Fate.REFUSED] * 3_000
    async with asyncio.TaskGroup() as tasks:
        claiming = tasks.create_task(claim(store, NAME, OURS, runtime=runtime))
        await long_enough.wait()
        claiming.cancel()
    assert claiming.cancelled()
    store.creates.clear()
    assert await store.create(NAME, THEIRS) == Created()


async def test_waits_double_within_limits_and_repeat_with_the_seed() -> None:
    """Waits grow from the first to the longest, and the same seed waits the same."""
    clocks = [InlineClock() for _ in range(3)]
    for clock, seed in zip(clocks, (1, 1, 2), strict=True):
        store = LossyStore()
        store.creates = [Fate.REFUSED] * 50
        runtime = inline_runtime(seed, clock)
        backoff = Backoff(first_ms=10, longest_ms=1_000)
        await claim(store, NAME, OURS, runtime=runtime, backoff=backoff)
    waits_ms = clocks[0].waits_ms
    assert waits_ms == pytest.approx(clocks[1].waits_ms)
    assert waits_ms != clocks[2].waits_ms
    for number, wait_ms in enumerate(waits_ms):
        full_ms = min(1_000, 10 * 2**number)
        assert full_ms / 2 - 0.001 <= wait_ms <= full_ms + 0.001


async def test_the_listener_hears_of_every_failed_attempt(store: LossyStore) -> None:
    """Each failed attempt is told with its number and cause, and a good one is not."""
    heard: list[tuple[int, str]] = []
    store.creates = [Fate.REFUSED, Fate.REQUEST_LOST]
    await claim(
        store,
        NAME,
        OURS,
        runtime=inline_runtime(),
        listener=lambda attempts, error: heard.append((attempts, str(error))),
    )
    assert [attempts for attempts, _ in heard] == [1, 2]
    assert "the script says so" in heard[0][1]
    assert "REQUEST_LOST" in heard[1][1]


async def test_metadata_is_passed_on(store: LossyStore) -> None:
    """The object is created with the metadata of the claim, in later attempts too."""
    store.creates = [Fate.REQUEST_LOST]
    metadata = {"writer_epoch": "3"}
    await claim(store, NAME, OURS, runtime=inline_runtime(), metadata=metadata)
    assert (await store.get(NAME)).metadata == metadata


async def test_no_two_claims_hold_one_name() -> None:
    """Of claims that race with lost replies, exactly one is told that the name is its own."""
    for seed in range(200):
        store = LossyStore()
        runtime = inline_runtime(seed)
        store.creates = runtime.random.choices(tuple(Fate)[:-1], k=12)
        bodies = [f"write id {number}".encode() for number in range(4)]
        outcomes = await asyncio.gather(
            *(claim(store, NAME, body, runtime=runtime) for body in bodies)
        )
        assert outcomes.count(Claimed()) == 1, f"seed {seed}"
        holder = bodies[outcomes.index(Claimed())]
        taken = [outcome for outcome in outcomes if isinstance(outcome, Taken)]
        assert [outcome.data for outcome in taken] == [holder] * 3, f"seed {seed}"


def test_unavailable_is_an_error_of_the_store() -> None:
    """What is tried again is `StoreUnavailable` and nothing wider."""
    assert not issubclass(StoreBroken, StoreUnavailable)
