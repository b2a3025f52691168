"""The checker of I2 and values that expire: who may still show one, and until when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.errors import Violation
from tests.sim.history import Got
from tests.sim.invariants.answers import BEHIND_MS, check_i2_nothing_comes_back
from tests.sim.serial import SerialOrder
from tests.sim.store import EPOCH_MS
from tests.sim.stored import Stored
from tests.unit.sim.histories import DONE, KEYS, Past, attempted

EXPIRED = pytest.raises(Violation, match=r"^I2: .* had expired")
GONE = Got()
VALUE = Got(b"v1", 1, EPOCH_MS + 12)


@pytest.fixture
def past() -> Past:
    """Key a is v1 since 2 ms, and expires at 12 ms."""
    past = Past()
    put = past.put(b"a", ttl_ms=10)
    attempted(put, 1_000, 3_000, seq=past.landed(2_000, a="v1@12"), answer=DONE)
    return past


def check(past: Past, *, tick_ms: int = 1_000) -> None:
    order = SerialOrder(past.history, Stored((), tuple(past.wal)), KEYS)
    check_i2_nothing_comes_back(order, tick_ms=tick_ms)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_writer_shows_no_value_again(past: Past, epoch: int) -> None:
    """A value that a writer was seen to take for expired is not shown by it again."""
    past.got(b"a", 11_000, VALUE)
    past.got(b"a", 12_400, GONE, epoch=1)
    past.got(b"a", 12_500, GONE, epoch=epoch)
    check(past)
    past.got(b"a", 12_700, VALUE, epoch=epoch)
    with EXPIRED:
        check(past)


@pytest.mark.parametrize("tick_ms", [1, 1_000])
@pytest.mark.parametrize("seen_us", [11_500, 12_500])
def test_a_successor_may_be_behind(past: Past, seen_us: int, tick_ms: int) -> None:
    """A successor may show the value for `BEHIND_MS` and a step of the clock, and no longer.

    Also if the clock of the writer before was ahead, so that it took the value for expired early.
    """
    past.got(b"a", seen_us, GONE, epoch=1)
    over_us = (12 + BEHIND_MS + tick_ms) * 1_000
    past.got(b"a", over_us - 1, VALUE, epoch=2)
    check(past, tick_ms=tick_ms)
    past.got(b"a", over_us, VALUE, epoch=2)
    with EXPIRED:
        check(past, tick_ms=tick_ms)


def test_a_writer_that_was_overtaken_does_not_know(past: Past) -> None:
    """A value that a successor has shown as expired may be shown by an older writer, even late."""
    past.got(b"a", 12_500, GONE, epoch=2)
    past.got(b"a", 60_000_000, VALUE, epoch=1)
    check(past)


def test_answers_at_the_same_time_are_in_no_order(past: Past) -> None:
    """A value may be shown by a read that began before another one found it expired."""
    past.got(b"a", 12_500, GONE)
    past.got(b"a", 12_700, VALUE)
    *others, late = past.history.reads
    past.history.reads[:] = [*others, replace(late, invoked_us=12_300)]
    check(past)
