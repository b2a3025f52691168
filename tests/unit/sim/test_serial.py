"""The serial check accepts what one order explains, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shalekv.v1 import kv_pb2
from tests.sim.errors import Violation
from tests.sim.history import Got, Refusal, Told
from tests.unit.sim.told import TOLD, Past, attempted

ABSENT = kv_pb2.Precondition(absent=True)


def test_what_was_told_is_in_the_log() -> None:
    """An acknowledged write stands where its reply says, under its number, and as it was asked."""
    past = Past()
    attempted(past.put(b"a"), 1_000, 3_000, seq=past.landed(2_000, a="v1"), answer=TOLD)
    past.check()
    attempted(past.put(b"a"), 1_000, 3_000, seq=2, answer=TOLD)
    with pytest.raises(Violation, match="I1"):
        past.check()
    past.landed(2_500, b="v2")
    with pytest.raises(Violation, match="nothing explains"):
        past.check()


def test_nothing_is_told_before_it_is_durable() -> None:
    """An acknowledgement comes when the object has landed, and all on which it rests."""
    past = Past()
    attempted(past.put(b"a"), 1_000, 4_000, seq=past.landed(3_000, a="v1"), answer=TOLD)
    attempted(past.put(b"b"), 1_000, 2_500, seq=past.landed(2_000, b="v2"), answer=TOLD)
    past.check()
    add = past.add(5)
    attempted(add, 1_000, 2_500, seq=past.landed(2_000, n="5"), answer=Told(results=(5,)))
    with pytest.raises(Violation, match="rests on what was not durable"):
        past.check()
    add.attempts[0].replied_us = 1_500
    with pytest.raises(Violation, match="I1"):
        past.check()


def test_an_unknown_outcome_is_all_or_nothing() -> None:
    """What nobody was told about may be in the log as it was asked, or not at all."""
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


def test_a_commit_is_somebodys() -> None:
    """A delete is found by what it deletes, and only if its writer was asked before it landed."""
    past = Past()
    past.landed(2_000, a="")
    with pytest.raises(Violation, match="nothing explains"):
        past.check()
    delete = past.asked(kv_pb2.DeleteRequest(key=b"a"))
    attempted(delete, 1_000, epoch=2)
    with pytest.raises(Violation, match="nothing explains"):
        past.check()
    attempted(delete, 2_001)
    with pytest.raises(Violation, match="nothing explains"):
        past.check()
    attempted(delete, 1_999)
    past.check()


def test_what_is_not_applied_is_not_in_the_log() -> None:
    """Neither is what was refused."""
    past = Past()
    attempted(past.put(b"a"), 1_000, 3_000)
    past.check()
    past.landed(2_000, a="v1")
    with pytest.raises(Violation, match="told not to be applied"):
        past.check()


def test_a_repeat_is_not_applied_again() -> None:
    """Attempts at one operation make one commit, and all who are told are told the same (I15)."""
    past = Past()
    put, add = past.put(b"a"), past.add(7)
    attempted(put, 1_000)
    attempted(put, 5_000, 6_000, seq=past.landed(2_000, a="v1"), answer=TOLD)
    attempted(add, 1_000, 2_500, seq=past.landed(2_000, n="7"), answer=Told(results=(7,)))
    attempted(add, 5_000, 6_000, seq=2, answer=Told(results=(7,)))
    past.check()
    add.attempts[-1].answer = Told(results=(14,))
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


def test_counters_count_in_the_order_of_the_log() -> None:
    """Each add is told the sum of all before it and itself, whatever the order of the replies."""
    past = Past()
    attempted(past.add(5), 1_000, 9_000, seq=past.landed(2_000, n="5"), answer=Told(results=(5,)))
    second = past.add(7)
    attempted(second, 1_000, 8_000, seq=past.landed(3_000, n="12"), answer=Told(results=(12,)))
    past.check()
    second.attempts[0].answer = Told(results=(7,))
    with pytest.raises(Violation, match="I14"):
        past.check()


def test_a_refusal_has_a_reason() -> None:
    """A refused condition failed in a state that was durable, and not older than the question."""
    past = Past()
    attempted(past.put(b"a"), 1_000, 3_000, seq=past.landed(2_000, a="v1"), answer=TOLD)
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
    attempted(past.put(b"a"), 1_000, 3_000, seq=past.landed(2_000, a="v1"), answer=TOLD)
    delete = past.asked(kv_pb2.DeleteRequest(key=b"a"))
    attempted(delete, 3_000, 5_000, seq=past.landed(4_000, epoch=2, a=""), answer=TOLD, epoch=2)
    refused = past.put(b"a", precondition=ABSENT)
    attempted(refused, 5_001, 6_000, answer=Refusal("CONDITION_FAILED", 1))
    with pytest.raises(Violation, match="no state from 2 to 2"):
        past.check()
    refused.request.header.read_level = kv_pb2.READ_LEVEL_COMMITTED
    past.check()
    refused.attempts[0].epoch = 2
    with pytest.raises(Violation, match="no state from 2 to 2"):
        past.check()


def test_an_applied_request_is_not_refused_afterwards() -> None:
    """A repeat is not judged by what its first attempt has done."""
    past = Past()
    put = past.put(b"a", precondition=ABSENT)
    attempted(put, 1_000)
    past.landed(2_000, a="v1")
    attempted(put, 5_000, 6_000, answer=Refusal("CONDITION_FAILED", 1))
    with pytest.raises(Violation, match="I15"):
        past.check()


def test_a_transaction_that_reads_shows_one_state() -> None:
    """What it got is of one state, not above the number in its header."""
    past = Past()
    attempted(past.put(b"a"), 1_000, 3_000, seq=past.landed(2_000, a="v1"), answer=TOLD)
    attempted(past.put(b"b"), 1_000, 3_000, seq=past.landed(2_500, b="v2"), answer=TOLD)
    gets = [kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=key)) for key in (b"a", b"b")]
    reading = past.asked(kv_pb2.TxnRequest(then=gets))
    both = Told(results=(Got(b"v1", 1), Got(b"v2", 2)))
    attempted(reading, 1_000, 4_000, seq=2, answer=both)
    past.check()
    reading.attempts[0].seq = 1
    with pytest.raises(Violation, match="no state"):
        past.check()
    reading.attempts[0].answer = Told(results=(Got(b"v1", 1), Got()))
    past.check()
    reading.attempts[0].answer = Told(results=(Got(), Got(b"v2", 2)))
    reading.attempts[0].seq = 2
    with pytest.raises(Violation, match="no state"):
        past.check()


def test_commits_are_in_real_time_order() -> None:
    """What began after something was acknowledged stands behind it."""
    past = Past()
    late = past.put(b"a")
    past.landed(2_000, a="v1")
    attempted(past.put(b"b"), 1_000, 3_000, seq=past.landed(2_000, b="v2"), answer=TOLD)
    attempted(late, 1_900, 9_000, seq=1, answer=TOLD)
    past.check()
    late.attempts[0].invoked_us = 3_001
    past.wal[0] = replace(past.wal[0], landed_us=4_000)
    with pytest.raises(Violation, match="began after"):
        past.check()


def test_values_live_as_long_as_was_asked() -> None:
    """The time of a commit lies between the question and its object; what has expired is gone."""
    past = Past()
    put = past.put(b"a", ttl_ms=10)
    past.landed(20_000, a="v1@25")  # decided at 15 ms
    attempted(put, 12_000, 30_000, seq=1, answer=TOLD)
    absent = past.put(b"a", precondition=ABSENT)
    attempted(absent, 22_000, 40_000, seq=past.landed(33_000, a="v2"), answer=TOLD)
    past.check()
    absent.attempts[0].replied_us, absent.attempts[0].seq = 23_000, 0
    past.wal.pop()
    past.landed(21_000, a="v2")
    absent.attempts[0].invoked_us, absent.attempts[0].seq = 20_500, 2
    with pytest.raises(Violation, match="nothing explains"):
        past.check()
    past.wal.clear()
    past.landed(20_000, a="v1@35")
    with pytest.raises(Violation, match="nothing explains"):
        past.check()


def test_range_deletes_delete() -> None:
    """A range tombstone deletes what is in its range, and the points of its commit come after."""
    past = Past()
    attempted(past.put(b"a"), 1_000, 3_000, seq=past.landed(2_000, a="v1"), answer=TOLD)
    both = kv_pb2.WriteRequest()
    both.changes.add().delete_range.range.start = b"a"
    both.changes.add().put.CopyFrom(kv_pb2.PutChange(key=b"b", value=b"v2"))
    operation = past.asked(both)
    attempted(operation, 3_000, 5_000, seq=2, answer=TOLD)
    past.landed(4_000, ranges=((b"a", b""),), b="v2")
    past.check()
    past.wal.pop()
    past.landed(4_000, ranges=((b"b", b""),), b="v2")
    with pytest.raises(Violation, match="nothing explains"):
        past.check()
