"""Page tokens: what they hold comes back, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.key_range import KEY_BYTES_MAX, KeyRange
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


@given(
    view=st.integers(0, 2**64 - 1) | st.binary(min_size=16, max_size=16),
    last_key=st.binary(min_size=1, max_size=50) | st.just(b"k" * KEY_BYTES_MAX),
    reverse=st.booleans(),
    keys_only=st.booleans(),
)
def test_token_comes_back(
    view: int | bytes,
    last_key: bytes,
    reverse: bool,  # noqa: FBT001 - drawn
    keys_only: bool,  # noqa: FBT001 - drawn
) -> None:
    """What was put into a token is what is read from it, for every kind of scan."""
    header = kv_pb2.RequestHeader(snapshot_id=view if isinstance(view, bytes) else b"")
    request = scan(reverse=reverse, keys_only=keys_only, header=header)
    token = PageToken(view, last_key)
    assert decode(encode(token, request), request) == token


def test_limits_may_differ_from_page_to_page() -> None:
    """The next page may be longer or shorter, and read at another level of the header."""
    data = encode(TOKEN, scan(limit=5, limit_bytes=7))
    header = kv_pb2.RequestHeader(read_level=kv_pb2.READ_LEVEL_LINEARIZABLE)
    assert decode(data, scan(limit=1_000, header=header)) == TOKEN


def test_range_may_be_named_in_another_way() -> None:
    """A prefix and its interval are the same range."""
    data = encode(TOKEN, scan(range=kv_pb2.KeyRange(prefix=b"a")))
    assert decode(data, scan(range=kv_pb2.KeyRange(start=b"a", end=b"b"))) == TOKEN


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


def test_token_of_a_snapshot_is_for_that_snapshot() -> None:
    """It is refused for another one, and for none; and that of a view for any snapshot."""
    at_view, at_snapshot = (encode(token, request) for token, request in TOKENS)
    other = scan(header=kv_pb2.RequestHeader(snapshot_id=bytes(16)))
    for data, request in (
        (at_snapshot, other),
        (at_snapshot, scan()),
        (at_view, scan(header=AT_SNAPSHOT)),
    ):
        assert "another snapshot" in problem_of(data, request)


@given(data=st.binary(min_size=1, max_size=100))
def test_garbage_is_refused(data: bytes) -> None:
    """Bytes that no server made are refused as a mistake of the request, not as a bug."""
    problem_of(data, scan())


OTHERS: list[tuple[str, kv_pb2.ScanRequest]] = [
    ("start", scan(range=kv_pb2.KeyRange(start=b"b", end=b"c"))),
    ("end", scan(range=kv_pb2.KeyRange(start=b"a", end=b"d"))),
    ("no end", scan(range=kv_pb2.KeyRange(start=b"a"))),
    ("all keys", scan(range=kv_pb2.KeyRange())),
    ("bytes moved from start to end", scan(range=kv_pb2.KeyRange(start=b"", end=b"ac"))),
    ("direction", scan(reverse=True)),
    ("keys_only", scan(keys_only=True)),
]


@pytest.mark.parametrize(("what", "other"), OTHERS, ids=[what for what, _ in OTHERS])
def test_token_of_another_scan_is_refused(what: str, other: kv_pb2.ScanRequest) -> None:
    """Range, direction and `keys_only` must be as they were, in both directions of mistaking."""
    assert what
    assert "another range" in problem_of(encode(TOKEN, scan()), other)
    assert "another range" in problem_of(encode(TOKEN, other), scan())


def test_token_of_a_later_version_is_refused() -> None:
    """What a later server gave out is intact, and yet not understood."""
    later = bytearray(encode(TOKEN, scan()))
    later[4] = 3
    later[:4] = crc32c(bytes(later[4:])).to_bytes(4, "little")
    assert "version 3" in problem_of(bytes(later), scan())


def test_token_of_another_database_is_refused() -> None:
    """Views are counted in each database for itself: a token must not fit by chance."""
    assert "another database" in problem_of(encode(TOKEN, scan()), scan(), b"e" * 16)


@pytest.mark.parametrize(
    ("reverse", "last_key", "rest"),
    [
        (False, b"a", KeyRange(b"a\0", b"c")),
        (False, b"b\xff", KeyRange(b"b\xff\0", b"c")),
        (True, b"b", KeyRange(b"a", b"b")),
        (True, b"a", KeyRange(b"a", b"a")),
    ],
)
def test_rest_of_a_range(reverse: bool, last_key: bytes, rest: KeyRange) -> None:  # noqa: FBT001 - a row of the table
    """The next page begins behind the last key, in the direction of the scan."""
    keys = KeyRange(b"a", b"c")
    assert PageToken(1, last_key).rest(keys, reverse=reverse) == rest
    assert rest.is_empty == (last_key == b"a" and reverse)
