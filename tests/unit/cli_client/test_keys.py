"""Encodings of keys and values, and quantities for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.cli.console.keys import Encoding, json_field
from shalekv.cli.console.units import duration_ms
from shalekv.wording import counted


@given(st.binary(max_size=40), st.sampled_from([e for e in Encoding if e is not Encoding.TEXT]))
def test_binary_safe_spellings_lose_nothing(data: bytes, encoding: Encoding) -> None:
    """Escapes, hex and base64 of any bytes are one printable line, and are parsed back."""
    text = encoding.encode(data)
    assert text.isprintable()
    assert encoding.decode(text) == data


@given(st.binary(max_size=40))
def test_text_is_shown_on_one_printable_line(data: bytes) -> None:
    """Stored bytes cannot move the cursor, ring the bell or break a line of output."""
    assert Encoding.TEXT.encode(data).isprintable()


@given(st.binary(max_size=40))
def test_arguments_arrive_byte_by_byte(data: bytes) -> None:
    """Plain text is taken literally, including bytes that are not UTF-8."""
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
    """Each documented escape gives its bytes."""
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
    """A misspelt argument is an error with position and reason."""
    with pytest.raises(ValueError, match=problem):
        encoding.decode(text)


def test_json_distinguishes_bytes_from_text() -> None:
    """The name of a JSON member has the encoding; bytes that are not UTF-8 are base64."""
    assert json_field("key", b"k", Encoding.TEXT) == {"key": "k"}
    assert json_field("key", b"\xff", Encoding.TEXT) == {"key_base64": "/w=="}
    assert json_field("key", b"\xff", Encoding.HEX) == {"key_hex": "ff"}


UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS_MS)))
def test_a_time_is_a_number_with_a_unit(number: int, unit: str) -> None:
    """Each unit of a duration is converted to milliseconds."""
    assert duration_ms(f"{number}{unit}") == number * UNITS_MS[unit]


@pytest.mark.parametrize(
    "text", ["10", "", "s", "1.5h", "-1s", "1 s", "10S", "1h30m", "0s", "\u0661s"]
)
def test_other_times_are_refused(text: str) -> None:
    """A number without a unit is refused, with examples in the message."""
    with pytest.raises(ValueError, match=r"'.*'") as refusal:
        duration_ms(text)
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1_000, "1,000 rows")]
)
def test_one_is_not_many(count: int, words: str) -> None:
    """A number in a sentence agrees with its noun."""
    assert counted(count, "row") == words
