"""Header blocks: what is decoded and encoded here is what the `hpack` package makes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from random import Random
from typing import Any, TypeAlias

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from shalekv_wire.frames import DATA, DEFAULT_TABLE_BYTES, END_HEADERS, ConnectionFault
from shalekv_wire.headers import (
    FIELDS_MAX,
    FieldEncoder,
    HeaderDecoder,
    TooLarge,
    literal,
    metadata_fields,
    percent_encoded,
    request_head,
    response_head,
    status_fields,
    timeout_field,
)
from shalekv_wire.sending import Sender
from shalekv_wire.status import StatusCode
from tests.fuzz.budget import attempts, budgets, replayable
from tests.wire.core import parsed

BUDGET_S = 0.5
LIST_BYTES_MAX = 1 << 16
BLOCKS = 30  # of an attempt, at most
# Few fields, so that the same block comes again in another state of the table; some fill it.
FIELDS = [(b"a", b"a"), (b"a", b"b"), (b":path", b"/x"), (b"x-long", b"y" * 60), (b"x-bin", b"")]
TABLE_SIZES = [0, 100, DEFAULT_TABLE_BYTES]
# Parts of a block that are written out.
PARTS = [
    b"\x20",  # the size of the table: 0
    b"\x3f\x45",  # 100
    b"\x3f\xe1\x1f",  # 4096
    b"\x40\x01a\x01b",  # a field that is added to the table
    b"\x44\x02/x",  # likewise, with the name of a static entry
    b"\x40\x06x-long\x3c" + b"y" * 60,
    b"\x10\x01a\x01e",  # a field that is never to be added
    b"\x82",  # a static entry
    b"\xbe",  # the newest entry
    b"\xbf",  # the one before
    b"\x7e\x01f",  # the name of the newest entry with another value, added
]

ListDecoder: TypeAlias = HeaderDecoder[list[tuple[bytes, bytes]]]


def listed(fields: Iterable[Any]) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in fields]


def header_decoder() -> ListDecoder:
    return HeaderDecoder(listed, list_bytes_max=LIST_BYTES_MAX)


def test_a_block_is_decoded_again_after_a_change_of_the_table() -> None:
    """A field that an empty table of size 0 did not take is added when the size is 4096 again."""
    decoder, field = header_decoder(), b"\x40\x01a\x01b"
    for block in (b"\x20\x82", field, b"\x3f\xe1\x1f\x82", field):
        decoder.decode(block)
    assert decoder.decode(b"\xbe") == [(b"a", b"b")]


@budgets
def test_blocks_of_an_encoder_have_its_fields(times: int) -> None:
    """Any blocks give the fields of their encoder, also those that are equal to earlier ones."""
    for number, random in attempts("blocks of an encoder", times * BUDGET_S):
        with replayable(number):
            encoder, decoder, is_huffman = Encoder(), header_decoder(), random.random() < 0.5
            for _ in range(random.randrange(BLOCKS)):
                if random.random() < 0.2:
                    encoder.header_table_size = random.choice(TABLE_SIZES)
                fields = random.sample(FIELDS, random.randrange(3))
                block = encoder.encode(fields, huffman=is_huffman)
                assert decoder.decode(block) == fields


@budgets
def test_blocks_mean_what_they_mean_to_hpack(times: int) -> None:
    """Blocks in any order have the fields of a decoder that keeps nothing, or both refuse."""
    for number, random in attempts("written blocks", times * BUDGET_S):
        with replayable(number):
            decoder, oracle = header_decoder(), Decoder()
            for _ in range(random.randrange(BLOCKS)):
                block = b"".join(random.choices(PARTS, k=random.randrange(1, 4)))
                if random.random() < 0.02:
                    block = random.randbytes(random.randrange(20))
                if not _agree(decoder, oracle, block):
                    break


def _agree(decoder: ListDecoder, oracle: Decoder, block: bytes) -> bool:
    """Compare one block; returns whether it could be decoded."""
    try:
        expected = listed(oracle.decode(block, raw=True))
    except Exception:  # noqa: BLE001 - whatever it is, the connection ends
        with pytest.raises(ConnectionFault):
            decoder.decode(block)
        return False
    assert decoder.decode(block) == expected
    return True


@budgets
def test_encoded_fields_are_those_that_hpack_decodes(times: int) -> None:
    """Fields that are repeated, fields that are not, and a table that the peer makes smaller."""
    for number, random in attempts("encoded fields", times * BUDGET_S):
        with replayable(number):
            encoder, decoder = FieldEncoder(), Decoder()
            for _ in range(random.randrange(BLOCKS)):
                if random.random() < 0.1:
                    _limit_table(encoder, decoder, random)
                name, value = random.choice(FIELDS)
                # The field comes first: it may be what the change of the size is for.
                field = random.choice([encoder.repeated, literal])(name, value)
                block = encoder.take_prefix() + field
                assert listed(decoder.decode(block, raw=True)) == [(name, value)]


def _limit_table(encoder: FieldEncoder, decoder: Decoder, random: Random) -> None:
    """Let the peer, who decodes, allow another size: it must be announced if it is smaller."""
    size_bytes = random.choice(TABLE_SIZES)
    encoder.limit_table(size_bytes)
    decoder.max_allowed_table_size = size_bytes
    if not encoder.has_prefix and decoder.header_table_size > size_bytes:
        # The announcement was made earlier, or the table is not used.
        decoder.header_table_size = size_bytes


@pytest.mark.parametrize("table_bytes", [0, DEFAULT_TABLE_BYTES])
@pytest.mark.parametrize("window", [7, 1 << 16])
def test_replies_have_the_fields_of_their_calls(table_bytes: int, window: int) -> None:
    """Some, none or many, in the first reply and in later ones, whose other fields are in the
    table, if the peer allows one; also while flow control holds the reply back.
    """
    sender, decoder, names = Sender(lambda: None), Decoder(), [b"", b"a", b"v" * 40_000]
    decoder.max_header_list_size = 1 << 17
    for number, name in enumerate(names * 3):
        if number == len(names):  # the peer's wish comes when fields are in the table
            sender.limit_table(table_bytes)
            decoder.max_allowed_table_size = table_bytes
        fields = [(b"x-name", name)] if name else []
        call = OneReply(2 * number + 1, window)
        sender.reply(call, b"reply", b"".join(literal(*field) for field in fields))
        data = sender.take()
        if call.unsent is not None:
            sender.widen_stream(call, 1 << 10)
            data += sender.take()
        blocks, body = [b""], b""
        for frame in parsed(data):
            assert frame.stream_id == call.id
            if frame.kind == DATA:
                body += frame.payload
                continue
            blocks[-1] += frame.payload
            if frame.flags & END_HEADERS:
                blocks.append(b"")
        header, trailers = (listed(decoder.decode(block, raw=True)) for block in blocks[:2])
        assert header == [(b":status", b"200"), (b"content-type", b"application/grpc"), *fields]
        assert trailers == [(b"grpc-status", b"0")]
        assert (body, blocks[2:], call.has_ended) == (b"\0\0\0\0\5reply", [b""], True)


class OneReply:
    """A stream that sends a reply."""

    def __init__(self, stream_id: int, send_window: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.unsent: deque[memoryview] | None = None
        self.ending: bytes | None = None
        self.has_ended = False

    def on_sent(self) -> None: ...

    def on_local_end(self) -> None:
        self.has_ended = True


@given(
    st.lists(
        st.tuples(st.just("x-data-bin"), st.binary(max_size=50))
        | st.tuples(st.just("x-text"), st.from_regex(r"[!-~]([ -~]{0,20}[!-~])?", fullmatch=True)),
        max_size=5,
    ),
    st.sampled_from(StatusCode),
    st.text(max_size=50),
    st.binary(max_size=100),
)
def test_trailers_come_back(
    metadata: list[tuple[str, str | bytes]], code: StatusCode, message: str, details: bytes
) -> None:
    """Status, message, details and metadata of any content are what they were."""
    block = status_fields(code, message, details) + metadata_fields(metadata)
    head = response_head(listed(Decoder().decode(block, raw=True)))
    assert (head.status, head.message) == (code, message.encode("utf-8", "replace").decode())
    found = [("grpc-status-details-bin", details)] if details else []
    assert [*head.metadata] == found + metadata


@given(st.text())
def test_messages_are_printable(message: str) -> None:
    """A percent-encoded message is printable ASCII, and has no space at an end: strict peers
    refuse such a field.
    """
    encoded = percent_encoded(message)
    assert all(0x20 <= byte < 0x7F for byte in encoded)
    assert encoded == encoded.strip()


def test_fields_and_values_are_bounded() -> None:
    """Each takes longer than its byte: that of an index, or a comma in a binary field."""
    decoder = header_decoder()
    decoder.decode(b"\x40\x01a\x01b")
    assert len(decoder.decode(b"\xbe" * FIELDS_MAX)) == FIELDS_MAX
    with pytest.raises(TooLarge, match="129 fields of metadata, and 128 at most"):
        decoder.decode(b"\xbe" * (FIELDS_MAX + 1))
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/B")]
    fields += [(b"content-type", b"application/grpc"), (b"x-bin", b"," * 99)]
    assert len(request_head(fields).metadata) == 100
    for more in (b"," * 16_000, b"," * 28):
        with pytest.raises(TooLarge, match="more than 128 values"):
            request_head([*fields, (b"y-bin", more)])


def test_a_message_of_another_server_may_end_in_a_space() -> None:
    """The servers of gRPC send spaces as they are; the status is what counts."""
    head = response_head([(b"grpc-status", b"5"), (b"grpc-message", b"no such key: ")])
    assert (head.status, head.message.rstrip()) == (StatusCode.NOT_FOUND, "no such key:")


@given(st.floats(1e-9, 9e7))
def test_timeouts_are_rounded_up(timeout_s: float) -> None:
    """The server gives up after the caller; the difference is less than a hundredth."""
    field = timeout_field(timeout_s)
    sent_s = int(field[:-1]) * {b"u": 1e-6, b"m": 1e-3, b"S": 1.0}[field[-1:]]
    assert len(field) <= 9
    assert timeout_s * (1 - 1e-12) <= sent_s <= timeout_s * 1.01 + 1e-6
