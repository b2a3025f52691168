r"""Text encodings of keys and values on the command line: plain text, or a binary-safe one.

    text      UTF-8; unprintable characters are printed as \n, \t, \r, \xNN, but not parsed
    --escaped the same escapes, also parsed: \\ \n \t \r \0 \xNN \uNNNN \UNNNNNNNN
    --hex     68656c6c6f
    --base64  aGVsbG8=

Plain text is taken literally, backslashes included, so that JSON and paths need no escapes.
"""

from __future__ import annotations

import base64
import binascii
import enum
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from shalekv.cli.console.option_groups import grouped_options

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_ESCAPE = r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[\\ntr0]|)"
_PARSED = {"\\": b"\\", "n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0"}
_PRINTED = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}
_FLAGS = {
    "escaped": r"Keys and values have escapes: \\ \n \t \r \0 \xNN \uNNNN.",
    "base64": "Keys and values are base64.",
    "hex": "Keys and values are hexadecimal.",
}


class Encoding(enum.Enum):
    """Text encoding of bytes."""

    TEXT = "text"
    ESCAPED = "escaped"
    HEX = "hex"
    BASE64 = "base64"

    def decode(self, text: str) -> bytes:
        """Parse `text` into bytes. Raises ValueError with the problem."""
        match self:
            case Encoding.TEXT:
                return _raw(text)
            case Encoding.ESCAPED:
                return _unescaped(text)
            case Encoding.HEX:
                return _from_hex(text)
            case Encoding.BASE64:
                return _from_base64(text)

    def encode(self, data: bytes) -> str:
        """Format `data` on one line, without control characters."""
        match self:
            case Encoding.TEXT:
                return printable(data)
            case Encoding.ESCAPED:
                return printable(data.replace(b"\\", b"\\\\"))
            case Encoding.HEX:
                return data.hex()
            case Encoding.BASE64:
                return base64.b64encode(data).decode("ascii")


def printable(data: bytes, *, keep: str = "") -> str:
    """Format `data` as text; unprintable characters are escaped, except those in `keep`."""
    text = data.decode("utf-8", "surrogateescape")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def json_field(name: str, data: bytes, encoding: Encoding) -> dict[str, str]:
    """Format `data` as a member of a JSON object; the suffix of its name tells the encoding.

    ``NAME`` is text; ``NAME_hex``, ``NAME_base64`` and ``NAME_escaped`` have the other encodings.
    Text that is not UTF-8 becomes ``NAME_base64``.
    """
    if encoding is not Encoding.TEXT:
        return {f"{name}_{encoding.value}": encoding.encode(data)}
    try:
        return {name: data.decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{name}_base64": Encoding.BASE64.encode(data)}


def encoding_options(command: CommandT) -> CommandT:
    """A decorator that adds --hex, --base64 and --escaped, as the argument `encoding`."""
    command = grouped_options("encoding", tuple(_FLAGS), _chosen)(command)
    for name, text in _FLAGS.items():
        command = click.option(f"--{name}", is_flag=True, help=text)(command)
    return command


def argument_bytes(encoding: Encoding, text: str, name: str) -> bytes:
    """Parse the argument called `name` into bytes; a usage error if that fails."""
    try:
        return encoding.decode(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=name) from None


def _chosen(**flags: bool) -> Encoding:
    given = [name for name, is_given in flags.items() if is_given]
    if len(given) > 1:
        raise click.UsageError("--hex, --base64 and --escaped exclude each other")
    return Encoding(given[0]) if given else Encoding.TEXT


def _raw(text: str) -> bytes:
    # Bytes of arguments that are not UTF-8 arrive as surrogates, and are restored here.
    return text.encode("utf-8", "surrogateescape")


def _escaped(character: str) -> str:
    if character in _PRINTED:
        return _PRINTED[character]
    return "".join(f"\\x{byte:02x}" for byte in _raw(character))


def _unescaped(text: str) -> bytes:
    parts = []
    at = 0
    for found in re.finditer(_ESCAPE, text):
        code = found.group(1)
        if not code:
            raise ValueError(
                f"the backslash at character {found.start() + 1} begins no escape; "
                r"these exist: \\ \n \t \r \0 \xNN \uNNNN \UNNNNNNNN"
            )
        parts += [_raw(text[at : found.start()]), _escape_bytes(code)]
        at = found.end()
    return b"".join([*parts, _raw(text[at:])])


def _escape_bytes(code: str) -> bytes:
    if code in _PARSED:
        return _PARSED[code]
    if code[0] == "x":
        return bytes.fromhex(code[1:])
    try:
        return chr(int(code[1:], 16)).encode("utf-8")
    except (ValueError, OverflowError):  # above U+10FFFF, or half of a surrogate pair
        raise ValueError(f"\\{code} is not a character; write \\xNN for bytes") from None


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        problem = (
            f"'{printable(_raw(text))}' is not hexadecimal: two digits of 0-9a-f for each byte"
        )
        raise ValueError(problem) from None


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(_raw(text), validate=True)
    except binascii.Error as error:
        raise ValueError(f"'{printable(_raw(text))}' is not base64: {error}") from None
