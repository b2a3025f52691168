"""Requests at the limits that a server must accept, in an order in which all conditions hold."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message

from shalekv.core.key_range import KEY_BYTES_MAX
from shalekv.v1 import kv_pb2
from tests.e2e.bad_requests import (
    CLIENT_KEY_BYTES_MAX,
    COUNT_MAX,
    KEY,
    LIMITS,
    UINT64_MAX,
    change,
    range_deletes,
)

LONGEST = bytes(KEY_BYTES_MAX)
LARGEST = bytes(LIMITS.value_bytes_max)
LONGEST_LIFE_MS = LIMITS.ttl_ms_max
DURABILITIES = (
    kv_pb2.DURABILITY_UNSPECIFIED,
    kv_pb2.DURABILITY_DURABLE,
    kv_pb2.DURABILITY_MEMORY,
    kv_pb2.DURABILITY_ARCHIVED,
)
RANGES = (
    kv_pb2.KeyRange(start=LONGEST, end=b"\xff" * KEY_BYTES_MAX),
    kv_pb2.KeyRange(prefix=LONGEST),
    kv_pb2.KeyRange(prefix=b"\xff" * KEY_BYTES_MAX),
    kv_pb2.KeyRange(start=KEY, end=KEY),
    kv_pb2.KeyRange(start=KEY),
    kv_pb2.KeyRange(end=KEY),
)


def reads() -> Iterator[Message]:
    """Of the calls that change nothing."""
    for level in kv_pb2.ReadLevel.values():
        header = kv_pb2.RequestHeader(
            read_level=level,
            max_staleness_ms=UINT64_MAX,
            idempotency_key=bytes(CLIENT_KEY_BYTES_MAX),
        )
        yield kv_pb2.GetRequest(header=header, key=LONGEST)
        yield kv_pb2.BatchGetRequest(header=header, keys=[KEY] * (COUNT_MAX - 1) + [LONGEST])
        yield kv_pb2.ScanRequest(header=header, range=kv_pb2.KeyRange(start=KEY, end=KEY))
    for keys in RANGES:
        yield kv_pb2.ScanRequest(range=keys, limit=UINT64_MAX, limit_bytes=UINT64_MAX)
    yield kv_pb2.ScanRequest(reverse=True, keys_only=True, limit=1, limit_bytes=1)


def writes() -> Iterator[Message]:
    """Of the calls that write one key or one range."""
    longest = kv_pb2.PutRequest(key=LONGEST, value=LARGEST, ttl_ms=LONGEST_LIFE_MS)
    for level in DURABILITIES:
        yield kv_pb2.PutRequest(key=KEY, durability=level)
        yield kv_pb2.DeleteRequest(key=KEY, durability=level)
        yield kv_pb2.DeleteRangeRequest(range=kv_pb2.KeyRange(prefix=KEY), durability=level)
        yield kv_pb2.WriteRequest(changes=[change()], durability=level)
        txn = kv_pb2.TxnRequest(durability=level)
        txn.then.add(change=change())
        yield txn
    longest.precondition.absent = True
    yield longest
    longest.precondition.present = True
    yield longest
    yield kv_pb2.DeleteRequest(key=LONGEST, precondition=kv_pb2.Precondition(present=True))
    yield kv_pb2.DeleteRequest(key=LONGEST, precondition=kv_pb2.Precondition(absent=True))
    for keys in RANGES:
        yield kv_pb2.DeleteRangeRequest(range=keys)
    yield kv_pb2.DeleteRangeRequest(all=True)
    yield kv_pb2.DeleteRangeRequest(all=True, range=kv_pb2.KeyRange())
    for header in (kv_pb2.RequestHeader(idempotency_key=key) for key in (b"1", b"1" * 64)):
        yield kv_pb2.PutRequest(header=header, key=KEY)


def batches() -> Iterator[Message]:
    """Of the calls that take many changes."""
    puts = [change(put=kv_pb2.PutChange(key=b"%d" % n)) for n in range(COUNT_MAX)]
    yield kv_pb2.WriteRequest(changes=puts)
    yield kv_pb2.WriteRequest(changes=range_deletes()[1:])
    each = [
        change(put=kv_pb2.PutChange(key=LONGEST, value=LARGEST, ttl_ms=LONGEST_LIFE_MS)),
        change(delete=kv_pb2.DeleteChange(key=LONGEST)),
        change(add=kv_pb2.AddChange(key=LONGEST, delta=2**63 - 1)),
        *(change(delete_range=kv_pb2.DeleteRangeChange(range=keys)) for keys in RANGES),
    ]
    yield kv_pb2.WriteRequest(changes=each)
    txn = kv_pb2.TxnRequest(
        then=[kv_pb2.TxnOperation(change=one) for one in each],
        otherwise=[kv_pb2.TxnOperation(change=one) for one in each],
    )
    txn.then.add(get=kv_pb2.GetRequest(key=LONGEST))
    for operator in kv_pb2.Compare.Operator.values():
        txn.compares.add(key=LONGEST, seq=UINT64_MAX, operator=operator)
        txn.compares.add(key=LONGEST, value=b"", operator=operator)
    txn.compares.add(key=LONGEST, exists=True)
    for keys in RANGES:
        txn.compares.add(range_empty=keys)
    yield txn
    full = kv_pb2.TxnRequest(compares=[kv_pb2.Compare(key=KEY, exists=True)] * (COUNT_MAX - 2))
    full.then.add(change=change())
    full.otherwise.add(change=change())
    yield full
