"""Requests that a server must refuse, by call: every field one past its limit, or without sense.

What several calls share (keys, ranges, changes, headers) is written once, and put into each place
of each request where it can stand; the path of the field tells which place was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, cast

from google.protobuf.message import Message

from shalekv.core.key_range import KEY_BYTES_MAX
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2

LIMITS = LimitSettings()
COUNT_MAX = LIMITS.batch_count_max
KEY, VALUE = b"key", b"value"
LONG_KEY = bytes(KEY_BYTES_MAX + 1)
LONG_VALUE = bytes(LIMITS.value_bytes_max + 1)
LONG_TTL_MS = LIMITS.ttl_ms_max + 1
UINT64_MAX = 2**64 - 1
UNKNOWN_NUMBERS = (4711, -1, 2**31 - 1)  # that no enum has
CLIENT_KEY_BYTES_MAX = 64
SNAPSHOT_ID_BYTES = 16

Make: TypeAlias = Callable[[Any], Message]  # puts a part into a request


class Bad(NamedTuple):
    """A request, the field that its error names, and what the message says."""

    request: Message
    field: str
    says: str


def change(**fields: Any) -> kv_pb2.Change:
    """A change of a batch, by default a good put."""
    return kv_pb2.Change(**(fields or {"put": kv_pb2.PutChange(key=KEY, value=VALUE)}))


def number(value: int) -> Any:
    """The number of an enum, known or not."""
    return cast("Any", value)


def bad_keys(field: str, make: Make) -> Iterator[Bad]:
    """A key that is no key."""
    yield Bad(make(b""), field, "must not be empty")
    yield Bad(make(LONG_KEY), field, "65537 bytes, and a key has 65536 at most")


def bad_enums(field: str, make: Make) -> Iterator[Bad]:
    """Numbers that mean nothing."""
    for unknown in UNKNOWN_NUMBERS:
        yield Bad(make(number(unknown)), field, f"{unknown} is not a known value")


def bad_ranges(field: str, make: Make) -> Iterator[Bad]:
    """A range that is none."""
    for name in ("start", "end", "prefix"):
        long = kv_pb2.KeyRange(**{name: LONG_KEY})
        yield Bad(make(long), f"{field}.{name}", "65537 bytes, and a key has 65536 at most")
    after = kv_pb2.KeyRange(start=b"b", end=b"a")
    yield Bad(make(after), f"{field}.start", "after its end")
    for both in (kv_pb2.KeyRange(prefix=KEY, start=KEY), kv_pb2.KeyRange(prefix=KEY, end=b"z")):
        yield Bad(make(both), f"{field}.prefix", "excludes start and end")


def bad_puts(field: str, make: Callable[..., Message]) -> Iterator[Bad]:
    """Key, value and life of a put; `make` takes them by name, and the others are good."""

    def put(**fields: Any) -> Message:
        return make(**{"key": KEY, "value": VALUE} | fields)

    yield from bad_keys(f"{field}key", lambda key: put(key=key))
    long = "3145729 bytes, and value_bytes_max is 3145728"
    yield Bad(put(value=LONG_VALUE), f"{field}value", long)
    for ttl_ms in (LONG_TTL_MS, UINT64_MAX):
        yield Bad(put(ttl_ms=ttl_ms), f"{field}ttl_ms", f"{ttl_ms} ms, and ttl_ms_max is")


def bad_changes(field: str, make: Make) -> Iterator[Bad]:
    """A change that is none."""
    yield Bad(make(kv_pb2.Change()), field, "no change is set")
    yield from bad_puts(
        f"{field}.put.", lambda **fields: make(change(put=kv_pb2.PutChange(**fields)))
    )
    yield from bad_keys(
        f"{field}.delete.key", lambda key: make(change(delete=kv_pb2.DeleteChange(key=key)))
    )
    yield from bad_keys(
        f"{field}.add.key", lambda key: make(change(add=kv_pb2.AddChange(key=key, delta=1)))
    )
    deletes_all = "names neither start, end nor prefix"
    for all_keys in (kv_pb2.DeleteRangeChange(), kv_pb2.DeleteRangeChange(range=kv_pb2.KeyRange())):
        bad = make(change(delete_range=all_keys))
        yield Bad(bad, f"{field}.delete_range.range", deletes_all)
    yield from bad_ranges(
        f"{field}.delete_range.range",
        lambda keys: make(change(delete_range=kv_pb2.DeleteRangeChange(range=keys))),
    )


def bad_headers(make: Make) -> Iterator[Bad]:
    """What a header must not say, whatever the call."""
    yield from bad_enums(
        "header.read_level", lambda level: make(kv_pb2.RequestHeader(read_level=level))
    )
    long = kv_pb2.RequestHeader(idempotency_key=bytes(CLIENT_KEY_BYTES_MAX + 1))
    yield Bad(make(long), "header.idempotency_key", "65 bytes, and an idempotency key has 64")
    for length in (SNAPSHOT_ID_BYTES - 1, SNAPSHOT_ID_BYTES + 1):
        other = kv_pb2.RequestHeader(snapshot_id=bytes(length))
        yield Bad(
            make(other), "header.snapshot_id", f"{length} bytes, and the id of a snapshot has"
        )


def bad_write_headers(make: Make) -> Iterator[Bad]:
    """What the header of a write must not say."""
    yield from bad_headers(make)
    at_snapshot = kv_pb2.RequestHeader(snapshot_id=bytes(SNAPSHOT_ID_BYTES))
    yield Bad(make(at_snapshot), "header.snapshot_id", "a snapshot is read, and never written")


def bad_durabilities(make: Make) -> Iterator[Bad]:
    """What a write cannot ask for."""
    yield from bad_enums("durability", make)
    yield Bad(make(kv_pb2.DURABILITY_QUORUM), "durability", "no safekeepers")


def bad_preconditions(make: Callable[..., Message]) -> Iterator[Bad]:
    """What a put or delete cannot demand; `make` takes fields by name."""
    for field, condition, says in (
        ("", {}, "no condition is set"),
        (".absent", {"absent": False}, "false is refused"),
        (".present", {"present": False}, "false is refused"),
        (".seq_equals", {"seq_equals": 0}, "0 is no sequence number"),
    ):
        demand = kv_pb2.Precondition(**cast("Any", condition))
        yield Bad(make(precondition=demand), f"precondition{field}", says)
    unsure = kv_pb2.RequestHeader(read_level=kv_pb2.READ_LEVEL_UNCOMMITTED)
    absent = kv_pb2.Precondition(absent=True)
    yield Bad(make(precondition=absent, header=unsure), "header.read_level", "COMMITTED")


def bad_gets() -> Iterator[Bad]:
    """Of `KV.Get`."""
    yield from bad_keys("key", lambda key: kv_pb2.GetRequest(key=key))
    yield from bad_headers(lambda header: kv_pb2.GetRequest(header=header, key=KEY))


def bad_batch_gets() -> Iterator[Bad]:
    """Of `KV.BatchGet`."""
    yield Bad(kv_pb2.BatchGetRequest(), "keys", "at least one is needed")
    too_many = kv_pb2.BatchGetRequest(keys=[KEY] * (COUNT_MAX + 1))
    yield Bad(too_many, "keys", "10001 of them, and batch_count_max is 10000")
    yield from bad_keys("keys[1]", lambda key: kv_pb2.BatchGetRequest(keys=[KEY, key, KEY]))
    yield from bad_headers(lambda header: kv_pb2.BatchGetRequest(header=header, keys=[KEY]))


def bad_put_requests() -> Iterator[Bad]:
    """Of `KV.Put`."""

    def put(**fields: Any) -> kv_pb2.PutRequest:
        return kv_pb2.PutRequest(**{"key": KEY, "value": VALUE} | fields)

    yield from bad_puts("", put)
    yield from bad_write_headers(lambda header: put(header=header))
    yield from bad_durabilities(lambda level: put(durability=level))
    yield from bad_preconditions(put)


def bad_deletes() -> Iterator[Bad]:
    """Of `KV.Delete`."""

    def delete(**fields: Any) -> kv_pb2.DeleteRequest:
        return kv_pb2.DeleteRequest(**{"key": KEY} | fields)

    yield from bad_keys("key", lambda key: delete(key=key))
    yield from bad_write_headers(lambda header: delete(header=header))
    yield from bad_durabilities(lambda level: delete(durability=level))
    yield from bad_preconditions(delete)


def bad_delete_ranges() -> Iterator[Bad]:
    """Of `KV.DeleteRange`."""

    def delete(**fields: Any) -> kv_pb2.DeleteRangeRequest:
        return kv_pb2.DeleteRangeRequest(**{"range": kv_pb2.KeyRange(prefix=KEY)} | fields)

    yield from bad_ranges("range", lambda keys: delete(range=keys))
    for nothing in (kv_pb2.DeleteRangeRequest(), delete(range=kv_pb2.KeyRange())):
        yield Bad(nothing, "range", "to delete all keys set `all`")
    yield Bad(delete(all=True), "all", "the range names some keys")
    yield from bad_write_headers(lambda header: delete(header=header))
    yield from bad_durabilities(lambda level: delete(durability=level))


def bad_writes() -> Iterator[Bad]:
    """Of `KV.Write`."""

    def write(*changes: kv_pb2.Change, **fields: Any) -> kv_pb2.WriteRequest:
        return kv_pb2.WriteRequest(changes=changes or [change()], **fields)

    yield Bad(kv_pb2.WriteRequest(), "changes", "at least one is needed")
    too_many = write(*[change()] * (COUNT_MAX + 1))
    yield Bad(too_many, "changes", "10001 of them, and batch_count_max is 10000")
    yield Bad(write(*range_deletes()), "changes", "101 range deletes, and delete_range_count_max")
    yield from bad_changes("changes[1]", lambda bad: write(change(), bad, change()))
    yield from bad_write_headers(lambda header: write(header=header))
    yield from bad_durabilities(lambda level: write(durability=level))


def range_deletes() -> list[kv_pb2.Change]:
    """One more than a commit may have."""
    one = change(delete_range=kv_pb2.DeleteRangeChange(range=kv_pb2.KeyRange(prefix=KEY)))
    return [one] * (LIMITS.delete_range_count_max + 1)


def bad_compares(make: Make) -> Iterator[Bad]:
    """A comparison that is none; `make` puts it into a transaction as the second."""
    field = "compares[1]"
    yield Bad(make(kv_pb2.Compare(key=KEY)), field, "no test is set")
    tests: list[dict[str, Any]] = [{"seq": 1}, {"value": VALUE}, {"exists": True}]
    for test in tests:
        for bad in bad_keys(f"{field}.key", lambda key: kv_pb2.Compare(key=key, **test)):  # noqa: B023 (used at once)
            yield bad._replace(request=make(bad.request))
        for bad in bad_enums(
            f"{field}.operator",
            lambda operator: kv_pb2.Compare(key=KEY, operator=operator, **test),  # noqa: B023 (used at once)
        ):
            yield bad._replace(request=make(bad.request))
    less = kv_pb2.Compare.OPERATOR_LESS
    for unordered in (
        kv_pb2.Compare(key=KEY, exists=True, operator=less),
        kv_pb2.Compare(range_empty=kv_pb2.KeyRange(prefix=KEY), operator=less),
    ):
        yield Bad(make(unordered), f"{field}.operator", "only compared with EQUAL")
    with_key = kv_pb2.Compare(key=KEY, range_empty=kv_pb2.KeyRange(prefix=KEY))
    yield Bad(make(with_key), f"{field}.key", "must be empty when a range is compared")
    yield from bad_ranges(
        f"{field}.range_empty", lambda keys: make(kv_pb2.Compare(range_empty=keys))
    )


def bad_txns() -> Iterator[Bad]:
    """Of `KV.Txn`."""
    holds = kv_pb2.Compare(key=KEY, exists=False)
    good = kv_pb2.TxnOperation(change=change())

    def txn(**fields: Any) -> kv_pb2.TxnRequest:
        return kv_pb2.TxnRequest(**{"then": [good]} | fields)

    everything = "compares, then and otherwise"
    yield Bad(kv_pb2.TxnRequest(), everything, "at least one is needed")
    too_many = txn(compares=[holds] * COUNT_MAX)
    yield Bad(too_many, everything, "10001 of them, and batch_count_max is 10000")
    yield from bad_compares(lambda compare: txn(compares=[holds, compare]))
    for branch in ("then", "otherwise"):
        yield from bad_operations(f"{branch}[1]", _into(txn, branch, good))
        deletes = [kv_pb2.TxnOperation(change=delete) for delete in range_deletes()]
        yield Bad(txn(**{branch: deletes}), branch, "101 range deletes")
    yield from bad_write_headers(lambda header: txn(header=header))
    unsure = kv_pb2.RequestHeader(read_level=kv_pb2.READ_LEVEL_UNCOMMITTED)
    yield Bad(txn(compares=[holds], header=unsure), "header.read_level", "COMMITTED")
    yield from bad_durabilities(lambda level: txn(durability=level))


def _into(txn: Callable[..., Message], branch: str, good: kv_pb2.TxnOperation) -> Make:
    return lambda operation: txn(**{branch: [good, operation]})


def bad_operations(field: str, make: Make) -> Iterator[Bad]:
    """An operation of a transaction that is none."""

    def get(**fields: Any) -> Message:
        request = kv_pb2.GetRequest(**{"key": KEY} | fields)
        return make(kv_pb2.TxnOperation(get=request))

    yield Bad(make(kv_pb2.TxnOperation()), field, "transactions do not nest")
    yield from bad_keys(f"{field}.get.key", lambda key: get(key=key))
    for header in (kv_pb2.RequestHeader(), kv_pb2.RequestHeader(max_staleness_ms=1)):
        yield Bad(get(header=header), f"{field}.get.header", "no header of its own")
    yield from bad_changes(f"{field}.change", lambda bad: make(kv_pb2.TxnOperation(change=bad)))


def bad_scans() -> Iterator[Bad]:
    """Of `KV.Scan`."""
    yield from bad_ranges("range", lambda keys: kv_pb2.ScanRequest(range=keys))
    for token in (b"next", bytes(1_000_000)):
        yield Bad(kv_pb2.ScanRequest(page_token=token), "page_token", "is no")
    yield from bad_headers(lambda header: kv_pb2.ScanRequest(header=header))


BY_CALL: dict[str, Callable[[], Iterator[Bad]]] = {
    "Get": bad_gets,
    "BatchGet": bad_batch_gets,
    "Put": bad_put_requests,
    "Delete": bad_deletes,
    "DeleteRange": bad_delete_ranges,
    "Write": bad_writes,
    "Txn": bad_txns,
    "Scan": bad_scans,
}

# Fields of which every value is good; `id` of a session is tested with sessions.
ANYTHING_GOES = frozenset(
    "header.min_seq header.max_staleness_ms limit limit_bytes reverse keys_only resumable "
    "compares.seq compares.value compares.exists changes.add.delta then.change.add.delta "
    "otherwise.change.add.delta".split()
)
REFUSED_AS_A_WHOLE = frozenset(["then.get.header", "otherwise.get.header"])
