"""Requests at random, made from the descriptors of the protos, and bytes that are no request.

Values come from small pools, so that requests meet each other's keys, ids and idempotency keys;
each pool has what is at a limit, past it, and far out.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from shalekv.protocol.entry import KEY_BYTES_MAX
from shalekv.v1 import kv_pb2
from tests.kit.uuids import new_uuid7
from tests.sim.requests import Requests

KV = kv_pb2.DESCRIPTOR.services_by_name["KV"]
CALLS = ("Get", "BatchGet", "Put", "Delete", "DeleteRange", "Write", "Txn", "Scan")
LIMITS = {
    "value_bytes_max": 1_000,
    "batch_count_max": 12,
    "batch_bytes_max": 1_000_000,
    "scan_view_count_max": 2,
    "scan_message_bytes": 1_024,
    "sessions_bytes_max": 262_144,
}
CONSTANTS = {
    "shalekv.server.freshness:SEQ_WAIT_MS_MAX": 1,
    "shalekv.server.transactions:DELETE_RANGE_COUNT_MAX": 2,
    "shalekv.read.read_set:COMPARE_COUNT_MAX": 3,
}
LIST_COUNT_MAX = 4
SHOWN_BYTES = 200

KEYS = [b"a", b"a", b"a", b"b", b"b", b"ab", b"a\0", b"c", b"\xff", b"\xff\xff"]
ODD_KEYS = [b"", bytes(KEY_BYTES_MAX), bytes(KEY_BYTES_MAX + 1)]
COUNTER = (5).to_bytes(8, "little")
LAST_COUNTER = (2**63 - 1).to_bytes(8, "little")
OLD_UUID7 = new_uuid7(age_ms=10 * 86_400_000)
BYTES: dict[str, list[bytes]] = {
    "value": [b"", b"1", COUNTER, COUNTER, LAST_COUNTER, LAST_COUNTER, bytes(1_000), bytes(1_001)],
    "idempotency_key": [b"", b"1", b"1", b"2", bytes(64), bytes(65), OLD_UUID7],
    "page_token": [b""] * 4 + [b"token", bytes(47), bytes(100)],
    "snapshot_id": [b""] * 8 + [bytes(16)],
}
INTEGERS: dict[str, list[int]] = {
    "ttl_ms": [0, 0, 0, 0, 1, 3_600_000, 3_155_760_000_000, 3_155_760_000_001, 2**64 - 1],
    "min_seq": [0] * 8 + [1, 2**64 - 1],
    "delta": [0, 1, -1, 2**63 - 1, 2**63 - 1, -(2**63)],
    "id": [0, 1, 2, 3, 4, 5, 2**64 - 1],
}
OTHER_INTEGERS = [0, 0, 1, 2, 3, 5, 8, 2**31, 2**63, 2**64 - 1]
ENUM_NUMBERS = [0, 0, 0, 1, 1, 2, 2, 3, 4, 5, -1, 2**31 - 1]


class Call(NamedTuple):
    """A call with the bytes of its request, or of all its requests."""

    method: str
    messages: list[bytes]

    def __repr__(self) -> str:
        """Short, since keys are long; the blob that Hypothesis prints has all of it."""
        shown = [message[:SHOWN_BYTES] for message in self.messages]
        return f"{self.method}({shown})"


@st.composite
def messages(draw: st.DrawFn, kind: Any) -> Message:
    """A message of a kind, every field of it set or not."""
    message: Message = GetMessageClass(kind)()
    chosen = {oneof.name: draw(st.sampled_from(list(oneof.fields))).name for oneof in kind.oneofs}
    for field in kind.fields:
        oneof = field.containing_oneof
        if (oneof and chosen[oneof.name] != field.name) or draw(_is_left_out(field)):
            continue
        if field.is_repeated:
            elements = draw(st.lists(_values(field), max_size=LIST_COUNT_MAX))
            getattr(message, field.name).extend(elements)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(messages(field.message_type)))
        else:
            setattr(message, field.name, draw(_values(field)))
    return message


def _is_left_out(field: Any) -> st.SearchStrategy[bool]:
    if field.name == "header":
        return st.booleans()
    return st.sampled_from([True] + [False] * 7)


def _values(field: Any) -> st.SearchStrategy[Any]:
    match field.type:
        case FieldDescriptor.TYPE_MESSAGE:
            return messages(field.message_type)
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_ENUM:
            return st.sampled_from(ENUM_NUMBERS)
        case FieldDescriptor.TYPE_BYTES if field.name in BYTES:
            return st.sampled_from(BYTES[field.name])
        case FieldDescriptor.TYPE_BYTES:
            return st.sampled_from(KEYS * 3 + ODD_KEYS)
        case _:
            return st.sampled_from(INTEGERS.get(field.name, OTHER_INTEGERS))


def request_kind(method: str) -> Descriptor:
    kind: Descriptor = KV.methods_by_name[method].input_type
    return kind


@st.composite
def calls(draw: st.DrawFn) -> Call:
    method = draw(st.sampled_from(CALLS))
    return Call(method, [draw(messages(request_kind(method))).SerializeToString()])


@st.composite
def good_calls(draw: st.DrawFn) -> Call:
    """A write as the simulation's clients send it, often with an idempotency key."""
    random = Random(draw(st.integers(0, 2**32)))
    request = Requests(random, {}).draw(random.randrange(1_000))
    request.header.idempotency_key = draw(st.sampled_from(BYTES["idempotency_key"][:5]))
    return Call(request.DESCRIPTOR.name.removesuffix("Request"), [request.SerializeToString()])


@st.composite
def broken_calls(draw: st.DrawFn) -> Call:
    """A call with bytes that are no request, or another one than was meant."""
    method = draw(st.sampled_from(CALLS))
    whole = draw(messages(request_kind(method))).SerializeToString()
    cut = draw(st.integers(0, len(whole)))
    kind = draw(st.sampled_from(["bytes", "cut", "changed", "longer", "deep"]))
    match kind:
        case "cut":
            data = whole[:cut]
        case "changed":
            data = whole[:cut] + draw(st.binary(min_size=1, max_size=4)) + whole[cut + 1 :]
        case "longer":
            data = whole + draw(st.binary(max_size=20))
        case "deep":
            data = nested(draw(st.integers(1, 300)), draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8])))
        case _:
            data = draw(st.binary(max_size=60))
    return Call(method, [data])


def nested(depth: int, field: int) -> bytes:
    data = b""
    for _ in range(depth):
        size, length = len(data), b""
        while size >= 0x80:
            length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
        data = bytes([field << 3 | 2]) + length + bytes([size]) + data
    return data
