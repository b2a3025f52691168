"""Conversion of transactions: from messages to `protocol.transaction.Transaction`, and back.

A write that compares, counts or deletes a range is a transaction. Requests are validated as in
`server.requests`; `ReplyBuilder` fills in the reply of each kind of write. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from shalekv.errors import InvalidRequest
from shalekv.format.records import REQUEST_HASH_BYTES, ReplyKind
from shalekv.protocol.entry import Entry
from shalekv.protocol.transaction import (
    COUNTER_BYTES,
    Add,
    Compare,
    Decision,
    Delete,
    DeleteRange,
    EmptyCompare,
    ExistsCompare,
    Expire,
    Get,
    KeyCount,
    Operation,
    Operator,
    Put,
    Read,
    SeqCompare,
    Touch,
    Touched,
    Transaction,
    ValueCompare,
)
from shalekv.read.sorted_runs import ENTRY_OVERHEAD_BYTES
from shalekv.server import requests
from shalekv.server.requests import DurabilityValue
from shalekv.server.service import MakeHeader
from shalekv.settings import STREAM_MESSAGE_BYTES_MAX, LimitSettings
from shalekv.v1 import kv_pb2
from shalekv.write.commit import COMMIT_OVERHEAD_BYTES, Receipt

DELETE_RANGE_COUNT_MAX = 100  # in a Write, or in one branch of a Txn: bounds the work of one call

_OPERATORS: Mapping[int, Operator] = {
    kv_pb2.Compare.OPERATOR_UNSPECIFIED: Operator.EQUAL,
    kv_pb2.Compare.OPERATOR_EQUAL: Operator.EQUAL,
    kv_pb2.Compare.OPERATOR_NOT_EQUAL: Operator.NOT_EQUAL,
    kv_pb2.Compare.OPERATOR_LESS: Operator.LESS,
    kv_pb2.Compare.OPERATOR_GREATER: Operator.GREATER,
}


ReplyT = TypeVar(
    "ReplyT",
    kv_pb2.PutReply,
    kv_pb2.DeleteReply,
    kv_pb2.DeleteRangeReply,
    kv_pb2.WriteReply,
    kv_pb2.TxnReply,
)


@dataclass(frozen=True, slots=True)
class SizedTransaction:
    """A transaction, and the memory that it may take until it is durable."""

    transaction: Transaction
    size_bytes: int


def put_transaction(request: kv_pb2.PutRequest, limits: LimitSettings) -> SizedTransaction:
    """Convert a put with a precondition."""
    requests.check_put(request, requests.PUT_FIELDS, limits)
    compare = _precondition(request.precondition, request.key)
    put = Put(request.key, request.value, request.ttl_ms)
    return _sized(Transaction([put], [compare]))


def delete_transaction(request: kv_pb2.DeleteRequest) -> SizedTransaction:
    """Convert a delete with a precondition, or one that is counted."""
    key = requests.check_key(request.key, "key")
    has_condition = request.HasField("precondition")
    compares = [_precondition(request.precondition, key)] if has_condition else []
    return _sized(Transaction([Delete(key, request.count_deleted)], compares))


def delete_range_transaction(request: kv_pb2.DeleteRangeRequest) -> SizedTransaction:
    """Convert a range delete."""
    if request.all:
        keys = requests.key_range(request.range)
        if keys.start or keys.end:
            raise InvalidRequest("all", "is set, and the range names some keys: which is meant?")
    else:
        advice = "; to delete all keys set `all`"
        keys = requests.deleted_range(request.range, advice=advice)
    return _sized(Transaction([DeleteRange(keys, request.count_deleted)]))


def write_transaction(request: kv_pb2.WriteRequest, limits: LimitSettings) -> SizedTransaction:
    """Convert a batch of any changes."""
    requests.check_count(len(request.changes), "changes", limits)
    operations = [
        _change(message, f"changes[{index}]", limits)
        for index, message in enumerate(request.changes)
    ]
    _check_range_deletes(operations, "changes")
    size_bytes = _payload_bytes(operations)
    requests.check_bytes(size_bytes, "changes", limits)
    return _sized(Transaction(operations, touched_bytes_max=limits.batch_bytes_max - size_bytes))


def txn_transaction(request: kv_pb2.TxnRequest, limits: LimitSettings) -> SizedTransaction:
    """Convert a transaction of a client."""
    count = len(request.compares) + len(request.then) + len(request.otherwise)
    requests.check_count(count, "compares, then and otherwise", limits)
    compares = [_compare(each, f"compares[{n}]") for n, each in enumerate(request.compares)]
    then = _operations(request.then, "then", limits)
    otherwise = _operations(request.otherwise, "otherwise", limits)
    compared_bytes = sum(len(each.key) + len(each.value) for each in request.compares)
    size_bytes = compared_bytes + _payload_bytes(then) + _payload_bytes(otherwise)
    requests.check_bytes(size_bytes, "compares, then and otherwise", limits)
    return _sized(
        Transaction(
            then,
            compares,
            otherwise,
            results_bytes_max=STREAM_MESSAGE_BYTES_MAX,
            touched_bytes_max=limits.batch_bytes_max - size_bytes,
        )
    )


def _operations(
    messages: Iterable[kv_pb2.TxnOperation], field: str, limits: LimitSettings
) -> Sequence[Operation]:
    operations = [
        _operation(message, f"{field}[{index}]", limits) for index, message in enumerate(messages)
    ]
    _check_range_deletes(operations, field)
    return operations


def _operation(message: kv_pb2.TxnOperation, path: str, limits: LimitSettings) -> Operation:
    match message.WhichOneof("operation"):
        case "get":
            if message.get.HasField("header"):
                problem = "a read inside a transaction has no header of its own"
                raise InvalidRequest(f"{path}.get.header", problem)
            if message.get.omit_value:
                problem = "a read inside a transaction has its value: use a call of its own"
                raise InvalidRequest(f"{path}.get.omit_value", problem)
            return Get(requests.check_key(message.get.key, f"{path}.get.key"))
        case "change":
            return _change(message.change, f"{path}.change", limits)
        case _:
            raise InvalidRequest(path, "no operation is set, and transactions do not nest")


def _change(message: kv_pb2.Change, path: str, limits: LimitSettings) -> Operation:
    match message.WhichOneof("change"):
        case "put":
            try:
                requests.check_put(message.put, requests.PUT_CHANGE_FIELDS, limits)
            except InvalidRequest as error:
                raise requests.within(path, error) from None
            return Put(message.put.key, message.put.value, message.put.ttl_ms)
        case "delete":
            return Delete(requests.check_key(message.delete.key, f"{path}.delete.key"))
        case "delete_range":
            keys = requests.deleted_range(message.delete_range.range, f"{path}.delete_range.range")
            return DeleteRange(keys)
        case "add":
            key = requests.check_key(message.add.key, f"{path}.add.key")
            return Add(key, message.add.delta)
        case "touch":
            key = requests.check_key(message.touch.key, f"{path}.touch.key")
            requests.check_ttl(message.touch.ttl_ms, f"{path}.touch.ttl_ms", limits)
            return Touch(key, message.touch.ttl_ms)
        case _:
            raise InvalidRequest(path, "no change is set")


def _compare(message: kv_pb2.Compare, path: str) -> Compare:
    test = message.WhichOneof("test")
    if test is None:
        raise InvalidRequest(path, "no test is set")
    by = _OPERATORS.get(message.operator)
    if by is None:
        raise InvalidRequest(f"{path}.operator", f"{message.operator} is not a known value")
    if test in ("exists", "range_empty") and by is not Operator.EQUAL:
        raise InvalidRequest(f"{path}.operator", f"{test} is only compared with EQUAL")
    if test == "range_empty":
        if message.key:
            raise InvalidRequest(f"{path}.key", "must be empty when a range is compared")
        return EmptyCompare(requests.key_range(message.range_empty, f"{path}.range_empty"))
    key = requests.check_key(message.key, f"{path}.key")
    match test:
        case "seq":
            return SeqCompare(key, message.seq, by)
        case "value":
            return ValueCompare(key, message.value, by)
        case "exists":
            return ExistsCompare(key, message.exists)


def _precondition(message: kv_pb2.Precondition, key: bytes) -> Compare:
    match message.WhichOneof("condition"):
        case "absent":
            if not message.absent:
                raise InvalidRequest("precondition.absent", "false is refused: use present")
            return ExistsCompare(key, exists=False)
        case "present":
            if not message.present:
                raise InvalidRequest("precondition.present", "false is refused: use absent")
            return ExistsCompare(key, exists=True)
        case "seq_equals":
            if not message.seq_equals:
                problem = "0 is no sequence number: use absent"
                raise InvalidRequest("precondition.seq_equals", problem)
            return SeqCompare(key, message.seq_equals)
        case _:
            raise InvalidRequest("precondition", "no condition is set")


def _check_range_deletes(operations: Iterable[Operation], field: str) -> None:
    count = sum(isinstance(operation, DeleteRange) for operation in operations)
    if count > DELETE_RANGE_COUNT_MAX:
        problem = f"{count} range deletes, and at most {DELETE_RANGE_COUNT_MAX} are allowed"
        raise InvalidRequest(field, problem)


def _sized(transaction: Transaction) -> SizedTransaction:
    branches = (transaction.then, transaction.otherwise or ())
    return SizedTransaction(
        transaction, COMMIT_OVERHEAD_BYTES + max(map(_accounted_bytes, branches))
    )


def _accounted_bytes(operations: Sequence[Operation]) -> int:
    """Upper bound of the memory that the changes of these operations take."""
    changes = sum(not isinstance(operation, Get) for operation in operations)
    return ENTRY_OVERHEAD_BYTES * changes + _payload_bytes(operations)


def _payload_bytes(operations: Iterable[Operation]) -> int:
    """Size of keys and values."""
    return sum(map(_bytes_of, operations))


def _bytes_of(operation: Operation) -> int:
    match operation:
        case Put(key, value, _):
            return len(key) + len(value)
        case DeleteRange(keys, _):
            return len(keys.start) + len(keys.end)
        case Add(key, _):
            return len(key) + COUNTER_BYTES
        case Get(key) | Delete(key, _) | Touch(key, _) | Expire(key, _):
            return len(key)


# Replies without results and header, by class and durability: all that there can be are few.
_without_results: dict[tuple[type[Message], int], bytes] = {}


@dataclass(frozen=True, slots=True)
class ReplyBuilder(Generic[ReplyT]):
    """Makes the replies of one kind of write."""

    kind: ReplyKind
    message: type[ReplyT]
    fill: Callable[[ReplyT, Decision], None] | None = None  # adds the results of a decision

    def parse(self, data: bytes) -> ReplyT:
        """Parse a serialized reply."""
        return self.message.FromString(data)

    def reply(self, decision: Decision | None, durability: DurabilityValue) -> ReplyT:
        """Make the reply, without its header."""
        reply = self.message(durability=durability)
        if decision is not None and self.fill is not None:
            self.fill(reply, decision)
        return reply

    def encode(self, decision: Decision | None, durability: DurabilityValue) -> bytes:
        """Serialize the reply, without its header, for an idempotency record."""
        if decision is not None:
            return self.reply(decision, durability).SerializeToString()
        encoded = _without_results.get((self.message, durability))
        if encoded is None:
            encoded = self.reply(None, durability).SerializeToString()
            _without_results[self.message, durability] = encoded
        return encoded


class ReplyEncoder:
    """Serializes the replies of writes, header included.

    Replies without results differ in two numbers of the header, so one message of each kind is
    filled once, and serialized again and again.
    """

    def __init__(self, header: MakeHeader) -> None:
        """`header` makes the header of a reply."""
        self._header = header
        # Of a class of messages and a durability: the message, and its header.
        self._filled: dict[tuple[type[Message], int], tuple[Message, kv_pb2.ReplyHeader]] = {}

    def encode(
        self, builder: ReplyBuilder[ReplyT], durability: DurabilityValue, receipt: Receipt
    ) -> bytes:
        """Serialize the reply to a write."""
        seq, wal_id, decision, _, _, _ = receipt
        if decision is not None or wal_id is None:
            reply = builder.reply(decision, durability)
            reply.header.CopyFrom(self._header(seq, wal_id))
            return reply.SerializeToString()
        filled = self._filled.get((builder.message, durability))
        if filled is None:
            reply = builder.reply(None, durability)
            reply.header.CopyFrom(self._header(seq, wal_id))
            filled = self._filled[builder.message, durability] = (reply, reply.header)
        message, header = filled
        header.seq, header.wal_id = seq, wal_id
        return message.SerializeToString()


def _fill_write(reply: kv_pb2.WriteReply, decision: Decision) -> None:
    reply.counters.extend(result for result in decision.results if isinstance(result, int))


def _fill_txn(reply: kv_pb2.TxnReply, decision: Decision) -> None:
    reply.succeeded = decision.succeeded
    for result in decision.results:
        added = reply.results.add()
        match result:
            case Read(Entry() as entry):
                added.get.found = True
                added.get.value = entry.value
                added.get.seq = entry.seq
                added.get.expire_at_ms = entry.expire_at_ms
            case Read():
                added.get.SetInParent()
            case Touched(has_value):
                added.touched = has_value
            case int():
                added.counter = result


def _fill_deleted(reply: kv_pb2.DeleteReply | kv_pb2.DeleteRangeReply, decision: Decision) -> None:
    for result in decision.results:
        if isinstance(result, KeyCount):
            reply.deleted = result.key_count
            if isinstance(reply, kv_pb2.DeleteRangeReply):
                reply.deleted_more = result.has_more


PUT_REPLY = ReplyBuilder(ReplyKind.PUT, kv_pb2.PutReply)
DELETE_REPLY = ReplyBuilder(ReplyKind.DELETE, kv_pb2.DeleteReply, _fill_deleted)
DELETE_RANGE_REPLY = ReplyBuilder(ReplyKind.DELETE_RANGE, kv_pb2.DeleteRangeReply, _fill_deleted)
WRITE_REPLY = ReplyBuilder(ReplyKind.WRITE, kv_pb2.WriteReply, _fill_write)
TXN_REPLY = ReplyBuilder(ReplyKind.TXN, kv_pb2.TxnReply, _fill_txn)


def hash_of_request(request: requests.WriteRequest, kind: ReplyKind) -> bytes:
    """Hash the method and all fields but the header, to tell a repeat from another request.

    Fields are serialized in the order of their numbers, so the hash of a request is the same in
    later versions.
    """
    data = request.SerializeToString(deterministic=True)
    if request.HasField("header"):  # field 1: a tag, its length as a varint, and itself
        header_bytes = request.header.ByteSize()
        length_bytes = max(1, -(-header_bytes.bit_length() // 7))
        data = data[1 + length_bytes + header_bytes :]
    return hashlib.blake2b(bytes((kind,)) + data, digest_size=REQUEST_HASH_BYTES).digest()
