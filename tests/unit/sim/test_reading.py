"""Reads are checked against the order of commits."""

from __future__ import annotations

import pytest

from tests.sim.errors import Violation
from tests.sim.history import Got
from tests.unit.sim.told import TOLD, Past, attempted

FIRST, SECOND = Got(b"v1", 1), Got(b"v2", 2)


@pytest.fixture
def past() -> Past:
    """Key a is v1 since 2 ms, told at 3 ms, and v2 by a newer writer since 6 ms, told at 7 ms."""
    past = Past()
    attempted(past.put(b"a"), 1_000, 3_000, seq=past.landed(2_000, a="v1"), answer=TOLD)
    second = past.put(b"a")
    attempted(second, 5_000, 7_000, seq=past.landed(6_000, epoch=2, a="v2"), answer=TOLD, epoch=2)
    return past


@pytest.mark.parametrize(
    ("at_us", "got", "epoch", "level"),
    [
        (2_500, FIRST, 1, "linearizable"),
        (2_500, Got(), 1, ""),
        (6_500, FIRST, 2, ""),
        (6_500, SECOND, 2, "linearizable"),
        (9_000, FIRST, 1, ""),  # a writer that was overtaken may not know
        (9_000, SECOND, 2, ""),
    ],
)
def test_right_gets(past: Past, at_us: int, got: Got, epoch: int, level: str) -> None:
    """A get shows what was durable; the older value until the newer one was acknowledged."""
    past.got(b"a", at_us, got, epoch=epoch, level=level)
    past.check()


@pytest.mark.parametrize(
    ("at_us", "got", "epoch", "level"),
    [
        (1_500, FIRST, 1, ""),  # not durable yet
        (3_500, Got(), 1, ""),  # acknowledged by this writer
        (9_000, FIRST, 1, "linearizable"),
        (9_000, FIRST, 2, ""),
        (9_000, Got(b"v1", 2), 2, ""),
        (9_000, Got(b"v3", 3), 2, ""),
    ],
)
def test_wrong_gets(past: Past, at_us: int, got: Got, epoch: int, level: str) -> None:
    """A get that shows what is not durable, or is too old, or was never written, is found."""
    past.got(b"a", at_us, got, epoch=epoch, level=level)
    with pytest.raises(Violation, match="I14"):
        past.check()


def test_scans(past: Past) -> None:
    """A scan is the state of its number, not older than what its writer has acknowledged."""
    past.scanned(3_500, 1, a=1)
    past.check()
    past.scanned(3_500, 1)
    with pytest.raises(Violation, match="differs"):
        past.check()
    past.history.scans.clear()
    past.scanned(3_500, 0)
    with pytest.raises(Violation, match="another state"):
        past.check()
    past.history.scans.clear()
    past.scanned(3_500, 2, a=2)
    with pytest.raises(Violation, match="another state"):
        past.check()


def test_expired_values_are_gone() -> None:
    """A value is shown until its time and not after it, as far as clocks can be told."""
    past = Past()
    put = past.put(b"a", ttl_ms=10)
    attempted(put, 1_000, 3_000, seq=past.landed(2_000, a="v1@12"), answer=TOLD)
    value = past.wal[0].entries[0]
    shown = Got(value.value, 1, value.expire_at_ms)
    past.got(b"a", 11_000, shown)
    past.got(b"a", 13_000, Got())
    past.check()
    attempted(past.put(b"b"), 13_000, 15_000, seq=past.landed(14_000, b="v2"), answer=TOLD)
    past.got(b"a", 14_500, shown)
    with pytest.raises(Violation, match="I14"):
        past.check()
