"""Conditions: one set of classes for puts, deletes and transactions, and what each call refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shalekv.v1 import kv_pb2
from shalekv_client import (
    Client,
    Compare,
    Condition,
    Exists,
    Missing,
    Operator,
    Put,
    RangeEmpty,
    SeqIs,
    ValueIs,
    operations,
)
from shalekv_client.operations import Operation

NOBODY = "127.0.0.1:1"


def _conditional(operation: Operation[Any]) -> kv_pb2.Precondition:
    kind = kv_pb2.PutRequest if str(operation.kind) == "Put" else kv_pb2.DeleteRequest
    return kind.FromString(operation.data).precondition


@pytest.mark.parametrize(
    ("condition", "precondition", "compare"),
    [
        (
            Exists(b"k"),
            kv_pb2.Precondition(present=True),
            kv_pb2.Compare(key=b"k", exists=True),
        ),
        (
            Missing(b"k"),
            kv_pb2.Precondition(absent=True),
            kv_pb2.Compare(key=b"k", exists=False),
        ),
        (
            SeqIs(b"k", seq=7),
            kv_pb2.Precondition(seq_equals=7),
            kv_pb2.Compare(key=b"k", seq=7, operator=kv_pb2.Compare.OPERATOR_EQUAL),
        ),
        (
            SeqIs(b"k", seq=0),
            kv_pb2.Precondition(absent=True),
            kv_pb2.Compare(key=b"k", seq=0, operator=kv_pb2.Compare.OPERATOR_EQUAL),
        ),
    ],
    ids=repr,
)
def test_a_condition_means_the_same_in_every_call(
    condition: Condition, precondition: kv_pb2.Precondition, compare: kv_pb2.Compare
) -> None:
    """One object is the condition of a put, of a delete and of a transaction; in the first two its
    key may be left out.
    """
    without_key = replace(condition, key=b"")
    for each in (condition, without_key):
        assert _conditional(operations.put(b"k", b"v", condition=each)) == precondition
        assert _conditional(operations.delete(b"k", condition=each)) == precondition
    txn = kv_pb2.TxnRequest.FromString(operations.txn([condition], [Put(b"k", b"v")]).data)
    assert list(txn.compares) == [compare]


@pytest.mark.parametrize(
    "condition",
    [
        Missing(b"another"),
        SeqIs(b"another", seq=0),
        SeqIs(seq=7, op=Operator.GREATER),
        ValueIs(b"k", b"v"),
        RangeEmpty(prefix=b"k"),
        "exists",
    ],
    ids=repr,
)
async def test_a_condition_that_needs_a_transaction_is_refused(condition: Any) -> None:
    """A put or delete with a condition that it cannot express is never sent, least of all without
    the condition; the error names what can.
    """
    async with Client(NOBODY) as client:
        with pytest.raises(ValueError, match=r"txn\(\)"):
            await client.put(b"k", b"v", condition=condition)
        with pytest.raises(ValueError, match=r"txn\(\)"):
            await client.delete(b"k", condition=condition)


@pytest.mark.parametrize(
    "compare", [Exists(), Missing(), SeqIs(seq=7), ValueIs(b"", b"v")], ids=repr
)
async def test_a_transaction_needs_keys(compare: Compare) -> None:
    """A condition without a key is refused before the transaction is sent."""
    async with Client(NOBODY) as client:
        with pytest.raises(ValueError, match="has no key"):
            await client.txn([compare], [Put(b"k", b"v")])


def test_a_sequence_number_is_not_taken_for_a_key() -> None:
    """The number has a name, so that neither order of the two is accepted in silence."""
    seq_is: Any = SeqIs
    for arguments in ((b"k", 7), (7,), (7, b"k")):
        with pytest.raises(TypeError, match="argument"):
            seq_is(*arguments)


@pytest.mark.parametrize(
    ("name", "now"), [("Absent", "Missing"), ("Present", "Exists"), ("SeqEquals", "SeqIs")]
)
def test_old_names_tell_the_new_ones(name: str, now: str) -> None:
    """An import of a name of 0.7 fails with what became of it."""
    with pytest.raises(ImportError, match=f"{name} is {now}.* since .* 0.8"):
        exec(f"from shalekv_client import {name}")  # noqa: S102 (mypy knows the name is gone)
