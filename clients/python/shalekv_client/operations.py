"""The operations of a client: for each one its encoded request, and how its reply is decoded.

An operation does not depend on how it is sent: in a unary call (`UnaryCalls`), with others in a
message of the session that the client itself keeps, or in an explicit session. Its request is
encoded once. That of a plain put or get is put together from bytes, since a protobuf object would
cost most of the time of the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from shalekv.v1 import kv_pb2
from shalekv_client.errors import Unimplemented
from shalekv_client.policies import Destination, Durability, ReadLevel
from shalekv_client.results import (
    Commit,
    Cost,
    Count,
    KeyInfo,
    TxnResult,
    Value,
    commit_of,
    cost_of,
    count_of,
    counted_commit_of,
    key_info_of,
    txn_result_of,
    value_of,
)
from shalekv_client.routing.call_names import REQUEST_ID_HERE, metadata_here, metadata_of
from shalekv_wire.calls import Channel, UnaryChannel
from shalekv_wire.status import CallFailed, Metadata
from shalekv_wire.trace_context import call_names

if TYPE_CHECKING:  # loaded by what uses it: a get does not
    from shalekv_client.changes import Change, Compare, Condition, TxnOperation

ResultT = TypeVar("ResultT")
RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)


class Pinned(Protocol):
    """A reference to a snapshot: any object with an id of 16 bytes."""

    @property
    def id(self) -> bytes: ...


At: TypeAlias = (
    bytes | Pinned | None
)  # the snapshot at which a read is made; None: the newest state


class Method(NamedTuple, Generic[RequestT, ReplyT]):
    """A method with one request and one reply."""

    path: str  # of its calls
    request: type[RequestT]
    reply: type[ReplyT]

    @property
    def name(self) -> str:
        """The name without that of its service."""
        return self.path.rpartition("/")[2]


KV, ADMIN = "shalekv.v1.KV", "shalekv.v1.Admin"
SESSION = f"/{KV}/Session"


class Kind(NamedTuple):
    """One of the operations; sessions have all of them but counts."""

    name: str  # of its field in `SessionOperation` and `SessionResult`
    method: Method[Any, Any]  # of the same operation in a unary call
    tag: bytes  # of the field in `SessionOperation`; empty: there is none

    @classmethod
    def of(cls, name: str, request: type[Message], reply: type[Message]) -> Kind:
        """Return the kind of the field `name`."""
        method = name.title().replace("_", "")
        number = kv_pb2.SessionOperation.DESCRIPTOR.fields_by_name[name].number
        return cls(name, Method(f"/{KV}/{method}", request, reply), bytes([number << 3 | _BYTES]))

    def __str__(self) -> str:
        """Return the name of the method, for messages."""
        return self.method.name


_BYTES = 2  # the wire type of protobuf for fields with a length
GET = Kind.of("get", kv_pb2.GetRequest, kv_pb2.GetReply)
_BATCH_GET = Kind.of("batch_get", kv_pb2.BatchGetRequest, kv_pb2.BatchGetReply)
_PUT = Kind.of("put", kv_pb2.PutRequest, kv_pb2.PutReply)
_DELETE = Kind.of("delete", kv_pb2.DeleteRequest, kv_pb2.DeleteReply)
_DELETE_RANGE = Kind.of("delete_range", kv_pb2.DeleteRangeRequest, kv_pb2.DeleteRangeReply)
_WRITE = Kind.of("write", kv_pb2.WriteRequest, kv_pb2.WriteReply)
_TXN = Kind.of("txn", kv_pb2.TxnRequest, kv_pb2.TxnReply)
COUNT = Kind("count", Method(f"/{KV}/Count", kv_pb2.CountRequest, kv_pb2.CountReply), b"")

_VARINT_BITS, _VARINT_MORE = 7, 0x80
_SMALL_VARINTS = tuple(bytes([number]) for number in range(_VARINT_MORE))


def varint(number: int) -> bytes:
    """Encode a number as protobuf does. REQUIRES: it is not negative.

    The server has its own: neither may import the other, and the wire below both knows no messages.
    """
    if number < _VARINT_MORE:
        return _SMALL_VARINTS[number]
    encoded = bytearray()
    while number >= _VARINT_MORE:
        encoded.append(number & 0x7F | _VARINT_MORE)
        number >>= _VARINT_BITS
    encoded.append(number)
    return bytes(encoded)


class Operation(NamedTuple, Generic[ResultT]):
    """One operation, ready to be sent, once or repeatedly."""

    kind: Kind
    data: bytes  # the encoded request
    decode: Callable[[Any], ResultT]  # the result from the reply; ValueError if it does not fit
    is_repeatable: bool  # whether it may be sent again when its outcome is unknown
    read_level: ReadLevel | None = None  # None: it is a write
    min_seq: int = 0  # the sequence number that the reply to a read must have reached
    traceparent: str = ""  # the span that it belongs to; empty: it is not traced
    request_id: str = ""  # under which logs of servers have it; empty: it has none

    @property
    def names(self) -> tuple[str, str]:
        """Its request id and the id of its trace, for errors; each may be empty."""
        return self.request_id, call_names("", self.traceparent).trace_id

    def demanding_min_seq(self) -> Operation[ResultT]:
        """Return the operation with `min_seq` in its request: the server waits for that commit."""
        request = self.kind.method.request.FromString(self.data)
        request.header.min_seq = self.min_seq
        return self._replace(data=request.SerializeToString())


# One more piece of a request: field 1, its header, with `report_cost`. Servers merge the pieces.
_REPORT_COST = b"\x0a\x02\x30\x01"
_COSTS: ContextVar[list[Cost] | None] = ContextVar("shalekv_costs", default=None)


@contextmanager
def costs_of_calls() -> Iterator[list[Cost]]:
    """Ask servers what each call of this task costs, while entered; the costs come into a list.

        with costs_of_calls() as costs:
            await client.get(b"greeting")
        print(costs[0].reads, costs[0].dollars)

    It counts for calls of any client with one reply, and for operations of sessions that are
    submitted inside. A call that fails tells no cost, and neither does an older server.
    """
    costs: list[Cost] = []
    token = _COSTS.set(costs)
    try:
        yield costs
    finally:
        _COSTS.reset(token)


def in_context(operation: Operation[ResultT]) -> Operation[ResultT]:
    """Return what is to be sent inside of `request_id_of_calls` and of `costs_of_calls`."""
    costs, request_id = _COSTS.get(), REQUEST_ID_HERE.get()
    if request_id:
        operation = operation._replace(request_id=request_id)
    if costs is None:
        return operation

    def decode(reply: Any) -> ResultT:
        result = operation.decode(reply)
        if reply.header.HasField("cost"):
            costs.append(cost_of(reply.header.cost))
        return result

    return operation._replace(data=operation.data + _REPORT_COST, decode=decode)


def get(
    key: bytes,
    *,
    read_level: ReadLevel = ReadLevel.COMMITTED,
    max_staleness_ms: int = 0,
    at: At = None,
    min_seq: int = 0,
) -> Operation[Value | None]:
    """The value of `key`; None when it has none."""
    if max_staleness_ms or at is not None:
        header = read_header(read_level, max_staleness_ms=max_staleness_ms, at=at)
        data = kv_pb2.GetRequest(header=header, key=key).SerializeToString()
    else:
        data = b"%b\x12%b%b" % (_READ_HEADERS[read_level], varint(len(key)), key)
    is_newest = at is None
    return Operation(GET, data, value_of, True, read_level, min_seq if is_newest else 0)  # noqa: FBT003


def describe(
    key: bytes,
    *,
    read_level: ReadLevel = ReadLevel.COMMITTED,
    max_staleness_ms: int = 0,
    at: At = None,
    min_seq: int = 0,
) -> Operation[KeyInfo | None]:
    """Describe `key` without its value; None when it has none."""
    header = read_header(read_level, max_staleness_ms=max_staleness_ms, at=at)
    request = kv_pb2.GetRequest(header=header, key=key, omit_value=True)
    return Operation(
        GET,
        request.SerializeToString(),
        key_info_of,
        is_repeatable=True,
        read_level=read_level,
        min_seq=min_seq if at is None else 0,
    )


def count(
    *,
    start: bytes = b"",
    end: bytes = b"",
    prefix: bytes = b"",
    limit: int = 0,
    read_level: ReadLevel = ReadLevel.COMMITTED,
    max_staleness_ms: int = 0,
    at: At = None,
    min_seq: int = 0,
) -> Operation[Count]:
    """The number of keys in a range. Sessions do not have it."""
    request = kv_pb2.CountRequest(
        header=read_header(read_level, max_staleness_ms=max_staleness_ms, at=at),
        range=kv_pb2.KeyRange(start=start, end=end, prefix=prefix),
        limit=limit,
    )
    return Operation(
        COUNT,
        request.SerializeToString(),
        count_of,
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
        _BATCH_GET,
        request.SerializeToString(),
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
    if ttl_ms or condition is not None:
        request = kv_pb2.PutRequest(
            header=_write_header(idempotency_key),
            key=key,
            value=value,
            ttl_ms=ttl_ms,
            durability=_wire(durability),
            precondition=_precondition(condition, key),
        )
        data = request.SerializeToString()
    else:
        data = b"%b\x12%b%b\x1a%b%b%b" % (
            _encoded_write_header(idempotency_key),
            varint(len(key)),
            key,
            varint(len(value)),
            value,
            _DURABILITIES[durability],
        )
    return Operation(_PUT, data, commit_of, bool(idempotency_key))


def delete(
    key: bytes,
    *,
    condition: Condition | None = None,
    count: bool = False,
    durability: Durability = Durability.DURABLE,
    idempotency_key: bytes | None = None,
) -> Operation[Commit]:
    """Delete `key`; with `count`, tell whether it had a value."""
    request = kv_pb2.DeleteRequest(
        header=_write_header(idempotency_key),
        key=key,
        durability=_wire(durability),
        precondition=_precondition(condition, key),
        count_deleted=count,
    )
    decode = counted_commit_of if count else commit_of
    return Operation(_DELETE, request.SerializeToString(), decode, bool(idempotency_key))


def delete_range(
    *,
    start: bytes = b"",
    end: bytes = b"",
    prefix: bytes = b"",
    all_keys: bool = False,
    count: bool = False,
    durability: Durability = Durability.DURABLE,
    idempotency_key: bytes | None = None,
) -> Operation[Commit]:
    """Delete all keys of a range; with `count`, tell how many had a value."""
    request = kv_pb2.DeleteRangeRequest(
        header=_write_header(idempotency_key),
        range=kv_pb2.KeyRange(start=start, end=end, prefix=prefix),
        all=all_keys,
        durability=_wire(durability),
        count_deleted=count,
    )
    decode = counted_commit_of if count else commit_of
    return Operation(_DELETE_RANGE, request.SerializeToString(), decode, bool(idempotency_key))


def add(key: bytes, delta: int = 1, *, idempotency_key: bytes | None = None) -> Operation[int]:
    """Add `delta` to a counter."""
    change = kv_pb2.Change(add=kv_pb2.AddChange(key=key, delta=delta))
    request = kv_pb2.WriteRequest(
        header=_write_header(idempotency_key),
        changes=[change],
        durability=kv_pb2.DURABILITY_DURABLE,
    )
    return Operation(_WRITE, request.SerializeToString(), _counter, bool(idempotency_key))


def touch(key: bytes, ttl_ms: int = 0, *, idempotency_key: bytes | None = None) -> Operation[bool]:
    """Change when a value expires; whether there is one."""
    touched = kv_pb2.TouchChange(key=key, ttl_ms=ttl_ms)
    request = kv_pb2.TxnRequest(
        header=_write_header(idempotency_key),
        then=[kv_pb2.TxnOperation(change=kv_pb2.Change(touch=touched))],
        durability=kv_pb2.DURABILITY_DURABLE,
    )
    return Operation(_TXN, request.SerializeToString(), _touched, bool(idempotency_key))


def write(
    changes: Iterable[Change],
    *,
    durability: Durability = Durability.DURABLE,
    idempotency_key: bytes | None = None,
) -> Operation[Commit]:
    """Apply all of `changes` in one commit."""
    from shalekv_client.changes import to_message

    request = kv_pb2.WriteRequest(
        header=_write_header(idempotency_key),
        changes=map(to_message, changes),
        durability=_wire(durability),
    )
    return Operation(
        _WRITE, request.SerializeToString(), _commit_with_counters, bool(idempotency_key)
    )


def txn(
    compares: Iterable[Compare],
    then: Iterable[TxnOperation],
    otherwise: Iterable[TxnOperation] = (),
    *,
    durability: Durability = Durability.DURABLE,
    idempotency_key: bytes | None = None,
) -> Operation[TxnResult]:
    """Compare, and execute one of two branches, in one commit."""
    from shalekv_client.changes import comparison, txn_operation

    request = kv_pb2.TxnRequest(
        header=_write_header(idempotency_key),
        compares=map(comparison, compares),
        then=map(txn_operation, then),
        otherwise=map(txn_operation, otherwise),
        durability=_wire(durability),
    )
    return Operation(_TXN, request.SerializeToString(), txn_result_of, bool(idempotency_key))


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


def _encoded_write_header(idempotency_key: bytes | None) -> bytes:
    """Return the header of a put as a field of its request."""
    if not idempotency_key:
        return b""
    header = b"\x2a%b%b" % (varint(len(idempotency_key)), idempotency_key)
    return b"\x0a%b%b" % (varint(len(header)), header)


# As fields of a request: the header with nothing but a level, and the durability.
_READ_HEADERS: Mapping[ReadLevel, bytes] = MappingProxyType(
    {level: b"\x0a\x02\x20%c" % level.value for level in ReadLevel}
)
_DURABILITIES: Mapping[Durability, bytes] = MappingProxyType(
    {durability: b"\x28%c" % durability.value for durability in Durability}
)


def _wire(durability: Durability) -> kv_pb2.Durability.ValueType:
    return kv_pb2.Durability.ValueType(durability.value)


def _precondition(condition: Condition | None, key: bytes) -> kv_pb2.Precondition | None:
    if condition is None:
        return None
    from shalekv_client.changes import precondition

    return precondition(condition, key)


def _values(reply: kv_pb2.BatchGetReply) -> list[Value | None]:
    return list(map(value_of, reply.results))


def _counter(reply: kv_pb2.WriteReply) -> int:
    (counter,) = reply.counters
    return counter


def _touched(reply: kv_pb2.TxnReply) -> bool:
    (result,) = reply.results
    return result.touched


def _commit_with_counters(reply: kv_pb2.WriteReply) -> Commit:
    return commit_of(reply, tuple(reply.counters))


Note: TypeAlias = Callable[[Operation[Any], Any], None]  # called with each reply; may raise


def note_nothing(_operation: Operation[Any], _reply: Any) -> None:
    """Ignore the reply: the `Note` of a caller that needs only results."""


class SessionAbsent(Unimplemented):
    """The server has no sessions; nothing was applied. Send the operation in a unary call."""


class UnaryCalls:
    """Sends each operation in a unary call."""

    def __init__(self, channel: UnaryChannel, *, note: Note = note_nothing) -> None:
        """Send calls to the server of `channel`."""
        self._channel = channel
        self._note = note

    async def call(self, operation: Operation[ResultT], timeout_ms: float) -> ResultT:
        """Send `operation` and return its result; raises the errors of `shalekv_client.errors`."""
        reply = await _attempt(
            self._channel,
            operation.kind.method,
            operation.data,
            timeout_ms,
            metadata_of(operation.traceparent, operation.request_id),
        )
        self._note(operation, reply)
        try:
            return operation.decode(reply)
        except ValueError:
            from shalekv_client.error_table import not_an_answer

            raise not_an_answer(self._channel.address, str(operation.kind)) from None


async def attempt(
    channel: Channel,
    method: Method[RequestT, ReplyT],
    request: RequestT,
    timeout_ms: float,
    metadata: Metadata | None = None,
) -> ReplyT:
    """Make one call and return the reply; raises the errors of `shalekv_client.errors`.

    The default of `metadata` is `metadata_here()`.
    """
    metadata = metadata_here() if metadata is None else metadata
    return await _attempt(channel, method, request.SerializeToString(), timeout_ms, metadata)


async def _attempt(
    channel: UnaryChannel,
    method: Method[RequestT, ReplyT],
    data: bytes,
    timeout_ms: float,
    metadata: Metadata,
) -> ReplyT:
    try:
        reply = await channel.unary(
            method.path, data, timeout_s=timeout_ms / 1000.0, metadata=metadata
        )
    except CallFailed as error:
        from shalekv_client.error_table import error_of

        raise error_of(
            channel.address, error, timeout_ms=timeout_ms, method=method.name, sent=metadata
        ) from error
    try:
        return method.reply.FromString(reply)
    except DecodeError:
        from shalekv_client.error_table import not_an_answer

        raise not_an_answer(channel.address, method.name) from None
