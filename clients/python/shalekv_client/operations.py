"""The operations of a client: for each one its request, and how its reply is decoded.

An operation does not depend on how it is sent: in a unary call (`UnaryCalls`), with others in a
message of the session that the client itself keeps, or in an explicit session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv_client.changes import Change, Compare, Condition, comparison, precondition, to_message
from shalekv_client.closing import abandoned, is_task_cancelled
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

ResultT = TypeVar("ResultT")
RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
ReplyT_co = TypeVar("ReplyT_co", covariant=True)


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


class Method(Protocol[RequestT_contra, ReplyT_co]):
    """A method of a gRPC stub with one request and one reply."""

    def __call__(
        self, request: RequestT_contra, /, *, timeout: float | None = None
    ) -> Awaitable[ReplyT_co]: ...


class UnaryCalls:
    """Sends each operation in a unary gRPC call."""

    def __init__(
        self, stub: kv_pb2_grpc.KVStub, *, address: str, note: Note = note_nothing
    ) -> None:
        """Send calls by `stub`, which belongs to the server at `address`."""
        self._stub = stub
        self._address = address
        self._note = note

    async def call(self, operation: Operation[ResultT], timeout_ms: float) -> ResultT:
        """Send `operation` and return its result; raises the errors of `shalekv_client.errors`."""
        method = getattr(self._stub, operation.method)
        reply = await attempt(self._address, method, operation.request, timeout_ms)
        self._note(operation, reply)
        try:
            return operation.decode(reply)
        except ValueError:
            raise not_an_answer(self._address, operation.method) from None


async def attempt(
    address: str,
    method: Method[RequestT_contra, ReplyT_co],
    request: RequestT_contra,
    timeout_ms: float,
) -> ReplyT_co:
    """Make one call and return the reply; raises the errors of `shalekv_client.errors`."""
    try:
        return await method(request, timeout=timeout_ms / 1000.0)
    except grpc.aio.AioRpcError as error:
        raise error_of(address, error, timeout_ms=timeout_ms) from error
    except asyncio.CancelledError:
        if is_task_cancelled():
            raise
        raise abandoned(address, "the client") from None
