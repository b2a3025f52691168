"""Makes of a random request one that a server must not call invalid, with as few changes as that
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from shalekv.core.key_range import KEY_BYTES_MAX
from shalekv.v1 import kv_pb2

VALUE_BYTES_MAX = 1_000
DELETE_RANGE_COUNT_MAX = 2
TTL_MS_MAX = 3_155_760_000_000
CLIENT_KEY_BYTES_MAX = 64
SUPPORTED_DURABILITIES = (0, 1, 2, 4)
UNCOMMITTED, OPERATORS = kv_pb2.READ_LEVEL_UNCOMMITTED, 5
KEY = b"a"


def mend(message: Message) -> None:
    """Mend a message and all that is inside of it; what encloses it comes last."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                mend(part)
    mended = _BY_KIND.get(type(message))
    if mended is not None:
        mended(message)


def _header(header: kv_pb2.RequestHeader) -> None:
    header.ClearField("snapshot_id")
    if not UNCOMMITTED > header.read_level >= 0:
        header.ClearField("read_level")
    header.idempotency_key = header.idempotency_key[:CLIENT_KEY_BYTES_MAX]


def _range(keys: kv_pb2.KeyRange) -> None:
    for name in ("start", "end", "prefix"):
        setattr(keys, name, getattr(keys, name)[:KEY_BYTES_MAX])
    if keys.prefix:
        keys.ClearField("start")
        keys.ClearField("end")
    elif keys.end:
        keys.start, keys.end = min(keys.start, keys.end), max(keys.start, keys.end)


def _precondition(condition: kv_pb2.Precondition) -> None:
    match condition.WhichOneof("condition"):
        case "present":
            condition.present = True
        case "seq_equals":
            condition.seq_equals = condition.seq_equals or 1
        case _:
            condition.absent = True


def _key(message: Any) -> None:
    message.key = message.key[:KEY_BYTES_MAX] or KEY


def _put(put: Any) -> None:
    _key(put)
    put.value = put.value[:VALUE_BYTES_MAX]
    put.ttl_ms = min(put.ttl_ms, TTL_MS_MAX)


def _durability(request: Any) -> None:
    if request.durability not in SUPPORTED_DURABILITIES:
        request.ClearField("durability")


def _put_request(request: kv_pb2.PutRequest) -> None:
    _put(request)
    _durability(request)


def _delete_request(request: kv_pb2.DeleteRequest) -> None:
    _key(request)
    _durability(request)


def _keys(request: kv_pb2.BatchGetRequest) -> None:
    keys = [key[:KEY_BYTES_MAX] or KEY for key in request.keys] or [KEY]
    del request.keys[:]
    request.keys.extend(keys)


def _names_keys(keys: kv_pb2.KeyRange) -> bool:
    return bool(keys.start or keys.end or keys.prefix)


def _delete_range(request: kv_pb2.DeleteRangeRequest) -> None:
    request.all = not _names_keys(request.range)
    _durability(request)


def _delete_range_change(change: kv_pb2.DeleteRangeChange) -> None:
    if not _names_keys(change.range):
        change.range.prefix = KEY


def _change(change: kv_pb2.Change) -> None:
    if change.WhichOneof("change") is None:
        change.put.key = KEY


def _few_range_deletes(changes: list[kv_pb2.Change]) -> None:
    deletes = [each for each in changes if each.HasField("delete_range")]
    for change in deletes[DELETE_RANGE_COUNT_MAX:]:
        change.delete.key = KEY


def _write(request: kv_pb2.WriteRequest) -> None:
    if not request.changes:
        request.changes.add().put.key = KEY
    _few_range_deletes(list(request.changes))
    _durability(request)


def _compare(compare: kv_pb2.Compare) -> None:
    if not OPERATORS > compare.operator >= 0:
        compare.ClearField("operator")
    match compare.WhichOneof("test"):
        case "seq" | "value":
            _key(compare)
        case "range_empty":
            compare.ClearField("operator")
            compare.ClearField("key")
        case _:
            compare.exists = compare.exists or False
            compare.ClearField("operator")
            _key(compare)


def _operation(operation: kv_pb2.TxnOperation) -> None:
    match operation.WhichOneof("operation"):
        case "change":
            return
        case _:
            operation.get.ClearField("header")
            _key(operation.get)


def _txn(request: kv_pb2.TxnRequest) -> None:
    if not (request.compares or request.then or request.otherwise):
        request.then.add().get.key = KEY
    for branch in (request.then, request.otherwise):
        _few_range_deletes([each.change for each in branch if each.HasField("change")])
    _durability(request)


def _scan(request: kv_pb2.ScanRequest) -> None:
    request.ClearField("page_token")


def _session_operation(operation: kv_pb2.SessionOperation) -> None:
    if operation.WhichOneof("operation") is None:
        operation.get.key = KEY


def _session(request: kv_pb2.SessionRequest) -> None:
    if not request.operations:
        request.operations.add().get.key = KEY


_BY_KIND: Mapping[type[Message], Callable[[Any], None]] = {
    kv_pb2.RequestHeader: _header,
    kv_pb2.KeyRange: _range,
    kv_pb2.Precondition: _precondition,
    kv_pb2.GetRequest: _key,
    kv_pb2.BatchGetRequest: _keys,
    kv_pb2.PutRequest: _put_request,
    kv_pb2.DeleteRequest: _delete_request,
    kv_pb2.DeleteRangeRequest: _delete_range,
    kv_pb2.PutChange: _put,
    kv_pb2.DeleteChange: _key,
    kv_pb2.AddChange: _key,
    kv_pb2.DeleteRangeChange: _delete_range_change,
    kv_pb2.Change: _change,
    kv_pb2.WriteRequest: _write,
    kv_pb2.Compare: _compare,
    kv_pb2.TxnOperation: _operation,
    kv_pb2.TxnRequest: _txn,
    kv_pb2.ScanRequest: _scan,
    kv_pb2.SessionOperation: _session_operation,
    kv_pb2.SessionRequest: _session,
}
