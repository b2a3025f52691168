"""The model: what requests do to a dictionary, by the words of kv.proto."""

from __future__ import annotations

import pytest

from shalekv.v1 import kv_pb2
from tests.kit.model import Effect, Moment, Timeline, decide, keys_of, rests_on_state
from tests.sim.history import Got, Refusal, Told, WriteRequest

KEYS = (b"a0", b"a1", b"b0", b"n0")
TEN = (10).to_bytes(8, "little")


@pytest.fixture
def moment() -> Moment:
    """a0 = "x" since 1, a1 = "y" since 2 and until time 100, n0 = 10 since 3, at time 50."""
    timeline = Timeline(KEYS)
    timeline.append(1, {b"a0": (b"x", 0)})
    timeline.append(2, {b"a1": (b"y", 100)})
    timeline.append(3, {b"n0": (TEN, 0)})
    return Moment(timeline, 3, 50)


def put(key: bytes, value: bytes = b"new", ttl_ms: int = 0) -> kv_pb2.Change:
    """A put as a change."""
    return kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=value, ttl_ms=ttl_ms))


def delete(prefix: bytes) -> kv_pb2.Change:
    """A range delete as a change."""
    keys = kv_pb2.KeyRange(prefix=prefix)
    return kv_pb2.Change(delete_range=kv_pb2.DeleteRangeChange(range=keys))


def add(key: bytes, delta: int) -> kv_pb2.Change:
    """An add as a change."""
    return kv_pb2.Change(add=kv_pb2.AddChange(key=key, delta=delta))


def get(key: bytes) -> kv_pb2.TxnOperation:
    """A get in a transaction."""
    return kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=key))


def then(change: kv_pb2.Change) -> kv_pb2.TxnOperation:
    """A change in a transaction."""
    return kv_pb2.TxnOperation(change=change)


def test_a_state_is_a_number_and_a_time(moment: Moment) -> None:
    """A key has its newest version up to the number, unless that is deleted or has expired."""
    timeline = moment.timeline
    timeline.append(4, {b"a0": (None, 0)})
    assert moment.got(b"a0") == Got(b"x", 1)
    assert Moment(timeline, 4, 50).got(b"a0") == Got()
    assert Moment(timeline, 0, 50).got(b"a0") == Got()
    assert moment.got(b"a1") == Got(b"y", 2, 100)
    assert Moment(timeline, 3, 100).got(b"a1") == Got()
    assert timeline.states([b"a0"], 0, 9) == [0, 1, 4]
    assert timeline.states([b"a0"], 2, 3) == [2]
    assert timeline.states([b"a0"], 3, 2) == []
    assert timeline.expiries(KEYS, 3, 50, 100) == [100]
    assert timeline.expiries(KEYS, 1, 50, 100) == timeline.expiries(KEYS, 3, 100, 200) == []


@pytest.mark.parametrize(
    ("key", "condition", "found_seq"),
    [
        (b"b0", {"absent": True}, None),
        (b"a0", {"absent": True}, 1),
        (b"a1", {"present": True}, None),
        (b"b0", {"present": True}, 0),
        (b"a1", {"seq_equals": 2}, None),
        (b"a0", {"seq_equals": 2}, 1),
        (b"b0", {"seq_equals": 2}, 0),
    ],
)
def test_conditions(
    moment: Moment, key: bytes, condition: dict[str, int], found_seq: int | None
) -> None:
    """A put is done where its condition holds; otherwise it is refused with what was found."""
    precondition = kv_pb2.Precondition(**condition)  # type: ignore[arg-type] # one of its fields
    request = kv_pb2.PutRequest(key=key, value=b"new", ttl_ms=5, precondition=precondition)
    effect = decide(request, moment)
    if found_seq is None:
        assert effect == Effect(Told(), {key: (b"new", 55)})
    else:
        assert effect == Effect(Refusal("CONDITION_FAILED", found_seq))
    assert rests_on_state(request)


def test_changes_come_one_after_the_other(moment: Moment) -> None:
    """A later change of a batch wins, an add sees those before it and keeps the expiry."""
    changes = [add(b"n0", 5), put(b"b0"), delete(b"b"), delete(b"n"), add(b"n0", -1), add(b"n0", 7)]
    effect = decide(kv_pb2.WriteRequest(changes=changes), moment)
    six = (6).to_bytes(8, "little")
    assert effect == Effect(Told(results=(15, -1, 6)), {b"n0": (six, 0), b"b0": (None, 0)})
    expiring = decide(kv_pb2.WriteRequest(changes=[put(b"n0", TEN, 9), add(b"n0", 1)]), moment)
    assert expiring.left == {b"n0": ((11).to_bytes(8, "little"), 59)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([put(b"b0"), add(b"a0", 1)], "NOT_A_COUNTER"),
        ([put(b"b0"), add(b"n0", 2**63 - 10)], "COUNTER_OVERFLOW"),
        ([add(b"n0", -(2**63)), add(b"n0", -11)], "COUNTER_OVERFLOW"),
    ],
)
def test_an_add_that_is_refused_leaves_nothing(
    moment: Moment, changes: list[kv_pb2.Change], reason: str
) -> None:
    """Nothing of a batch is done when one of its adds can't be."""
    assert decide(kv_pb2.WriteRequest(changes=changes), moment) == Effect(Refusal(reason))


def compare(**fields: object) -> kv_pb2.Compare:
    """A comparison."""
    return kv_pb2.Compare(**fields)  # type: ignore[arg-type] # fields of different types


@pytest.mark.parametrize(
    ("holds", "test"),
    [
        (True, compare(key=b"a0", seq=1)),
        (False, compare(key=b"b0", seq=0, operator=kv_pb2.Compare.OPERATOR_NOT_EQUAL)),
        (True, compare(key=b"a1", seq=1, operator=kv_pb2.Compare.OPERATOR_GREATER)),
        (True, compare(key=b"a0", value=b"y", operator=kv_pb2.Compare.OPERATOR_LESS)),
        (True, compare(key=b"b0", value=b"y", operator=kv_pb2.Compare.OPERATOR_NOT_EQUAL)),
        (False, compare(key=b"b0", value=b"", operator=kv_pb2.Compare.OPERATOR_EQUAL)),
        (True, compare(key=b"b0", exists=False)),
        (False, compare(key=b"a0", exists=False)),
        (True, compare(range_empty=kv_pb2.KeyRange(prefix=b"b"))),
        (False, compare(range_empty=kv_pb2.KeyRange(start=b"a1"))),
    ],
)
def test_comparisons_choose_the_branch(moment: Moment, holds: bool, test: kv_pb2.Compare) -> None:  # noqa: FBT001 - a parameter
    """`then` is done when all comparisons hold, else `otherwise`; gets see what was before."""
    request = kv_pb2.TxnRequest(
        compares=[compare(key=b"a0", exists=True), test],
        then=[then(put(b"a0")), get(b"a0")],
        otherwise=[get(b"b0"), then(add(b"n0", 1))],
    )
    eleven = (11).to_bytes(8, "little")
    taken = Effect(Told(results=(None, Got(b"x", 1))), {b"a0": (b"new", 0)})
    other = Effect(Told(succeeded=False, results=(Got(), 11)), {b"n0": (eleven, 0)})
    assert decide(request, moment) == (taken if holds else other)


@pytest.mark.parametrize(
    ("keys", "request_"),
    [
        ([b"a0"], kv_pb2.DeleteRequest(key=b"a0")),
        ([b"a0", b"a1"], kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(prefix=b"a"))),
        ([], kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(start=b"a0", end=b"a0"))),
        ([b"a0", b"n0"], kv_pb2.WriteRequest(changes=[put(b"a0"), add(b"n0", 1)])),
        (
            [b"a0", b"b0", b"n0"],
            kv_pb2.TxnRequest(
                compares=[compare(range_empty=kv_pb2.KeyRange(prefix=b"b"))],
                then=[get(b"a0")],
                otherwise=[then(delete(b"n"))],
            ),
        ),
    ],
)
def test_the_keys_of_a_request(keys: list[bytes], request_: WriteRequest) -> None:
    """All keys that a request names count, each once, whatever it does to them."""
    assert keys_of(request_, KEYS) == keys
