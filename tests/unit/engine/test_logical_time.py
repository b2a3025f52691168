"""Logical time: from the store, at the local pace, never back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shalekv.engine.logical_time import LogicalTime
from tests.kit.inline_runtime import InlineClock, finish


def test_time_goes_on_from_the_stores() -> None:
    """It begins at the store's clock and moves with the local one, whatever that shows."""
    clock = InlineClock()
    finish(clock.sleep_ms(123_456))
    time = LogicalTime(clock, store_now_ms=10_000, floor_ms=0)
    assert time.now_ms() == 10_000
    finish(clock.sleep_ms(250))
    assert time.now_ms() == 10_250


@given(
    store_now_ms=st.integers(0, 2_000),
    steps=st.lists(st.one_of(st.integers(0, 500), st.integers(-2_000, -1)), max_size=20),
)
def test_time_never_goes_back(store_now_ms: int, steps: list[int]) -> None:
    """Whatever floors are met, in the manifest or in WAL objects, no later time is less (I5).

    A positive step is time that passes, a negative one a floor.
    """
    clock = InlineClock()
    time = LogicalTime(clock, store_now_ms=store_now_ms, floor_ms=1_000)
    shown = time.now_ms()
    assert shown >= max(store_now_ms, 1_000)
    for step in steps:
        if step >= 0:
            finish(clock.sleep_ms(step))
        else:
            time.raise_to(-step)
        assert time.now_ms() >= max(shown, -step)
        shown = time.now_ms()
