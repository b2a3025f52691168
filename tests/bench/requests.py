"""Requests of the load: of ShaleKV, and those of etcd that do the same.

Keys have 16 bytes, values 100.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from shalekv.v1 import kv_pb2

VALUE = b"v" * 100
KV = "shalekv.v1.KV"
ETCD_KV = "etcdserverpb.KV"
KEYS = 10_000


def keys(count: int = KEYS) -> list[bytes]:
    """Return distinct keys in no order."""
    numbers = list(range(count))
    Random(1).shuffle(numbers)
    return [b"k%015d" % number for number in numbers]


def puts(wanted: Iterable[bytes]) -> list[bytes]:
    return [kv_pb2.PutRequest(key=key, value=VALUE).SerializeToString() for key in wanted]


def gets(wanted: Iterable[bytes]) -> list[bytes]:
    return [kv_pb2.GetRequest(key=key).SerializeToString() for key in wanted]


def batch_gets(wanted: list[bytes], size: int = 100) -> list[bytes]:
    return [
        kv_pb2.BatchGetRequest(keys=wanted[at : at + size]).SerializeToString()
        for at in range(0, len(wanted), size)
    ]


def writes(wanted: list[bytes], size: int = 100) -> list[bytes]:
    """Return requests to put the keys, `size` at a time."""
    return [
        kv_pb2.WriteRequest(
            changes=[
                kv_pb2.Change(put=kv_pb2.PutChange(key=key, value=VALUE))
                for key in wanted[at : at + size]
            ]
        ).SerializeToString()
        for at in range(0, len(wanted), size)
    ]


def scans(starts: Iterable[bytes], limit: int) -> list[bytes]:
    return [
        kv_pb2.ScanRequest(range=kv_pb2.KeyRange(start=start), limit=limit).SerializeToString()
        for start in starts
    ]


def etcd_puts(wanted: Iterable[bytes]) -> list[bytes]:
    return [_put(key) for key in wanted]


def etcd_gets(wanted: Iterable[bytes], *, is_serializable: bool) -> list[bytes]:
    return [_field(1, key) + (b"\x38\x01" if is_serializable else b"") for key in wanted]


def etcd_txns(wanted: list[bytes], size: int = 100) -> list[bytes]:
    """Return transactions that put the keys, `size` at a time, without a condition."""
    return [
        b"".join(_field(2, _field(2, _put(key))) for key in wanted[at : at + size])
        for at in range(0, len(wanted), size)
    ]


def _put(key: bytes) -> bytes:
    return _field(1, key) + _field(2, VALUE)


def _field(number: int, data: bytes) -> bytes:
    """Return a field of bytes, as protobuf encodes it."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
