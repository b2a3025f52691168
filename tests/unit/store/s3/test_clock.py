"""A store's time: what one reply says that is far ahead is not believed at once."""

from __future__ import annotations

from email.utils import formatdate
from random import Random

import pytest

from shalekv.errors import StoreUnavailable
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.retry import RetryingStore
from shalekv.store.s3.clock import LEAP_MS, StoreClock
from shalekv.store.s3.store import S3Store
from shalekv.store.url import BucketUrl, Provider
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.s3.opening import BUCKET, opened
from tests.kit.s3.scripted_server import Reply, Request, refused, scripted

NOON_MS = 1_830_297_600_000
HOUR_MS = 3_600_000


class SetClock:
    """A clock that a test sets; it does not wait."""

    def __init__(self) -> None:
        self.at_ms = 5_000.0

    def monotonic_ms(self) -> float:
        return self.at_ms

    async def sleep_ms(self, duration_ms: float) -> None:
        self.at_ms += duration_ms


class ToldTimes:
    """Answers with the Dates that a test sets."""

    def __init__(self, *told_ms: int) -> None:
        self.told_ms = list(told_ms)

    def answer(self, _: Request) -> Reply:
        date = formatdate(self.told_ms.pop(0) / 1_000, usegmt=True)
        return Reply(404, refused(404, "NoSuchKey").body, {"Date": date})


def test_the_first_is_believed() -> None:
    """There is nothing to compare it with."""
    assert StoreClock().heard(NOON_MS, 0.0) == NOON_MS


def test_a_leap_is_forgotten() -> None:
    """One reply that is far ahead moves nothing when the next one is as those before it."""
    clock = StoreClock()
    clock.heard(NOON_MS, 0.0)
    for at_ms in (1_000, 3_000, 5_000):
        assert clock.heard(NOON_MS + HOUR_MS, at_ms) is None
        assert clock.heard(NOON_MS + at_ms, at_ms) == NOON_MS + at_ms


def test_leaps_that_disagree() -> None:
    """Replies that are far ahead of one another confirm nothing."""
    clock = StoreClock()
    clock.heard(NOON_MS, 0.0)
    assert clock.heard(NOON_MS + 3 * HOUR_MS, 1.0) is None
    assert clock.heard(NOON_MS + HOUR_MS, 2.0) is None
    assert clock.heard(NOON_MS + 3 * HOUR_MS, 3.0) is None
    assert clock.heard(NOON_MS, 4.0) == NOON_MS


def test_a_leap_that_is_confirmed() -> None:
    """A store whose clock was set, or a machine that slept, is held up by one request."""
    clock = StoreClock()
    clock.heard(NOON_MS, 0.0)
    assert clock.heard(NOON_MS + HOUR_MS, 1.0) is None
    assert clock.heard(NOON_MS + HOUR_MS + 1_000, 1_000.0) == NOON_MS + HOUR_MS + 1_000
    assert clock.heard(NOON_MS + HOUR_MS + 3_000, 3_000.0) == NOON_MS + HOUR_MS + 3_000


def test_time_that_passes_is_no_leap() -> None:
    """However long nobody asks, what has passed here has passed there; and clocks differ a bit."""
    clock = StoreClock()
    clock.heard(NOON_MS, 0.0)
    told_ms = NOON_MS + 9 * HOUR_MS + LEAP_MS
    assert clock.heard(told_ms, 9.0 * HOUR_MS) == told_ms
    assert clock.heard(told_ms + LEAP_MS + 1_000, 9.0 * HOUR_MS) is None


async def test_a_reply_that_is_far_ahead() -> None:
    """The call fails as one that may pass, and stores that share a client share what they heard."""
    told = ToldTimes(NOON_MS, NOON_MS + HOUR_MS, NOON_MS + 1_000)
    async with scripted(told.answer) as server, opened(server.endpoint) as s3:
        assert await s3.now_ms() == NOON_MS
        async with opened(server.endpoint) as other:
            with pytest.raises(StoreUnavailable, match="far ahead"):
                await other.now_ms()
        assert await s3.now_ms() == NOON_MS + 1_000


async def test_it_is_asked_again() -> None:
    """Whoever repeats what may pass is told the time; local time is that of the runtime."""
    clock = SetClock()
    runtime = Runtime(clock, Random(0), InlineWorkers())
    told = ToldTimes(NOON_MS, NOON_MS + HOUR_MS, NOON_MS + 1_000, NOON_MS + HOUR_MS + 1_000)
    async with scripted(told.answer) as server:
        place = BucketUrl(Provider.S3, BUCKET, "")
        s3 = S3Store(place, runtime, StoreSettings(endpoint_url=server.endpoint))
        store = RetryingStore(s3, runtime)
        assert await store.now_ms() == NOON_MS
        assert await store.now_ms() == NOON_MS + 1_000
        assert len(server.requests) == 3
        clock.at_ms += HOUR_MS
        assert await store.now_ms() == NOON_MS + HOUR_MS + 1_000
        assert len(server.requests) == 4
        await store.close()
