"""The published documentation of the API over a dict: requests in, replies out."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from shalekv import errors
from shalekv.rpc.status import status_of
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.model import Moment, Timeline, decide, keys_of
from tests.sim.history import Got, OperationResult, Refusal, WriteRequest, WriteResult

EPOCH = 7
DATABASE_ID = bytes(range(16))
KEY_BYTES_MAX = 64 * 1024
NOW_MS = 0  # at which a time to live is the moment of expiry

Data: TypeAlias = dict[bytes, kv_pb2.Entry]


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
        super().__init__(failure)
        self.failure = failure


def refusing(error: errors.ShaleError) -> Refused:
    """Return the failure that the published table has for `error`."""
    return Refused(status_of(error))


def bare(code: grpc.StatusCode, message: str = "made up by gRPC") -> Broken:
    """Fails as gRPC itself and proxies do: without details."""
    return Broken(code, message, is_applied=False)


def losing() -> Broken:
    """Does what was asked for, and loses the connection before the reply."""
    return Broken(grpc.StatusCode.UNAVAILABLE, "made up by gRPC", is_applied=True)


def silent() -> Silent:
    return Silent()


@dataclass
class State:
    """The data, what has been asked, and how to fail."""

    data: Data = field(default_factory=dict)
    seq: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # an operation has come
    calls: Counter[str] = field(default_factory=Counter)  # by kind, over whichever transport
    requests: list[Any] = field(default_factory=list)
    failures: deque[Failure | None] = field(default_factory=deque)  # of the next; None: works
    replies: dict[bytes, tuple[bytes, Message]] = field(default_factory=dict)  # by idempotency key
    loads: dict[str, int] = field(default_factory=dict)  # by id, with the sequence number

    def header(self) -> kv_pb2.ReplyHeader:
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
        fingerprint = content.DESCRIPTOR.name.encode() + content.SerializeToString(
            deterministic=True
        )
        if key not in self.replies:
            self.replies[key] = (fingerprint, self._reply(request))
        first, reply = self.replies[key]
        if first != fingerprint:
            raise errors.KeyReused("the key belongs to another write")
        return reply

    def _reply(self, request: Any) -> Message:
        match request:
            case kv_pb2.GetRequest():
                got = self._get(request.key)
                if request.omit_value:
                    got.ClearField("value")
                    got.ttl_ms = got.expire_at_ms and got.expire_at_ms - NOW_MS
                return got
            case kv_pb2.CountRequest():
                found = len(list(filter(inside(request.range), self.data)))
                most = request.limit or found
                return kv_pb2.CountReply(
                    header=self.header(), count=min(found, most), more=found > most
                )
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

    def _write(self, request: WriteRequest) -> Message:
        result = self._decided(request)
        header, durability = self.header(), request.durability
        match request:
            case kv_pb2.PutRequest():
                return kv_pb2.PutReply(header=header, durability=durability)
            case kv_pb2.DeleteRequest():
                return kv_pb2.DeleteReply(header=header, durability=durability)
            case kv_pb2.DeleteRangeRequest():
                return kv_pb2.DeleteRangeReply(header=header, durability=durability)
            case kv_pb2.WriteRequest():
                counters = [each for each in result.results if isinstance(each, int)]
                return kv_pb2.WriteReply(header=header, durability=durability, counters=counters)
            case kv_pb2.TxnRequest():
                return kv_pb2.TxnReply(
                    header=header,
                    succeeded=result.succeeded,
                    results=map(self._result, result.results),
                    durability=durability,
                )

    def _decided(self, request: WriteRequest) -> WriteResult:
        """Apply a write by the rules of the model; raises its refusal."""
        keys = keys_of(request, sorted(self.data))
        for number, key in enumerate(keys):
            if not 0 < len(key) <= KEY_BYTES_MAX:
                problem = f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}"
                raise errors.InvalidRequest(f"changes[{number}].key", problem)
        timeline = Timeline(sorted({*keys, *self.data}))
        for entry in self.data.values():
            timeline.append(entry.seq, {entry.key: (entry.value, entry.expire_at_ms)})
        effect = decide(request, Moment(timeline, self.seq, NOW_MS))
        if isinstance(effect.answer, Refusal):
            raise _error_of(effect.answer)
        if effect.left or isinstance(request, kv_pb2.DeleteRangeRequest):
            self.seq += 1
        self.data = dict(self.data)
        for key, (value, expire_at_ms) in effect.left.items():
            self.data.pop(key, None)
            if value is not None:
                self.data[key] = kv_pb2.Entry(
                    key=key, value=value, seq=self.seq, expire_at_ms=expire_at_ms
                )
        return effect.answer

    def _result(self, result: OperationResult) -> kv_pb2.TxnResult:
        if isinstance(result, Got):
            found = kv_pb2.GetReply(header=self.header())
            if result.value is not None:
                found.found, found.value, found.seq = True, result.value, result.seq
                found.expire_at_ms = result.expire_at_ms
            return kv_pb2.TxnResult(get=found)
        if isinstance(result, bool):
            return kv_pb2.TxnResult(touched=result)
        return kv_pb2.TxnResult() if result is None else kv_pb2.TxnResult(counter=result)


def _error_of(refusal: Refusal) -> errors.ShaleError:
    match refusal.reason:
        case errors.ConditionFailed.reason:
            found_seq = refusal.found_seq or 0
            return errors.ConditionFailed("does not hold", condition="", found_seq=found_seq)
        case errors.NotACounter.reason:
            return errors.NotACounter("the value has not 8 bytes")
        case _:
            return errors.CounterOverflow("the sum does not fit into 64 bits")


def inside(keys: kv_pb2.KeyRange) -> Callable[[bytes], bool]:
    def is_inside(key: bytes) -> bool:
        is_before_end = not keys.end or key < keys.end
        return key.startswith(keys.prefix) and keys.start <= key and is_before_end

    return is_inside
