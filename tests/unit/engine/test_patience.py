"""Those who wait for a log that may not answer for long."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.engine.patience import Patience
from shalekv.errors import OutcomeUnknown


def waits() -> asyncio.Future[int]:
    """What a call waits for."""
    return asyncio.get_running_loop().create_future()


async def test_all_who_wait_are_told_at_once() -> None:
    """When hope is lost each of them hears that nobody knows, and nobody is kept."""
    patience = Patience()
    waiting = [waits() for _ in range(3)]
    for future in waiting:
        patience.begin(future)
    patience.lose()
    for future in waiting:
        with pytest.raises(OutcomeUnknown):
            await future
    assert len(patience) == 0


async def test_what_becomes_known_later_is_told_to_nobody() -> None:
    """A call that was told that nobody knows is not told twice."""
    patience = Patience()
    early, late = waits(), waits()
    patience.begin(early)
    patience.begin(late)
    assert patience.end(early)
    early.set_result(1)
    patience.lose()
    assert not patience.end(late)
    assert await early == 1


async def test_callers_who_have_gone_are_let_be() -> None:
    """A call that was cancelled, or ended before it began to wait, is not counted."""
    patience = Patience()
    gone, done = waits(), waits()
    patience.begin(gone)
    gone.cancel()
    done.set_result(1)
    patience.begin(done)
    assert len(patience) == 1
    patience.lose()
    assert gone.cancelled()
    assert not patience.end(gone)
    assert await done == 1
