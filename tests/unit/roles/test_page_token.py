"""Page tokens: what they hold comes back, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import pytest

from shalekv.errors import InvalidRequest
from shalekv.format.coding import crc32c
from shalekv.roles import requests
from shalekv.roles.page_token import PageToken, decode_page_token
from shalekv.v1 import kv_pb2

DATABASE_ID = b"d" * 16
RANGE: dict[str, bytes] = {"start": b"a", "end": b"c"}


def scan(**fields: Any) -> kv_pb2.ScanRequest:
    """A scan, of `RANGE` unless another is given."""
    return kv_pb2.ScanRequest(**({"range": kv_pb2.KeyRange(**RANGE)} | fields))


def encode(token: PageToken, request: kv_pb2.ScanRequest) -> bytes:
    """The token that ends a page of this scan."""
    return token.encode(DATABASE_ID, request, requests.key_range(request.range))


def decode(data: bytes, request: kv_pb2.ScanRequest, database_id: bytes = DATABASE_ID) -> PageToken:
    """The token in a request that goes on with this scan."""
    going_on = kv_pb2.ScanRequest()
    going_on.CopyFrom(request)
    going_on.page_token = data
    return decode_page_token(database_id, going_on, requests.key_range(request.range))


def problem_of(data: bytes, request: kv_pb2.ScanRequest, database_id: bytes = DATABASE_ID) -> str:
    """Why a token is refused."""
    with pytest.raises(InvalidRequest) as caught:
        decode(data, request, database_id)
    assert caught.value.field == "page_token"
    return caught.value.problem


TOKEN = PageToken(0x0123456789ABCDEF, b"a key")
SNAPSHOT_ID = bytes(range(16))
AT_SNAPSHOT = kv_pb2.RequestHeader(snapshot_id=SNAPSHOT_ID)
TOKENS = [(TOKEN, scan()), (PageToken(SNAPSHOT_ID, b"a key"), scan(header=AT_SNAPSHOT))]


@pytest.mark.parametrize(("token", "request_"), TOKENS)
def test_every_flipped_bit_is_noticed(token: PageToken, request_: kv_pb2.ScanRequest) -> None:
    """A token with any single bit flipped is refused, and its field is named."""
    data = encode(token, request_)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert "checksum" in problem_of(bytes(flipped), request_)


@pytest.mark.parametrize(("token", "request_"), TOKENS)
def test_cut_and_lengthened_tokens_are_refused(
    token: PageToken, request_: kv_pb2.ScanRequest
) -> None:
    """A token of any other length is none."""
    data = encode(token, request_)
    for length in range(len(data)):
        problem_of(data[:length] or b"\0", request_)
    problem_of(data + b"\0", request_)
    assert "short" in problem_of(encode(PageToken(token.view, b""), request_), request_)


def test_token_of_a_later_version_is_refused() -> None:
    """What a later server gave out is intact, and yet not understood."""
    later = bytearray(encode(TOKEN, scan()))
    later[4] = 3
    later[:4] = crc32c(bytes(later[4:])).to_bytes(4, "little")
    assert "version 3" in problem_of(bytes(later), scan())


def test_token_of_another_database_is_refused() -> None:
    """Views are counted in each database for itself: a token must not fit by chance."""
    assert "another database" in problem_of(encode(TOKEN, scan()), scan(), b"e" * 16)
