"""Requests of the models, and the checks of their replies.

Changes are of few keys, so that they conflict, and so are conditions. A sequence number in a
condition is an index into the present ones (`with_seqs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from shalekv.errors import ShaleError
from shalekv.v1 import kv_pb2
from tests.kit.model import keys_in
from tests.sim.history import Got, Refusal, WriteResult

ALL_KEYS = [b"a", b"ab", b"abc", b"b", b"b\xff", b"b\xff\xff", b"c", b"\xff", b"\xff\xff"]
MEMORY, DURABLE = kv_pb2.DURABILITY_MEMORY, kv_pb2.DURABILITY_DURABLE
METHODS = {
    kv_pb2.PutRequest: "put",
    kv_pb2.DeleteRequest: "delete",
    kv_pb2.DeleteRangeRequest: "delete_range",
    kv_pb2.WriteRequest: "write",
    kv_pb2.TxnRequest: "txn",
}

KEYS = st.sampled_from(ALL_KEYS)
BOUNDS = st.just(b"") | KEYS
RANGES = st.tuples(BOUNDS, BOUNDS).map(
    lambda pair: dict(zip(("start", "end"), sorted(pair) if pair[1] else pair, strict=True))
)
VALUES = st.sampled_from([b"", b"1", b"2", b"x" * 700, bytes(8), b"\xff" * 7 + b"\x7f"])
LIVES_MS = st.sampled_from([0, 0, 0, 1, 10, 1_000])
IDEMPOTENCY_KEYS = st.sampled_from([b"", b"", b"k1", b"k2"])
SEQS = st.integers(0, 8)

PLAIN = st.one_of(
    st.fixed_dictionaries({"put": st.fixed_dictionaries({"key": KEYS, "value": VALUES})}),
    st.fixed_dictionaries(
        {"put": st.fixed_dictionaries({"key": KEYS, "value": VALUES, "ttl_ms": LIVES_MS})}
    ),
    st.fixed_dictionaries({"delete": st.fixed_dictionaries({"key": KEYS})}),
)
CHANGES = st.one_of(
    PLAIN,
    # All keys are deleted by a call of its own.
    st.builds(
        lambda keys: {"delete_range": {"range": keys}},
        RANGES.filter(lambda each: any(each.values())),
    ),
    st.builds(lambda key, ttl_ms: {"touch": {"key": key, "ttl_ms": ttl_ms}}, KEYS, LIVES_MS),
    st.builds(
        lambda key, delta: {"add": {"key": key, "delta": delta}},
        KEYS,
        st.sampled_from([1, -1, 5, 2**62]),
    ),
)
_OPERATIONS = st.lists(
    st.builds(lambda change: {"change": change}, CHANGES)
    | st.builds(lambda key: {"get": {"key": key}}, KEYS),
    max_size=4,
)
_OPERATORS = st.sampled_from(
    [
        kv_pb2.Compare.OPERATOR_EQUAL,
        kv_pb2.Compare.OPERATOR_NOT_EQUAL,
        kv_pb2.Compare.OPERATOR_LESS,
        kv_pb2.Compare.OPERATOR_GREATER,
    ]
)
_COMPARES = st.one_of(
    st.fixed_dictionaries({"key": KEYS, "seq": SEQS, "operator": _OPERATORS}),
    st.fixed_dictionaries({"key": KEYS, "value": VALUES, "operator": _OPERATORS}),
    st.fixed_dictionaries({"key": KEYS, "exists": st.booleans()}),
    st.fixed_dictionaries({"range_empty": RANGES}),
)
_CONDITIONS: Any = st.one_of(
    st.none(),
    st.just({"absent": True}),
    st.just({"present": True}),
    st.fixed_dictionaries({"seq_equals": SEQS}),
)


def one_key_requests(durabilities: Any) -> Any:
    common: Any = {"key": KEYS, "precondition": _CONDITIONS, "durability": durabilities}
    return st.builds(kv_pb2.DeleteRequest, count_deleted=st.booleans(), **common) | st.builds(
        kv_pb2.PutRequest, value=VALUES, ttl_ms=LIVES_MS, **common
    )


def batch_requests(durabilities: Any) -> Any:
    """Several changes in one commit, to some keys more than once; deletes of ranges, or of all."""
    changes: Any = st.lists(PLAIN, min_size=1, max_size=5) | st.lists(
        CHANGES, min_size=1, max_size=5
    )
    return st.builds(kv_pb2.WriteRequest, changes=changes, durability=durabilities) | st.builds(
        lambda keys, durability, is_counted: kv_pb2.DeleteRangeRequest(
            range=kv_pb2.KeyRange(**keys),
            all=not any(keys.values()),
            durability=durability,
            count_deleted=is_counted,
        ),
        RANGES,
        durabilities,
        st.booleans(),
    )


def txn_requests(durabilities: Any) -> Any:
    compares: Any = st.lists(_COMPARES, max_size=2)
    return st.builds(
        kv_pb2.TxnRequest,
        compares=compares,
        then=_OPERATIONS,
        otherwise=_OPERATIONS,
        durability=durabilities,
    ).filter(lambda each: bool(each.compares or each.then or each.otherwise))


SCANS = st.builds(
    kv_pb2.ScanRequest,
    range=RANGES | st.builds(lambda prefix: {"prefix": prefix}, BOUNDS),
    reverse=st.booleans(),
    limit=st.integers(0, 4),
    limit_bytes=st.sampled_from([0, 0, 1, 5, 701]),
)


def with_seqs(request: Any, seqs: Sequence[int]) -> Any:
    """The request, whose conditions name sequence numbers that are there."""
    known = sorted({1, *seqs} - {0})
    if isinstance(request, kv_pb2.TxnRequest):
        for compare in request.compares:
            if compare.HasField("seq"):
                compare.seq = known[compare.seq % len(known)]
    elif isinstance(request, kv_pb2.PutRequest | kv_pb2.DeleteRequest):
        condition = request.precondition
        if condition.HasField("seq_equals"):
            condition.seq_equals = known[condition.seq_equals % len(known)]
    return request


def got(reply: Any) -> Got:
    found = Got(reply.value if reply.found else None, reply.seq, reply.expire_at_ms)
    assert reply.found or (reply.value, found[1:]) == (b"", (0, 0))
    return found


def check_reply(reply: Any, result: WriteResult) -> None:
    if isinstance(reply, kv_pb2.DeleteReply | kv_pb2.DeleteRangeReply):
        assert (reply.deleted if reply.HasField("deleted") else None) == result.deleted
    elif isinstance(reply, kv_pb2.WriteReply):
        assert tuple(reply.counters) == result.results
    elif isinstance(reply, kv_pb2.TxnReply):
        assert reply.succeeded is result.succeeded
        shown: dict[str, Callable[[Any], Got | int | bool]] = {
            "get": lambda each: got(each.get),
            "counter": lambda each: each.counter,
            "touched": lambda each: each.touched,
        }
        kinds = [each.WhichOneof("result") for each in reply.results]
        results = zip(kinds, reply.results, strict=True)
        assert result.results == tuple(kind and shown[kind](each) for kind, each in results)


def check_refusal(error: BaseException | None, refusal: Refusal) -> None:
    """The error is the one that the model expects."""
    assert isinstance(error, ShaleError), error
    assert error.reason == refusal.reason
    if refusal.found_seq is not None:
        assert getattr(error, "found_seq") == refusal.found_seq  # noqa: B009 - of one kind of error


def check_life(reply: kv_pb2.GetReply, found: Got, now_ms: int) -> None:
    """A get without the value tells whether there is one, and how long it lives."""
    assert (reply.found, reply.value) == (found.value is not None, b"")
    assert (reply.seq, reply.expire_at_ms) == found[1:]
    assert reply.ttl_ms == (found.expire_at_ms - now_ms if found.expire_at_ms else 0)


def count_of(scan: kv_pb2.ScanRequest) -> kv_pb2.CountRequest:
    """The count of what a scan shows, to its limit of entries."""
    return kv_pb2.CountRequest(header=scan.header, range=scan.range, limit=scan.limit)


def check_count(
    reply: kv_pb2.CountReply, request: kv_pb2.CountRequest, now: Mapping[bytes, Got]
) -> None:
    """A count is the number of keys that are there, up to its limit."""
    there = len(keys_in([*now], request.range))
    assert reply.count == (min(there, request.limit) if request.limit else there)
    assert reply.more == (there > reply.count)


def check_scan(
    replies: Sequence[kv_pb2.ScanReply], request: kv_pb2.ScanRequest, now: Mapping[bytes, Got]
) -> None:
    """A scan shows all that is there of its range, in its order, up to its limits."""
    wanted = sorted(keys_in([*now], request.range), reverse=request.reverse)
    expected: list[bytes] = []
    size_bytes = 0
    for key in wanted:
        is_full = request.limit_bytes and size_bytes >= request.limit_bytes
        if is_full or (request.limit and len(expected) >= request.limit):
            break
        expected.append(key)
        size_bytes += len(key) + len(now[key].value or b"")
    shown = [
        (entry.key, Got(entry.value, entry.seq, entry.expire_at_ms))
        for reply in replies
        for entry in reply.entries
    ]
    assert shown == [(key, now[key]) for key in expected]
    assert replies[-1].more == (len(expected) < len(wanted))
