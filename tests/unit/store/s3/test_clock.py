"""A store's time: what one reply says that is far ahead is not believed at once."""

from __future__ import annotations

from email.utils import formatdate

import pytest

from shalekv.errors import StoreRefused, StoreUnavailable
from shalekv.settings import StoreSettings
from shalekv.store.retry import RetryingStore
from shalekv.store.s3.clock import LEAP_MS, StoreClock
from shalekv.store.s3.store import S3Store
from shalekv.store.url import BucketUrl, Provider
from tests.kit.inline_runtime import InlineClock, inline_runtime
from tests.kit.s3.opening import BUCKET, opened
from tests.kit.s3.scripted_server import Reply, Request, refused, scripted

NOON_MS = 1_830_297_600_000
HOUR_MS = 3_600_000


class ToldTimes:
    """Answers with the Dates that a test sets."""

    def __init__(self, *told_ms: int) -> None:
        self.told_ms = list(told_ms)

    def answer(self, _: Request) -> Reply:
        date = formatdate(self.told_ms.pop(0) / 1_000, usegmt=True)
        return Reply(404, refused(404, "NoSuchKey").body, {"Date": date})


@pytest.mark.parametrize(
    "heard",
    [
        # (what is told after noon, when, whether it is believed)
        [(0, 0, True)],  # the first: there is nothing to compare it with
        # One that is far ahead moves nothing when the next one is as those before it.
        [(0, 0, True), (HOUR_MS, 1_000, False), (1_000, 1_000, True), (HOUR_MS, 3_000, False)],
        # Those that disagree confirm nothing.
        [(0, 0, True), (3 * HOUR_MS, 1, False), (HOUR_MS, 2, False), (3 * HOUR_MS, 3, False)],
        # A store whose clock was set, or a machine that slept, is held up by one request.
        [(0, 0, True), (HOUR_MS, 1, False), (HOUR_MS + 1_000, 1_000, True)],
        # What has passed here has passed there; and clocks differ a bit.
        [(0, 0, True), (9 * HOUR_MS + LEAP_MS, 9 * HOUR_MS, True)],
        [(0, 0, True), (9 * HOUR_MS + LEAP_MS + 1_000, 9 * HOUR_MS, False)],
    ],
)
def test_what_is_believed(heard: list[tuple[int, int, bool]]) -> None:
    """A leap is believed when a second reply confirms it."""
    clock = StoreClock()
    for told_ms, at_ms, is_believed in heard:
        expected = NOON_MS + told_ms if is_believed else None
        assert clock.heard(NOON_MS + told_ms, float(at_ms)) == expected


async def test_a_reply_that_is_far_ahead() -> None:
    """The call fails as one that may pass, and stores that share a client share what they heard;
    where replies go back the clock stands still.
    """
    told = ToldTimes(NOON_MS, NOON_MS + HOUR_MS, NOON_MS + 5_000, NOON_MS + 3_000)
    async with scripted(told.answer) as server, opened(server.endpoint) as s3:
        assert await s3.now_ms() == NOON_MS
        async with opened(server.endpoint) as other:
            with pytest.raises(StoreUnavailable, match="far ahead"):
                await other.now_ms()
            assert await s3.now_ms() == NOON_MS + 5_000
            assert await other.now_ms() == NOON_MS + 5_000
        never = Reply(404, refused(404, "NoSuchKey").body, {"Date": "soon"})
        server.answer = lambda _: never
        with pytest.raises(StoreRefused, match="no Date"):
            await s3.now_ms()


async def test_it_is_asked_again() -> None:
    """A store that repeats what may pass is told the time; local time is that of the runtime."""
    clock = InlineClock()
    runtime = inline_runtime(clock=clock)
    told = ToldTimes(NOON_MS, NOON_MS + HOUR_MS, NOON_MS + 1_000, NOON_MS + HOUR_MS + 1_000)
    async with scripted(told.answer) as server:
        place = BucketUrl(Provider.S3, BUCKET, "")
        s3 = S3Store(place, runtime, StoreSettings(endpoint_url=server.endpoint))
        store = RetryingStore(s3, runtime)
        assert await store.now_ms() == NOON_MS
        assert await store.now_ms() == NOON_MS + 1_000
        assert len(server.requests) == 3
        await clock.sleep_ms(HOUR_MS)
        assert await store.now_ms() == NOON_MS + HOUR_MS + 1_000
        assert len(server.requests) == 4
        await store.close()
