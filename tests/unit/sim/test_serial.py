"""The serial check accepts what one order explains, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.v1 import kv_pb2
from tests.sim.errors import Violation
from tests.sim.history import Got, Refusal, WriteResult
from tests.unit.sim.histories import DONE, Past, attempted

ABSENT = kv_pb2.Precondition(absent=True)


def test_acknowledged_writes_are_in_the_log() -> None:
    """An acknowledged write is in the slot of its reply, under its number, as requested."""
    past = Past()
    attempted(past.put(b"a"), 1_000, 3_000, seq=past.landed(2_000, a="v1"), answer=DONE)
    past.check()
    attempted(past.put(b"a"), 1_000, 3_000, seq=2, answer=DONE)
    with pytest.raises(Violation, match="I1"):
        past.check()
    past.landed(2_500, b="v2")
    with pytest.raises(Violation, match="nothing explains"):
        past.check()


def test_nothing_is_acknowledged_before_it_is_durable() -> None:
    """An acknowledgement comes when the object has landed, and all on which it rests."""
    past = Past()
    attempted(past.put(b"a"), 1_000, 4_000, seq=past.landed(3_000, a="v1"), answer=DONE)
    attempted(past.put(b"b"), 1_000, 2_500, seq=past.landed(2_000, b="v2"), answer=DONE)
    past.check()
    add = past.add(5)
    attempted(add, 1_000, 2_500, seq=past.landed(2_000, n="5"), answer=WriteResult(results=(5,)))
    with pytest.raises(Violation, match="rests on what was not durable"):
        past.check()
    add.attempts[0].replied_us = 1_500
    with pytest.raises(Violation, match="I1"):
        past.check()


def test_an_unknown_outcome_is_all_or_nothing() -> None:
    """A write without a reply may be in the log as requested, or not at all."""
    past = Past()
    keys = kv_pb2.WriteRequest()
    for key in (b"a", b"b"):
        keys.changes.add().put.CopyFrom(kv_pb2.PutChange(key=key, value=b"v1"))
    attempted(past.asked(keys), 1_000)
    past.check()
    past.landed(2_000, a="v1", b="v1")
    past.check()
    past.wal.clear()
    past.landed(2_000, a="v1")
    with pytest.raises(Violation, match="nothing explains"):
        past.check()


def test_a_repeat_is_not_applied_again() -> None:
    """Attempts at one operation make one commit, and all its replies are the same (I15)."""
    past = Past()
    put, add = past.put(b"a"), past.add(7)
    attempted(put, 1_000)
    attempted(put, 5_000, 6_000, seq=past.landed(2_000, a="v1"), answer=DONE)
    attempted(add, 1_000, 2_500, seq=past.landed(2_000, n="7"), answer=WriteResult(results=(7,)))
    attempted(add, 5_000, 6_000, seq=2, answer=WriteResult(results=(7,)))
    past.check()
    add.attempts[-1].answer = WriteResult(results=(14,))
    with pytest.raises(Violation, match="I14"):
        past.check()
    add.attempts[-1].seq = past.landed(5_500, n="14")
    with pytest.raises(Violation, match=r"I15: .* is applied more than once"):
        past.check()
    past.wal.pop()
    add.attempts.pop()
    past.landed(5_500, a="v1")
    with pytest.raises(Violation, match=r"I15: .* is applied more than once"):
        past.check()


def test_a_refusal_has_a_reason() -> None:
    """A refused condition failed in a state that was durable, and not older than the question."""
    past = Past()
    attempted(past.put(b"a"), 1_000, 3_000, seq=past.landed(2_000, a="v1"), answer=DONE)
    refused = past.put(b"a", precondition=ABSENT)
    attempted(refused, 1_000, 2_500, answer=Refusal("CONDITION_FAILED", 1))
    past.check()
    refused.attempts[0].replied_us = 1_500
    with pytest.raises(Violation, match="no state from 0 to 0"):
        past.check()
    refused.attempts[0].replied_us = 2_500
    refused.attempts[0].answer = Refusal("CONDITION_FAILED", 2)
    with pytest.raises(Violation, match="no state"):
        past.check()


def test_a_refusal_is_not_stale() -> None:
    """A refusal misses nothing acknowledged before the question, by a writer that took over even.

    With the level COMMITTED it may miss what others wrote, never what the same writer did.
    """
    past = Past()
    attempted(past.put(b"a"), 1_000, 3_000, seq=past.landed(2_000, a="v1"), answer=DONE)
    delete = past.asked(kv_pb2.DeleteRequest(key=b"a"))
    attempted(delete, 3_000, 5_000, seq=past.landed(4_000, epoch=2, a=""), answer=DONE, epoch=2)
    refused = past.put(b"a", precondition=ABSENT)
    attempted(refused, 5_001, 6_000, answer=Refusal("CONDITION_FAILED", 1))
    with pytest.raises(Violation, match="no state from 2 to 2"):
        past.check()
    refused.request.header.read_level = kv_pb2.READ_LEVEL_COMMITTED
    past.check()
    refused.attempts[0].epoch = 2
    with pytest.raises(Violation, match="no state from 2 to 2"):
        past.check()


def test_commits_are_in_real_time_order() -> None:
    """A write that began after an acknowledgement is behind the acknowledged one."""
    past = Past()
    late = past.put(b"a")
    past.landed(2_000, a="v1")
    attempted(past.put(b"b"), 1_000, 3_000, seq=past.landed(2_000, b="v2"), answer=DONE)
    attempted(late, 1_900, 9_000, seq=1, answer=DONE)
    past.check()
    late.attempts[0].invoked_us = 3_001
    past.wal[0] = replace(past.wal[0], landed_us=4_000)
    with pytest.raises(Violation, match="began after"):
        past.check()


FIRST, SECOND = Got(b"v1", 1), Got(b"v2", 2)


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
