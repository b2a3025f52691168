"""The table of needs: what each request needs that the access policy has to allow.

An entry must never be narrower than what the service then does with the request. A request that the
service refuses, such as one with a malformed range, may need more than it says.

Reads need READ on each key or range, and so does whatever else tells of a value: comparisons,
preconditions, previous values of a watch, an `add`, whose reply has the sum, a `touch`, whose
reply tells whether there is a value, and deletes that count what they delete. Changes of single
keys need WRITE, range deletes DELETE_RANGE on the whole range, watches WATCH, and loads INGEST on
the range of each file. A page token needs what its scan needs as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from google.protobuf.message import Message

from shalekv.protocol.access import ALL_KEYS, Need, Verb
from shalekv.protocol.entry import KeyRange, prefix_end
from shalekv.v1 import admin_pb2 as admin
from shalekv.v1 import kv_pb2 as kv

# All of these. No need at all: whoever may do anything may do this. None: everybody may.
Needs: TypeAlias = Sequence[Need]
NeedsOf: TypeAlias = Callable[[Any], Needs | None]

ANYTHING: Needs = ()
_ADMIN: Needs = (Need(Verb.ADMIN),)

_new = tuple.__new__  # what `Need()` calls in the end, at half the cost
_READ, _WRITE, _DELETE_RANGE = Verb.READ, Verb.WRITE, Verb.DELETE_RANGE


def needs_of(request: Message) -> Needs | None:
    """Return what a request needs. Raises `KeyError` for requests that are not in the table."""
    return TABLE[type(request)](request)


def is_known(request: Message) -> bool:
    """Return whether requests of this kind are in the table."""
    return type(request) in TABLE


def range_of(message: kv.KeyRange) -> KeyRange:
    """Return the keys of a range; all keys if it is malformed."""
    start, end, prefix = message.start, message.end, message.prefix
    if prefix:
        return ALL_KEYS if start or end else KeyRange(prefix, prefix_end(prefix))
    if end and start >= end:
        return _key_range(start) if start == end else ALL_KEYS
    return KeyRange(start, end)


def _key_range(key: bytes) -> KeyRange:
    return KeyRange(key, key + b"\0")


def _key(verb: Verb, key: bytes) -> Need:
    return _new(Need, (verb, _new(KeyRange, (key, key + b"\0"))))


def _get(request: kv.GetRequest) -> Needs:
    return (_key(_READ, request.key),)


def _batch_get(request: kv.BatchGetRequest) -> Needs:
    return [_key(_READ, key) for key in request.keys]


def _put(request: kv.PutRequest) -> Needs:
    key = request.key
    if request.HasField("precondition"):
        return (_key(_WRITE, key), _key(_READ, key))
    return (_key(_WRITE, key),)


def _delete(request: kv.DeleteRequest) -> Needs:
    key = request.key
    if request.count_deleted or request.HasField("precondition"):
        return (_key(_WRITE, key), _key(_READ, key))
    return (_key(_WRITE, key),)


def _delete_range(request: kv.DeleteRangeRequest) -> Needs:
    keys = ALL_KEYS if request.all else range_of(request.range)
    if request.count_deleted:
        return (Need(_DELETE_RANGE, keys), Need(_READ, keys))
    return (Need(_DELETE_RANGE, keys),)


def _put_change(change: kv.Change) -> Needs:
    return (_key(_WRITE, change.put.key),)


def _delete_change(change: kv.Change) -> Needs:
    return (_key(_WRITE, change.delete.key),)


def _delete_range_change(change: kv.Change) -> Needs:
    return (Need(_DELETE_RANGE, range_of(change.delete_range.range)),)


def _add_change(change: kv.Change) -> Needs:
    return (_key(_WRITE, change.add.key), _key(_READ, change.add.key))


def _touch_change(change: kv.Change) -> Needs:
    return (_key(_WRITE, change.touch.key), _key(_READ, change.touch.key))


_CHANGES: Mapping[str | None, Callable[[kv.Change], Needs]] = MappingProxyType(
    {
        "put": _put_change,
        "delete": _delete_change,
        "delete_range": _delete_range_change,
        "add": _add_change,
        "touch": _touch_change,
        None: lambda _: ANYTHING,  # which the service refuses
    }
)


def _of_changes(changes: Iterable[kv.Change]) -> list[Need]:
    return [need for each in changes for need in _CHANGES[each.WhichOneof("change")](each)]


def _write(request: kv.WriteRequest) -> Needs:
    return _of_changes(request.changes)


def _of_compare(compare: kv.Compare) -> Need:
    if compare.HasField("range_empty"):
        # With a key as well it is malformed.
        return Need(_READ, ALL_KEYS if compare.key else range_of(compare.range_empty))
    return _key(_READ, compare.key)


def _of_branch(operations: Sequence[kv.TxnOperation]) -> list[Need]:
    gets = [each.get for each in operations if each.HasField("get")]
    changes = [each.change for each in operations if each.HasField("change")]
    return [*(_key(_READ, get.key) for get in gets), *_of_changes(changes)]


def _txn(request: kv.TxnRequest) -> Needs:
    compares = [_of_compare(each) for each in request.compares]
    return [*compares, *_of_branch(request.then), *_of_branch(request.otherwise)]


def _scan(request: kv.ScanRequest | kv.CountRequest) -> Needs:
    return (Need(_READ, range_of(request.range)),)


def _watch(create: kv.WatchCreate) -> Needs:
    keys = range_of(create.range)
    if create.previous_value:
        return (Need(Verb.WATCH, keys), Need(_READ, keys))
    return (Need(Verb.WATCH, keys),)


def _ingest(request: admin.IngestSstRequest) -> Needs:
    files = ((each.first_key, each.last_key) for each in request.ssts)
    return [
        Need(Verb.INGEST, KeyRange(first, last + b"\0") if first <= last else ALL_KEYS)
        for first, last in files
    ] or (Need(Verb.INGEST),)


def _administer(_request: Message) -> Needs:
    return _ADMIN


def _anything(_request: Message) -> Needs:
    return ANYTHING


def _open(_request: Message) -> None:
    """Everybody may."""


# A session and a stream of watches need nothing of their own: their operations and watches do.
TABLE: Mapping[type[Message], NeedsOf] = MappingProxyType(
    {
        kv.GetRequest: _get,
        kv.BatchGetRequest: _batch_get,
        kv.PutRequest: _put,
        kv.DeleteRequest: _delete,
        kv.DeleteRangeRequest: _delete_range,
        kv.WriteRequest: _write,
        kv.TxnRequest: _txn,
        kv.ScanRequest: _scan,
        kv.CountRequest: _scan,
        kv.SessionRequest: _anything,
        kv.WatchRequest: _anything,
        kv.WatchCreate: _watch,
        admin.StatusRequest: _anything,
        admin.StatsRequest: _administer,
        admin.ListSlowCallsRequest: _administer,
        admin.ProfileRequest: _administer,
        admin.CreateSnapshotRequest: _administer,
        admin.RenewSnapshotRequest: _administer,
        admin.ListSnapshotsRequest: _administer,
        admin.DeleteSnapshotRequest: _administer,
        admin.IngestSstRequest: _ingest,
        admin.WhoAmIRequest: _open,
        admin.GetAccessPolicyRequest: _administer,
        admin.SetAccessPolicyRequest: _administer,
    }
)
