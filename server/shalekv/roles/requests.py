"""Requests, checked: from messages to the values that the engine works with.

Everything here is pure: it raises `InvalidRequest` with the path of the field, or
`NotImplementedYet`, before any work is done.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shalekv.core.entry import Kind
from shalekv.engine.commit import Change
from shalekv.engine.scan import prefix_end
from shalekv.errors import InvalidRequest, NotImplementedYet
from shalekv.settings import KEY_BYTES_MAX, LimitSettings
from shalekv.v1 import kv_pb2

LevelValue: TypeAlias = "kv_pb2.ReadLevel.ValueType"
DurabilityValue: TypeAlias = "kv_pb2.Durability.ValueType"
# Numbers, because looking one up by name in its enum costs as much as half of a lookup of a key.
COMMITTED = kv_pb2.READ_LEVEL_COMMITTED
LINEARIZABLE = kv_pb2.READ_LEVEL_LINEARIZABLE
UNCOMMITTED = kv_pb2.READ_LEVEL_UNCOMMITTED
MEMORY = kv_pb2.DURABILITY_MEMORY
_LEVELS = frozenset(kv_pb2.ReadLevel.values())
_DURABILITIES = frozenset(kv_pb2.Durability.values())
_SUPPORTED_DURABILITIES: dict[int, DurabilityValue] = {
    kv_pb2.DURABILITY_UNSPECIFIED: kv_pb2.DURABILITY_DURABLE,
    kv_pb2.DURABILITY_DURABLE: kv_pb2.DURABILITY_DURABLE,
    kv_pb2.DURABILITY_MEMORY: kv_pb2.DURABILITY_MEMORY,
    # An acknowledged write is an object of the store already.
    kv_pb2.DURABILITY_ARCHIVED: kv_pb2.DURABILITY_ARCHIVED,
}


@dataclass(frozen=True, slots=True)
class KeyInterval:
    """Keys from `start` on and before `end`; an empty `end` is no bound."""

    start: bytes
    end: bytes


def check_key(key: bytes, field: str) -> bytes:
    """The key, 1 byte to 64 KiB."""
    if not key:
        raise InvalidRequest(field, "a key must not be empty")
    if len(key) > KEY_BYTES_MAX:
        raise InvalidRequest(field, f"{len(key)} bytes, and a key has {KEY_BYTES_MAX} at most")
    return key


def check_keys(request: kv_pb2.BatchGetRequest, limits: LimitSettings) -> None:
    """The keys of a batch get."""
    _check_count(len(request.keys), "keys", limits)
    for index, key in enumerate(request.keys):
        check_key(key, f"keys[{index}]")


def put_changes(request: kv_pb2.PutRequest, limits: LimitSettings) -> list[Change]:
    """The one change of a put."""
    _refuse_precondition(request)
    return [_put(request, _PUT_FIELDS, limits)]


def delete_changes(request: kv_pb2.DeleteRequest) -> list[Change]:
    """The one change of a delete."""
    _refuse_precondition(request)
    return [Change(check_key(request.key, "key"), Kind.TOMBSTONE)]


def write_changes(request: kv_pb2.WriteRequest, limits: LimitSettings) -> list[Change]:
    """The changes of a batch, each key once: the last change of a key wins."""
    _check_count(len(request.changes), "changes", limits)
    changes: dict[bytes, Change] = {}
    size_bytes = 0
    for index, message in enumerate(request.changes):
        try:  # paths of fields are made for errors only: a batch may have thousands of changes
            change = _change(message, limits)
        except InvalidRequest as error:
            path = f"changes[{index}].{error.field}".rstrip(".")
            raise InvalidRequest(path, error.problem) from None
        except NotImplementedYet as error:
            raise NotImplementedYet(f"changes[{index}].{error.feature}") from None
        size_bytes += len(change.key) + len(change.value)
        changes[change.key] = change
    if size_bytes > limits.batch_bytes_max:
        problem = f"{size_bytes} bytes, and batch_bytes_max is {limits.batch_bytes_max}"
        raise InvalidRequest("changes", problem)
    return list(changes.values())


def durability(value: int) -> DurabilityValue:
    """The durability that a write asks for, the default filled in."""
    _check_enum(value, _DURABILITIES, "durability")
    if value == kv_pb2.DURABILITY_QUORUM:
        problem = "this database has no safekeepers: use DURABLE"
        raise InvalidRequest("durability", problem)
    return _SUPPORTED_DURABILITIES[value]


def read_level(header: kv_pb2.RequestHeader) -> LevelValue:
    """The level that a read asks for, the default filled in; the rest of the header is checked."""
    check_header(header)
    return header.read_level or COMMITTED


def check_header(header: kv_pb2.RequestHeader) -> None:
    """Refuse what is unknown, and what this version does not do: nothing is ignored in silence.

    `max_staleness_ms` holds for every value at a writer, which is never stale.
    """
    _check_enum(header.read_level, _LEVELS, "header.read_level")
    if header.min_seq:
        raise NotImplementedYet("header.min_seq")
    if header.snapshot_id:
        raise NotImplementedYet("header.snapshot_id")
    if header.idempotency_key:
        raise NotImplementedYet("header.idempotency_key")


def key_interval(key_range: kv_pb2.KeyRange) -> KeyInterval:
    """The interval of a range or prefix."""
    for name in ("start", "end", "prefix"):
        length = len(getattr(key_range, name))
        if length > KEY_BYTES_MAX:
            problem = f"{length} bytes, and a key has {KEY_BYTES_MAX} at most"
            raise InvalidRequest(f"range.{name}", problem)
    if key_range.prefix:
        if key_range.start or key_range.end:
            raise InvalidRequest("range.prefix", "a prefix excludes start and end")
        return KeyInterval(key_range.prefix, prefix_end(key_range.prefix))
    if key_range.end and key_range.start > key_range.end:
        raise InvalidRequest("range.start", "the start of the range is after its end")
    return KeyInterval(key_range.start, key_range.end)


def scan_interval(request: kv_pb2.ScanRequest) -> KeyInterval:
    """The interval of a scan."""
    if request.page_token:
        raise NotImplementedYet("page_token")
    return key_interval(request.range)


def _change(message: kv_pb2.Change, limits: LimitSettings) -> Change:
    match message.WhichOneof("change"):
        case "put":
            return _put(message.put, _PUT_CHANGE_FIELDS, limits)
        case "delete":
            return Change(check_key(message.delete.key, "delete.key"), Kind.TOMBSTONE)
        case None:
            raise InvalidRequest("", "no change is set")
        case other:
            raise NotImplementedYet(other)


class _PutFields(NamedTuple):
    """The paths of the fields of a put."""

    key: str = "key"
    value: str = "value"
    ttl_ms: str = "ttl_ms"


_PUT_FIELDS = _PutFields()
_PUT_CHANGE_FIELDS = _PutFields("put.key", "put.value", "put.ttl_ms")


def _put(
    message: kv_pb2.PutRequest | kv_pb2.PutChange, fields: _PutFields, limits: LimitSettings
) -> Change:
    key, value = message.key, message.value
    check_key(key, fields.key)
    if len(value) > limits.value_bytes_max:
        problem = f"{len(value)} bytes, and value_bytes_max is {limits.value_bytes_max}"
        raise InvalidRequest(fields.value, problem)
    if message.ttl_ms:
        raise NotImplementedYet(fields.ttl_ms)
    return Change(key, Kind.PUT, value)


def _refuse_precondition(request: kv_pb2.PutRequest | kv_pb2.DeleteRequest) -> None:
    if request.HasField("precondition"):
        raise NotImplementedYet("precondition")


def _check_count(count: int, field: str, limits: LimitSettings) -> None:
    if not count:
        raise InvalidRequest(field, "at least one is needed")
    if count > limits.batch_count_max:
        problem = f"{count} of them, and batch_count_max is {limits.batch_count_max}"
        raise InvalidRequest(field, problem)


def _check_enum(value: int, known: AbstractSet[int], field: str) -> None:
    if value not in known:
        raise InvalidRequest(field, f"{value} is not a known value")
