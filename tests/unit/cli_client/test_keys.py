r"""Keys and values as people type and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.cli.keys import Encoding, json_field


@given(st.binary(max_size=40), st.sampled_from([e for e in Encoding if e is not Encoding.TEXT]))
def test_binary_safe_spellings_lose_nothing(data: bytes, encoding: Encoding) -> None:
    """Whatever the bytes, escapes, hex and base64 give them back, from one printable line."""
    text = encoding.encode(data)
    assert text.isprintable()
    assert encoding.decode(text) == data


@given(st.binary(max_size=40))
def test_text_is_shown_on_one_printable_line(data: bytes) -> None:
    """Nothing that is stored can move the cursor, ring the bell or break a line of output."""
    assert Encoding.TEXT.encode(data).isprintable()


@given(st.binary(max_size=40))
def test_arguments_arrive_byte_by_byte(data: bytes) -> None:
    """Text is taken as it is, also when what was typed is not UTF-8."""
    assert Encoding.TEXT.decode(data.decode("utf-8", "surrogateescape")) == data


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (r"a\tb\n\r\0\\", b"a\tb\n\r\0\\"),
        (r"\x00\xfF", b"\x00\xff"),
        (r"\u03b1\U0001F431", "\u03b1\U0001f431".encode()),
        ("\u03b1", "\u03b1".encode()),
        ("", b""),
    ],
)
def test_escapes(text: str, data: bytes) -> None:
    """Each documented escape stands for its bytes."""
    assert Encoding.ESCAPED.decode(text) == data


@pytest.mark.parametrize(
    ("encoding", "text", "problem"),
    [
        (Encoding.ESCAPED, r"ab\qc", "backslash at character 3"),
        (Encoding.ESCAPED, "ab\\", "backslash at character 3"),
        (Encoding.ESCAPED, r"\x0", "backslash at character 1"),
        (Encoding.ESCAPED, r"\ud800", "not a character"),
        (Encoding.ESCAPED, r"\U00110000", "not a character"),
        (Encoding.HEX, "abc", "not hexadecimal"),
        (Encoding.HEX, "zz", "not hexadecimal"),
        (Encoding.BASE64, "a", "not base64"),
        (Encoding.BASE64, "ab-_", "not base64"),
    ],
)
def test_misspelt_bytes_are_refused(encoding: Encoding, text: str, problem: str) -> None:
    """What spells no bytes is an error that says where and why, never a guess."""
    with pytest.raises(ValueError, match=problem):
        encoding.decode(text)


def test_json_tells_bytes_from_text() -> None:
    """In JSON the name of a member tells its spelling; what is not UTF-8 stands as base64."""
    assert json_field("key", b"k", Encoding.TEXT) == {"key": "k"}
    assert json_field("key", b"\xff", Encoding.TEXT) == {"key_base64": "/w=="}
    assert json_field("key", b"\xff", Encoding.HEX) == {"key_hex": "ff"}
