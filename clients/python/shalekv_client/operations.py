"""The operations of a client: for each one its request, and how its reply is decoded.

An operation does not depend on how it is sent: in a unary call (`UnaryCalls`), with others in a
message of the session that the client itself keeps, or in an explicit session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from shalekv.v1 import kv_pb2
from shalekv_client.changes import Change, Compare, Condition, comparison, precondition, to_message
from shalekv_client.error_table import error_of, not_an_answer
from shalekv_client.policies import Destination, Durability, ReadLevel
from shalekv_client.results import (
    Commit,
    TxnResult,
    Value,
    commit_of,
    txn_result_of,
    value_of,
)
from shalekv_wire.calls import Channel
from shalekv_wire.status import CallFailed

ResultT = TypeVar("ResultT")
RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)


@dataclass(frozen=True, slots=True)
class Get:
    """Reads a key inside a transaction, as it was before the changes of the transaction."""

    key: bytes


TxnOperation: TypeAlias = Get | Change


class Pinned(Protocol):
    """A reference to a snapshot: any object with an id of 16 bytes."""

    @property
    def id(self) -> bytes: ...


At: TypeAlias = (
    bytes | Pinned | None
)  # the snapshot at which a read is made; None: the newest state


@dataclass(frozen=True, slots=True)
class Operation(Generic[ResultT]):
    """One operation, ready to be sent, once or repeatedly."""

    name: str  # its field in `SessionOperation` and `SessionResult`
    request: Message
    decode: Callable[[Any], ResultT]  # the result from the reply; ValueError if it does not fit
    is_repeatable: bool  # whether it may be sent again when its outcome is unknown
    read_level: ReadLevel | None = None  # None: it is a write
    min_seq: int = 0  # the sequence number that the reply to a read must have reached

    @property
    def method(self) -> str:
        """The method of the service KV for the same operation."""
        return self.name.title().replace("_", "")

    @property
    def size_bytes(self) -> int:
        """The bytes of the request on the wire."""
        return self.request.ByteSize()


def get(
    key: bytes,
    *,
    read_level: ReadLevel = ReadLevel.COMMITTED,
    max_staleness_ms: int = 0,
    at: At = None,
    min_seq: int = 0,
) -> Operation[Value | None]:
    """The value of `key`; None when it has none."""
    header = read_header(read_level, max_staleness_ms=max_staleness_ms, at=at)
    request = kv_pb2.GetRequest(header=header, key=key)
    return Operation(
        "get",
        request,
        value_of,
        is_repeatable=True,
        read_level=read_level,
        min_seq=min_seq if at is None else 0,
    )


def batch_get(
    keys: Iterable[bytes],
    *,
    read_level: ReadLevel = ReadLevel.COMMITTED,
    max_staleness_ms: int = 0,
    at: At = None,
    min_seq: int = 0,
) -> Operation[list[Value | None]]:
    """The values of many keys at one view, in the order of `keys`; None where there is none."""
    header = read_header(read_level, max_staleness_ms=max_staleness_ms, at=at)
    request = kv_pb2.BatchGetRequest(header=header, keys=keys)
    return Operation(
        "batch_get",
        request,
        _values,
        is_repeatable=True,
        read_level=read_level,
        min_seq=min_seq if at is None else 0,
    )


def put(
    key: bytes,
    value: bytes,
    *,
    ttl_ms: int = 0,
    condition: Condition | None = None,
    durability: Durability = Durability.DURABLE,
    idempotency_key: bytes | None = None,
) -> Operation[Commit]:
    """Set the value of `key`."""
    request = kv_pb2.PutRequest(
        header=_write_header(idempotency_key),
        key=key,
        value=value,
        ttl_ms=ttl_ms,
        durability=_wire(durability),
        precondition=None if condition is None else precondition(condition),
    )
    return Operation("put", request, commit_of, bool(idempotency_key))


def delete(
    key: bytes,
    *,
    condition: Condition | None = None,
    durability: Durability = Durability.DURABLE,
    idempotency_key: bytes | None = None,
) -> Operation[Commit]:
    """Delete `key`."""
    request = kv_pb2.DeleteRequest(
        header=_write_header(idempotency_key),
        key=key,
        durability=_wire(durability),
        precondition=None if condition is None else precondition(condition),
    )
    return Operation("delete", request, commit_of, bool(idempotency_key))


def delete_range(
    *,
    start: bytes = b"",
    end: bytes = b"",
    prefix: bytes = b"",
    all_keys: bool = False,
    durability: Durability = Durability.DURABLE,
    idempotency_key: bytes | None = None,
) -> Operation[Commit]:
    """Delete all keys of a range."""
    request = kv_pb2.DeleteRangeRequest(
        header=_write_header(idempotency_key),
        range=kv_pb2.KeyRange(start=start, end=end, prefix=prefix),
        all=all_keys,
        durability=_wire(durability),
    )
    return Operation("delete_range", request, commit_of, bool(idempotency_key))


def add(key: bytes, delta: int = 1, *, idempotency_key: bytes | None = None) -> Operation[int]:
    """Add `delta` to a counter."""
    change = kv_pb2.Change(add=kv_pb2.AddChange(key=key, delta=delta))
    request = kv_pb2.WriteRequest(
        header=_write_header(idempotency_key),
        changes=[change],
        durability=kv_pb2.DURABILITY_DURABLE,
    )
    return Operation("write", request, _counter, bool(idempotency_key))


def write(
    changes: Iterable[Change],
    *,
    durability: Durability = Durability.DURABLE,
    idempotency_key: bytes | None = None,
) -> Operation[Commit]:
    """Apply all of `changes` in one commit."""
    request = kv_pb2.WriteRequest(
        header=_write_header(idempotency_key),
        changes=map(to_message, changes),
        durability=_wire(durability),
    )
    return Operation("write", request, _commit_with_counters, bool(idempotency_key))


def txn(
    compares: Iterable[Compare],
    then: Iterable[TxnOperation],
    otherwise: Iterable[TxnOperation] = (),
    *,
    durability: Durability = Durability.DURABLE,
    idempotency_key: bytes | None = None,
) -> Operation[TxnResult]:
    """Compare, and execute one of two branches, in one commit."""
    request = kv_pb2.TxnRequest(
        header=_write_header(idempotency_key),
        compares=map(comparison, compares),
        then=map(_txn_operation, then),
        otherwise=map(_txn_operation, otherwise),
        durability=_wire(durability),
    )
    return Operation("txn", request, txn_result_of, bool(idempotency_key))


def read_header(
    read_level: ReadLevel, *, max_staleness_ms: int = 0, at: At = None
) -> kv_pb2.RequestHeader:
    """The header of a read."""
    level = kv_pb2.ReadLevel.ValueType(read_level.value)
    if not max_staleness_ms and at is None:
        return kv_pb2.RequestHeader(read_level=level)
    snapshot_id = b"" if at is None else snapshot_id_of(at)
    return kv_pb2.RequestHeader(
        read_level=level, max_staleness_ms=max_staleness_ms, snapshot_id=snapshot_id
    )


def snapshot_id_of(at: bytes | Pinned) -> bytes:
    """Return the id of a snapshot. Raises ValueError for an empty one: it would mean none."""
    snapshot_id = at if isinstance(at, bytes) else at.id
    if not snapshot_id:
        raise ValueError("the id of a snapshot has 16 bytes, not 0: give None to read no snapshot")
    return snapshot_id


def destination_of(read_level: ReadLevel) -> Destination:
    """Return which servers can answer a read of this level."""
    is_committed = read_level is ReadLevel.COMMITTED
    return Destination.BY_POLICY if is_committed else Destination.WRITER


def _write_header(idempotency_key: bytes | None) -> kv_pb2.RequestHeader | None:
    return kv_pb2.RequestHeader(idempotency_key=idempotency_key) if idempotency_key else None


def _wire(durability: Durability) -> kv_pb2.Durability.ValueType:
    return kv_pb2.Durability.ValueType(durability.value)


def _txn_operation(operation: TxnOperation) -> kv_pb2.TxnOperation:
    if isinstance(operation, Get):
        return kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=operation.key))
    return kv_pb2.TxnOperation(change=to_message(operation))


def _values(reply: kv_pb2.BatchGetReply) -> list[Value | None]:
    return list(map(value_of, reply.results))


def _counter(reply: kv_pb2.WriteReply) -> int:
    (counter,) = reply.counters
    return counter


def _commit_with_counters(reply: kv_pb2.WriteReply) -> Commit:
    return commit_of(reply, tuple(reply.counters))


Note: TypeAlias = Callable[[Operation[Any], Any], None]  # called with each reply; may raise


def note_nothing(_operation: Operation[Any], _reply: Any) -> None:
    """Ignore the reply: the `Note` of a caller that needs only results."""


@dataclass(frozen=True, slots=True)
class Method(Generic[RequestT, ReplyT]):
    """A method with one request and one reply."""

    path: str  # of its calls
    request: type[RequestT]
    reply: type[ReplyT]


KV, ADMIN = "shalekv.v1.KV", "shalekv.v1.Admin"
GET = Method(f"/{KV}/Get", kv_pb2.GetRequest, kv_pb2.GetReply)
_OF_OPERATIONS: Mapping[str, Method[Any, Any]] = MappingProxyType(
    {
        "get": GET,
        "batch_get": Method(f"/{KV}/BatchGet", kv_pb2.BatchGetRequest, kv_pb2.BatchGetReply),
        "put": Method(f"/{KV}/Put", kv_pb2.PutRequest, kv_pb2.PutReply),
        "delete": Method(f"/{KV}/Delete", kv_pb2.DeleteRequest, kv_pb2.DeleteReply),
        "delete_range": Method(
            f"/{KV}/DeleteRange", kv_pb2.DeleteRangeRequest, kv_pb2.DeleteRangeReply
        ),
        "write": Method(f"/{KV}/Write", kv_pb2.WriteRequest, kv_pb2.WriteReply),
        "txn": Method(f"/{KV}/Txn", kv_pb2.TxnRequest, kv_pb2.TxnReply),
    }
)


class UnaryCalls:
    """Sends each operation in a unary call."""

    def __init__(self, channel: Channel, *, note: Note = note_nothing) -> None:
        """Send calls to the server of `channel`."""
        self._channel = channel
        self._note = note

    async def call(self, operation: Operation[ResultT], timeout_ms: float) -> ResultT:
        """Send `operation` and return its result; raises the errors of `shalekv_client.errors`."""
        method = _OF_OPERATIONS[operation.name]
        reply = await attempt(self._channel, method, operation.request, timeout_ms)
        self._note(operation, reply)
        try:
            return operation.decode(reply)
        except ValueError:
            raise not_an_answer(self._channel.address, operation.method) from None


async def attempt(
    channel: Channel, method: Method[RequestT, ReplyT], request: RequestT, timeout_ms: float
) -> ReplyT:
    """Make one call and return the reply; raises the errors of `shalekv_client.errors`."""
    data = request.SerializeToString()
    try:
        reply = await channel.unary(method.path, data, timeout_s=timeout_ms / 1000.0)
    except CallFailed as error:
        raise error_of(channel.address, error, timeout_ms=timeout_ms) from error
    try:
        return method.reply.FromString(reply)
    except DecodeError:
        raise not_an_answer(channel.address, method.path) from None
