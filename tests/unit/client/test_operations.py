"""The requests of operations: those that are put together from bytes are those of protobuf."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shalekv.format.coding import varint as server_varint
from shalekv.v1 import kv_pb2
from shalekv_client import Durability, ReadLevel, operations
from shalekv_client.operations import varint


@given(
    key=st.binary(max_size=300),
    value=st.binary(max_size=20_000),
    idempotency_key=st.none() | st.binary(min_size=1, max_size=200),
    durability=st.sampled_from(Durability),
    level=st.sampled_from(ReadLevel),
)
def test_requests_of_bytes_are_those_of_protobuf(
    *,
    key: bytes,
    value: bytes,
    idempotency_key: bytes | None,
    durability: Durability,
    level: ReadLevel,
) -> None:
    """A put or get that is put together from bytes is the request that protobuf would encode."""
    put = operations.put(key, value, durability=durability, idempotency_key=idempotency_key)
    header = kv_pb2.RequestHeader(idempotency_key=idempotency_key) if idempotency_key else None
    assert kv_pb2.PutRequest.FromString(put.data) == kv_pb2.PutRequest(
        header=header,
        key=key,
        value=value,
        durability=kv_pb2.Durability.ValueType(durability.value),
    )
    get = operations.get(key, read_level=level, min_seq=7)
    expected = kv_pb2.GetRequest(
        header=kv_pb2.RequestHeader(read_level=kv_pb2.ReadLevel.ValueType(level.value)), key=key
    )
    assert kv_pb2.GetRequest.FromString(get.data) == expected
    expected.header.min_seq = 7
    assert kv_pb2.GetRequest.FromString(get.demanding_min_seq().data) == expected


@given(number=st.integers(0, 2**64 - 1))
def test_varints_are_those_of_protobuf(number: int) -> None:
    """Numbers of any size are encoded as protobuf does."""
    assert kv_pb2.RequestHeader.FromString(b"\x08" + varint(number)).min_seq == number
    assert server_varint(number) == varint(number)
