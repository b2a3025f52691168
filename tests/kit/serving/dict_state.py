"""What the published documentation of the API says, over a dict: requests in, replies out."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from shalekv import errors
from shalekv.rpc.status import status_of
from shalekv.v1 import admin_pb2, kv_pb2

EPOCH = 7
DATABASE_ID = bytes(range(16))
KEY_BYTES_MAX = 64 * 1024

Data: TypeAlias = dict[bytes, kv_pb2.Entry]
Write: TypeAlias = (
    kv_pb2.PutRequest | kv_pb2.DeleteRequest | kv_pb2.DeleteRangeRequest | kv_pb2.WriteRequest
)


@dataclass(frozen=True, slots=True)
class Refused:
    """The operation is refused with this status."""

    status: status_pb2.Status


@dataclass(frozen=True, slots=True)
class Broken:
    """The call, or the stream with all that is on it, ends as gRPC and proxies end it."""

    code: grpc.StatusCode
    message: str
    is_applied: bool  # the operation is done, and its reply is lost


@dataclass(frozen=True, slots=True)
class Silent:
    """The operation is never answered."""


Failure: TypeAlias = Refused | Broken | Silent


class Failed(Exception):
    """An operation does not come to its reply."""

    def __init__(self, failure: Failure) -> None:
        """`failure` tells how."""
        super().__init__(failure)
        self.failure = failure


def refusing(error: errors.ShaleError) -> Refused:
    """Fails with what the published table says of `error`."""
    return Refused(status_of(error))


def bare(code: grpc.StatusCode, message: str = "made up by gRPC") -> Broken:
    """Fails as gRPC itself and proxies do: without details."""
    return Broken(code, message, is_applied=False)


def losing() -> Broken:
    """Does what was asked for, and loses the connection before the reply."""
    return Broken(grpc.StatusCode.UNAVAILABLE, "made up by gRPC", is_applied=True)


def silent() -> Silent:
    """Never answers."""
    return Silent()


@dataclass
class State:
    """The data, what has been asked, and how to fail."""

    data: Data = field(default_factory=dict)
    seq: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # an operation has come
    calls: Counter[str] = field(default_factory=Counter)  # by kind, however they travelled
    requests: list[Any] = field(default_factory=list)
    failures: deque[Failure | None] = field(default_factory=deque)  # of the next; None: works
    replies: dict[bytes, tuple[bytes, Message]] = field(default_factory=dict)  # by idempotency key
    loads: dict[str, int] = field(default_factory=dict)  # by id, with the sequence number

    def header(self) -> kv_pb2.ReplyHeader:
        """What every reply says."""
        return kv_pb2.ReplyHeader(
            database_id=DATABASE_ID,
            role=kv_pb2.ROLE_WRITER,
            epoch=EPOCH,
            seq=self.seq,
            wal_id=self.seq or None,
        )

    def begin(self, request: Message) -> Failure | None:
        """Count an operation; returns how it has to fail."""
        self.calls[request.DESCRIPTOR.name.removesuffix("Request")] += 1
        self.requests.append(request)
        self.begun.set()
        return self.failures.popleft() if self.failures else None

    def answer(self, request: Any) -> Message:
        """The reply; raises `Failed`."""
        failure = self.begin(request)
        if failure is not None:
            if isinstance(failure, Broken) and failure.is_applied:
                self._once(request)
            raise Failed(failure)
        try:
            return self._once(request)
        except errors.ShaleError as error:
            raise Failed(refusing(error)) from error

    def _once(self, request: Any) -> Message:
        key: bytes = request.header.idempotency_key
        if not key:
            return self._reply(request)
        content = type(request)()
        content.CopyFrom(request)
        content.ClearField("header")
        told = content.DESCRIPTOR.name.encode() + content.SerializeToString(deterministic=True)
        if key not in self.replies:
            self.replies[key] = (told, self._reply(request))
        first, reply = self.replies[key]
        if first != told:
            raise errors.KeyReused("the key belongs to another write")
        return reply

    def _reply(self, request: Any) -> Message:
        match request:
            case kv_pb2.GetRequest():
                return self._get(request.key)
            case kv_pb2.BatchGetRequest():
                reply = kv_pb2.BatchGetReply(header=self.header())
                for key in request.keys:
                    got = self._get(key)
                    reply.results.add(
                        found=got.found,
                        value=got.value,
                        seq=got.seq,
                        expire_at_ms=got.expire_at_ms,
                    )
                return reply
            case kv_pb2.TxnRequest():
                return self._txn(request)
            case admin_pb2.IngestSstRequest():
                return self._ingest(request)
            case _:
                return self._write(request)

    def _ingest(self, request: admin_pb2.IngestSstRequest) -> admin_pb2.IngestSstReply:
        was_before = request.load_id in self.loads
        if not was_before:
            self.seq += 1
            self.loads[request.load_id] = self.seq
        header = self.header()
        header.seq = self.loads[request.load_id]
        if was_before:
            header.ClearField("wal_id")
        return admin_pb2.IngestSstReply(header=header, already_applied=was_before)

    def _get(self, key: bytes) -> kv_pb2.GetReply:
        found = self.data.get(key)
        if found is None:
            return kv_pb2.GetReply(header=self.header())
        return kv_pb2.GetReply(
            header=self.header(),
            found=True,
            value=found.value,
            seq=found.seq,
            expire_at_ms=found.expire_at_ms,
        )

    def _write(self, request: Write) -> Message:
        if isinstance(request, kv_pb2.PutRequest | kv_pb2.DeleteRequest):
            self._check(request.key, request.precondition)
        counters = self._commit(_changes(request))
        header, durability = self.header(), request.durability
        match request:
            case kv_pb2.PutRequest():
                return kv_pb2.PutReply(header=header, durability=durability)
            case kv_pb2.DeleteRequest():
                return kv_pb2.DeleteReply(header=header, durability=durability)
            case kv_pb2.DeleteRangeRequest():
                return kv_pb2.DeleteRangeReply(header=header, durability=durability)
            case kv_pb2.WriteRequest():
                return kv_pb2.WriteReply(header=header, durability=durability, counters=counters)

    def _txn(self, request: kv_pb2.TxnRequest) -> kv_pb2.TxnReply:
        succeeded = all(map(self._holds, request.compares))
        branch = request.then if succeeded else request.otherwise
        gets = {op.get.key: self._get(op.get.key) for op in branch if op.HasField("get")}
        counters = self._commit([op.change for op in branch if op.HasField("change")])
        left = iter(counters)
        results = []
        for operation in branch:
            if operation.HasField("get"):
                results.append(kv_pb2.TxnResult(get=gets[operation.get.key]))
            elif operation.change.HasField("add"):
                results.append(kv_pb2.TxnResult(counter=next(left)))
            else:
                results.append(kv_pb2.TxnResult())
        return kv_pb2.TxnReply(
            header=self.header(),
            succeeded=succeeded,
            results=results,
            durability=request.durability,
        )

    def _check(self, key: bytes, wanted: kv_pb2.Precondition) -> None:
        condition = wanted.WhichOneof("condition")
        found_seq = self.data[key].seq if key in self.data else 0
        holds: Mapping[str | None, bool] = {
            None: True,
            "absent": not found_seq,
            "present": bool(found_seq),
            "seq_equals": found_seq == wanted.seq_equals,
        }
        if not holds[condition]:
            raise errors.ConditionFailed(
                f"{condition} does not hold", condition=str(condition), found_seq=found_seq
            )

    def _holds(self, compare: kv_pb2.Compare) -> bool:
        found = self.data.get(compare.key)
        match compare.WhichOneof("test"):
            case "exists":
                return compare.exists == (found is not None)
            case "range_empty":
                return not any(map(inside(compare.range_empty), self.data))
            case "seq":
                return _compared(found.seq if found else 0, compare.operator, compare.seq)
            case _:
                if found is None:
                    return compare.operator == kv_pb2.Compare.OPERATOR_NOT_EQUAL
                return _compared(found.value, compare.operator, compare.value)

    def _commit(self, changes: Iterable[kv_pb2.Change]) -> list[int]:
        """Apply all or none; returns the new counters."""
        data, counters, seq = dict(self.data), [], self.seq
        for number, change in enumerate(changes):
            seq = self.seq + 1
            kind = change.WhichOneof("change")
            if kind == "delete_range":
                for key in list(filter(inside(change.delete_range.range), data)):
                    del data[key]
                continue
            key = change.put.key or change.delete.key or change.add.key
            if not 0 < len(key) <= KEY_BYTES_MAX:
                problem = f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}"
                raise errors.InvalidRequest(f"changes[{number}].key", problem)
            if kind == "add":
                counters.append(_sum(data.get(key), change.add.delta))
                value = struct.pack("<q", counters[-1])
                data[key] = kv_pb2.Entry(key=key, value=value, seq=seq)
            elif kind == "put":
                put = change.put
                data[key] = kv_pb2.Entry(key=key, value=put.value, seq=seq, expire_at_ms=put.ttl_ms)
            else:
                data.pop(key, None)
        self.data, self.seq = data, seq
        return counters


def inside(keys: kv_pb2.KeyRange) -> Callable[[bytes], bool]:
    """Whether a key is in the range."""

    def is_inside(key: bytes) -> bool:
        is_before_end = not keys.end or key < keys.end
        return key.startswith(keys.prefix) and keys.start <= key and is_before_end

    return is_inside


def _changes(request: Write) -> Iterable[kv_pb2.Change]:
    match request:
        case kv_pb2.PutRequest():
            put = kv_pb2.PutChange(key=request.key, value=request.value, ttl_ms=request.ttl_ms)
            return [kv_pb2.Change(put=put)]
        case kv_pb2.DeleteRequest():
            return [kv_pb2.Change(delete=kv_pb2.DeleteChange(key=request.key))]
        case kv_pb2.DeleteRangeRequest():
            change = kv_pb2.DeleteRangeChange(range=request.range)
            return [kv_pb2.Change(delete_range=change)]
        case kv_pb2.WriteRequest():
            return request.changes


def _sum(found: kv_pb2.Entry | None, delta: int) -> int:
    if found is not None and len(found.value) != struct.calcsize("<q"):
        raise errors.NotACounter(f"{found.key!r} has {len(found.value)} bytes")
    total = delta + (struct.unpack("<q", found.value)[0] if found is not None else 0)
    if not -(1 << 63) <= total < 1 << 63:
        raise errors.CounterOverflow("the sum does not fit into 64 bits")
    return int(total)


def _compared(found: Any, operator: int, given: Any) -> bool:
    match kv_pb2.Compare.Operator.Name(kv_pb2.Compare.Operator.ValueType(operator)):
        case "OPERATOR_NOT_EQUAL":
            return bool(found != given)
        case "OPERATOR_LESS":
            return bool(found < given)
        case "OPERATOR_GREATER":
            return bool(found > given)
        case _:
            return bool(found == given)
