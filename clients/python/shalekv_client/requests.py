"""Requests as the wire has them, from the arguments of calls."""

from __future__ import annotations

from shalekv.v1 import kv_pb2
from shalekv_client.levels import Durability, ReadLevel


def read_header(read_level: ReadLevel) -> kv_pb2.RequestHeader:
    """The header of a read."""
    level = kv_pb2.ReadLevel.ValueType(read_level.value)
    return kv_pb2.RequestHeader(read_level=level)


def wire_durability(durability: Durability) -> kv_pb2.Durability.ValueType:
    """The durability as the wire has it."""
    return kv_pb2.Durability.ValueType(durability.value)


def key_range(start: bytes, end: bytes, prefix: bytes) -> kv_pb2.KeyRange:
    """The range; the server refuses a prefix together with a start or an end."""
    return kv_pb2.KeyRange(start=start, end=end, prefix=prefix)
