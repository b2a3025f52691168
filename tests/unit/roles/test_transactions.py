"""Transactions from messages: every field at its limit, and one past it; and what they become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shalekv.core.key_range import KEY_BYTES_MAX, KeyRange
from shalekv.core.transaction import (
    Add,
    Delete,
    DeleteRange,
    EmptyCompare,
    ExistsCompare,
    Get,
    Operator,
    Put,
    SeqCompare,
    Transaction,
    ValueCompare,
)
from shalekv.errors import InvalidRequest
from shalekv.roles import transactions
from shalekv.settings import STREAM_MESSAGE_BYTES_MAX, LimitSettings
from shalekv.v1 import kv_pb2
from tests.kit.serving.messages import (
    Compare,
    absent,
    add,
    change,
    delete,
    delete_range,
    get,
    present,
    put,
    seq_equals,
)

LIMITS = LimitSettings(
    value_bytes_max=100,
    batch_count_max=4,
    batch_bytes_max=1_024,
    ttl_ms_max=1_000,
    delete_range_count_max=2,
)
KEY_MAX = b"k" * KEY_BYTES_MAX
KEY_OVER = KEY_MAX + b"k"
UNKNOWN: Any = 99
EQUAL, LESS = Compare.OPERATOR_EQUAL, Compare.OPERATOR_LESS


def check_put(**fields: Any) -> Transaction:
    """A put with a precondition."""
    with_defaults: dict[str, Any] = {"key": b"k", "precondition": absent()} | fields
    return transactions.put_order(kv_pb2.PutRequest(**with_defaults), LIMITS).transaction


def check_delete(**fields: Any) -> Transaction:
    """A delete with a precondition."""
    with_defaults: dict[str, Any] = {"key": b"k", "precondition": present()} | fields
    return transactions.delete_order(kv_pb2.DeleteRequest(**with_defaults)).transaction


def check_delete_range(*, all_: bool = False, **fields: Any) -> Transaction:
    """A range delete."""
    request = kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(**fields), all=all_)
    return transactions.delete_range_order(request).transaction


def check_write(*changes: kv_pb2.Change) -> Transaction:
    """A batch."""
    return transactions.write_order(kv_pb2.WriteRequest(changes=changes), LIMITS).transaction


def check_txn(
    *then: kv_pb2.TxnOperation,
    compares: tuple[kv_pb2.Compare, ...] = (),
    otherwise: tuple[kv_pb2.TxnOperation, ...] = (),
) -> Transaction:
    """A transaction."""
    request = kv_pb2.TxnRequest(compares=compares, then=then, otherwise=otherwise)
    return transactions.txn_order(request, LIMITS).transaction


def check_compare(**fields: Any) -> Transaction:
    """A transaction with one comparison."""
    return check_txn(get(), compares=(compare(**fields),))


def compare(**fields: Any) -> kv_pb2.Compare:
    """A comparison."""
    return kv_pb2.Compare(**fields)


ACCEPTED: list[tuple[str, Callable[[], Any]]] = [
    ("the longest key put", lambda: check_put(key=KEY_MAX)),
    ("the longest value", lambda: check_put(value=b"v" * 100)),
    ("the longest life", lambda: check_put(ttl_ms=1_000)),
    ("the longest key deleted", lambda: check_delete(key=KEY_MAX)),
    ("the least number", lambda: check_delete(precondition=seq_equals(1))),
    ("the greatest number", lambda: check_put(precondition=seq_equals(2**64 - 1))),
    ("the longest bounds", lambda: check_delete_range(start=KEY_MAX, end=b"l" * KEY_BYTES_MAX)),
    ("all keys", lambda: check_delete_range(all_=True)),
    ("the most changes", lambda: check_write(put(), delete(), add(), delete_range(end=b"a"))),
    ("the most range deletes", lambda: check_write(*[delete_range(start=b"a")] * 2)),
    ("the most bytes", lambda: check_write(put(b"k" * 955, b"v" * 60), add(b"l"))),
    ("the widest adds", lambda: check_write(add(b"k", 2**63 - 1), add(b"k", -(2**63)))),
    (
        "the longest bounds compared",
        lambda: check_compare(range_empty=kv_pb2.KeyRange(end=KEY_MAX)),
    ),
    (
        "the most of all",
        lambda: check_txn(get(), compares=(compare(key=b"k", seq=0),) * 2, otherwise=(get(),)),
    ),
    (
        "the most range deletes in each branch",
        lambda: check_txn(
            *[change(delete_range(start=b"a"))] * 2,
            otherwise=(change(delete_range(start=b"a")),) * 2,
        ),
    ),
    (
        "the most bytes of all",
        lambda: check_txn(
            get(b"k" * 300),
            compares=(compare(key=b"k" * 300, value=b"v" * 100),),
            otherwise=(change(put(b"k" * 224, b"v" * 100)),),
        ),
    ),
    ("a compared value without bytes", lambda: check_compare(key=b"k", value=b"")),
    ("comparisons alone", lambda: check_txn(compares=(compare(key=b"k", seq=1),))),
    ("only the other branch", lambda: check_txn(otherwise=(get(),))),
]

INVALID: list[tuple[str, Callable[[], Any]]] = [
    ("key", lambda: check_put(key=b"")),
    ("key", lambda: check_put(key=KEY_OVER)),
    ("value", lambda: check_put(value=b"v" * 101)),
    ("ttl_ms", lambda: check_put(ttl_ms=1_001)),
    ("precondition", lambda: check_put(precondition=kv_pb2.Precondition())),
    ("precondition.absent", lambda: check_put(precondition=kv_pb2.Precondition(absent=False))),
    ("precondition.present", lambda: check_put(precondition=kv_pb2.Precondition(present=False))),
    ("precondition.seq_equals", lambda: check_put(precondition=seq_equals(0))),
    ("key", lambda: check_delete(key=b"")),
    ("key", lambda: check_delete(key=KEY_OVER)),
    ("precondition", lambda: check_delete(precondition=kv_pb2.Precondition())),
    ("precondition.seq_equals", lambda: check_delete(precondition=seq_equals(0))),
    ("range", check_delete_range),
    ("range.start", lambda: check_delete_range(start=KEY_OVER)),
    ("range.end", lambda: check_delete_range(end=KEY_OVER)),
    ("range.prefix", lambda: check_delete_range(prefix=KEY_OVER)),
    ("range.prefix", lambda: check_delete_range(prefix=b"a", end=b"b")),
    ("range.start", lambda: check_delete_range(start=b"b", end=b"a")),
    ("all", lambda: check_delete_range(all_=True, start=b"a")),
    ("all", lambda: check_delete_range(all_=True, end=b"a")),
    ("all", lambda: check_delete_range(all_=True, prefix=b"a")),
    ("changes", check_write),
    ("changes", lambda: check_write(*[add()] * 5)),
    ("changes", lambda: check_write(*[delete_range(start=b"a")] * 3)),
    ("changes", lambda: check_write(put(b"k" * 956, b"v" * 60), add(b"l"))),
    ("changes[1]", lambda: check_write(put(), kv_pb2.Change())),
    ("changes[0].put.key", lambda: check_write(put(b""), add())),
    ("changes[0].put.value", lambda: check_write(put(b"k", b"v" * 101), add())),
    ("changes[1].put.ttl_ms", lambda: check_write(add(), put(ttl_ms=1_001))),
    ("changes[1].delete.key", lambda: check_write(add(), delete(b""))),
    ("changes[1].delete.key", lambda: check_write(add(), delete(KEY_OVER))),
    ("changes[0].delete_range.range", lambda: check_write(delete_range())),
    ("changes[0].delete_range.range.end", lambda: check_write(delete_range(end=KEY_OVER))),
    ("changes[0].add.key", lambda: check_write(add(b""))),
    ("changes[1].add.key", lambda: check_write(add(), add(KEY_OVER))),
    ("compares, then and otherwise", check_txn),
    ("compares, then and otherwise", lambda: check_txn(*[get()] * 3, otherwise=(get(),) * 2)),
    ("compares, then and otherwise", lambda: check_txn(compares=(compare(key=b"k", seq=1),) * 5)),
    (
        "compares, then and otherwise",
        lambda: check_txn(
            get(b"k" * 300),
            compares=(compare(key=b"k" * 300, value=b"v" * 100),),
            otherwise=(change(put(b"k" * 225, b"v" * 100)),),
        ),
    ),
    ("then", lambda: check_txn(*[change(delete_range(start=b"a"))] * 3)),
    ("otherwise", lambda: check_txn(otherwise=(change(delete_range(start=b"a")),) * 3)),
    ("then[1]", lambda: check_txn(get(), kv_pb2.TxnOperation())),
    ("otherwise[0]", lambda: check_txn(otherwise=(kv_pb2.TxnOperation(),))),
    ("then[0].get.key", lambda: check_txn(get(b""))),
    ("otherwise[0].get.key", lambda: check_txn(otherwise=(get(KEY_OVER),))),
    ("then[0].get.header", lambda: check_txn(get(header=kv_pb2.RequestHeader()))),
    ("then[0].change", lambda: check_txn(change(kv_pb2.Change()))),
    ("then[1].change.put.value", lambda: check_txn(get(), change(put(b"k", b"v" * 101)))),
    ("then[0].change.delete_range.range", lambda: check_txn(change(delete_range()))),
    ("otherwise[0].change.add.key", lambda: check_txn(otherwise=(change(add(b"")),))),
    ("compares[0]", lambda: check_compare(key=b"k")),
    ("compares[0].key", lambda: check_compare(seq=1)),
    ("compares[0].key", lambda: check_compare(key=KEY_OVER, seq=1)),
    ("compares[0].key", lambda: check_compare(key=b"k", range_empty=kv_pb2.KeyRange())),
    ("compares[0].operator", lambda: check_compare(key=b"k", seq=1, operator=UNKNOWN)),
    ("compares[0].operator", lambda: check_compare(key=b"k", exists=True, operator=LESS)),
    (
        "compares[0].operator",
        lambda: check_compare(range_empty=kv_pb2.KeyRange(), operator=Compare.OPERATOR_NOT_EQUAL),
    ),
    (
        "compares[0].range_empty.start",
        lambda: check_compare(range_empty=kv_pb2.KeyRange(start=b"b", end=b"a")),
    ),
    (
        "compares[0].range_empty.prefix",
        lambda: check_compare(range_empty=kv_pb2.KeyRange(prefix=KEY_OVER)),
    ),
    (
        "compares[1].key",
        lambda: check_txn(compares=(compare(key=b"k", seq=1), compare(exists=True))),
    ),
]


@pytest.mark.parametrize(("what", "check"), ACCEPTED, ids=[what for what, _ in ACCEPTED])
def test_limit_is_accepted(what: str, check: Callable[[], Any]) -> None:
    """What is at its limit is accepted."""
    assert what
    check()


@pytest.mark.parametrize(("field", "check"), INVALID)
def test_bad_field_is_named(field: str, check: Callable[[], Any]) -> None:
    """What is past its limit, or makes no sense, is refused with the path of the field."""
    with pytest.raises(InvalidRequest) as caught:
        check()
    assert caught.value.field == field


def test_precondition_is_a_comparison_that_refuses() -> None:
    """A put or delete with a precondition is one comparison of its key, without another branch."""
    assert check_put(value=b"1", ttl_ms=5) == Transaction(
        [Put(b"k", b"1", 5)], [ExistsCompare(b"k", exists=False)]
    )
    assert check_put(precondition=seq_equals(7)).compares == [SeqCompare(b"k", 7)]
    assert check_delete() == Transaction([Delete(b"k")], [ExistsCompare(b"k", exists=True)])


def test_range_delete_is_a_transaction_that_rests_on_nothing() -> None:
    """A range delete is ordered like a put: what is there does not matter."""
    assert check_delete_range(prefix=b"ab") == Transaction([DeleteRange(KeyRange(b"ab", b"ac"))])
    assert check_delete_range(all_=True) == Transaction([DeleteRange(KeyRange(b"", b""))])
    assert not check_delete_range(start=b"a").rests_on_state


def test_operations_keep_their_order() -> None:
    """Each message becomes its operation, in both branches, and its comparison."""
    found = check_txn(
        change(add(b"a", -3)),
        get(b"b"),
        compares=(compare(range_empty=kv_pb2.KeyRange(prefix=b"c")),),
        otherwise=(change(delete_range(start=b"d", end=b"e")),),
    )
    assert found == Transaction(
        [Add(b"a", -3), Get(b"b")],
        [EmptyCompare(KeyRange(b"c", b"d"))],
        [DeleteRange(KeyRange(b"d", b"e"))],
        STREAM_MESSAGE_BYTES_MAX,
    )
    assert check_write(put(b"a", b"1", ttl_ms=5), delete(b"b"), add(b"c", 2)) == Transaction(
        [Put(b"a", b"1", 5), Delete(b"b"), Add(b"c", 2)]
    )


@pytest.mark.parametrize(
    ("number", "operator"),
    [
        (Compare.OPERATOR_UNSPECIFIED, Operator.EQUAL),
        (Compare.OPERATOR_EQUAL, Operator.EQUAL),
        (Compare.OPERATOR_NOT_EQUAL, Operator.NOT_EQUAL),
        (Compare.OPERATOR_LESS, Operator.LESS),
        (Compare.OPERATOR_GREATER, Operator.GREATER),
    ],
)
def test_every_operator_is_known(number: Any, operator: Operator) -> None:
    """Numbers and values are compared in the way that was asked for; equality is the default."""
    by_seq = check_compare(key=b"k", operator=number, seq=5)
    assert by_seq.compares == [SeqCompare(b"k", 5, operator)]
    by_value = check_compare(key=b"k", operator=number, value=b"v")
    assert by_value.compares == [ValueCompare(b"k", b"v", operator)]


@pytest.mark.parametrize("operator", [Compare.OPERATOR_UNSPECIFIED, EQUAL])
def test_existence_is_compared_with_equal(operator: Any) -> None:
    """Existence and emptiness have no other operator than equality."""
    (found,) = check_compare(key=b"k", operator=operator, exists=False).compares
    assert found == ExistsCompare(b"k", exists=False)
    empty = check_compare(operator=operator, range_empty=kv_pb2.KeyRange())
    assert empty.compares == [EmptyCompare(KeyRange(b"", b""))]
