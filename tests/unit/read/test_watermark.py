"""The watermark: which commits and objects are before it, and calls that wait for more."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.errors import Fenced, ShaleError
from shalekv.read.watermark import Watermark

FENCED = Fenced("fenced", own_epoch=1, newer_epoch=2)


def test_an_object_is_whole_when_all_its_groups_are() -> None:
    """An object that a group in flight goes into does not count as durable."""
    watermark = Watermark(seq=5, wal_id=9)
    assert (watermark.has_whole(9), watermark.has_whole(10)) == (True, False)
    watermark.open_wal_id = 10
    watermark.advance(6, 10)
    assert (watermark.has_whole(9), watermark.has_whole(10)) == (True, False)
    watermark.open_wal_id = 11
    assert (watermark.has_whole(10), watermark.has_whole(11)) == (True, False)
    watermark.open_wal_id = None
    watermark.advance(8, 11)
    assert watermark.has_whole(11)


async def test_a_wait_ends_when_the_commit_is_reached() -> None:
    """A call that needs a commit waits until the watermark is there, and no longer."""
    watermark = Watermark(seq=5, wal_id=9)
    await watermark.wait_for(5)
    waiting = {seq: asyncio.create_task(watermark.wait_for(seq)) for seq in (6, 7, 8, 11)}
    await asyncio.sleep(0)
    watermark.landed_seq = 9  # behind a gap
    watermark.advance(8, 11)
    for seq in (6, 7, 8):
        await waiting[seq]
    assert not waiting[11].done()
    watermark.advance(11, 12)
    await waiting[11]


@pytest.mark.parametrize("error", [None, FENCED])
async def test_a_cancelled_wait_affects_no_other(error: ShaleError | None) -> None:
    """A read that is cancelled while it waits affects no other, and is not remembered."""
    watermark = Watermark(seq=5, wal_id=9)
    gone, stays = (asyncio.create_task(watermark.wait_for(7)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    if error is None:
        watermark.advance(7, 10)
    else:
        watermark.fail(error)
    results = await asyncio.gather(gone, stays, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1] is error
    assert watermark.waiting_count == 0
