"""Keys and values as columns of other types than bytes.

Integers and bytes are decoded by Spark itself, without leaving its memory. Bytes that are not what
they are said to be end the query with an error.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as it is called everywhere

from shalekv.errors import InvalidRequest

UTF_8 = "utf-8"
_CODE = re.compile(r"(\d*)([xbBhHiIlLqQs])")
_LAYOUT = re.compile(rf"[<>]({_CODE.pattern})+")
_BITS = 8
_LONG_BYTES = 8
_DECIMAL = "decimal(20,0)"  # of unsigned 64 bits


class Field(NamedTuple):
    """One field of a format."""

    code: str
    offset: int
    width: int


def decoded(column: Column, how: str, *, names: Sequence[str] = ()) -> Column:
    """What the bytes of a column say: ``utf-8``, or a format of Python's `struct`.

    A format begins with ``>`` or ``<`` and has integers (bBhHiIlLqQ), bytes (``8s``), and padding
    (x), all of which together are as long as the bytes. One field is that type, several are a
    struct of them with these `names`, else f0, f1 and so on. Unsigned 64 bits are a decimal.

    Raises `InvalidRequest`.
    """
    if how.lower().replace("_", "-") in (UTF_8, "utf8"):
        return utf8(column)
    fields = struct_columns(column, how)
    if names and len(names) != len(fields):
        raise InvalidRequest("names", f"{how} has {len(fields)} fields, {len(names)} names")
    if len(fields) == 1:
        return fields[0]
    called = names or [f"f{at}" for at in range(len(fields))]
    return F.struct(*(field.alias(name) for field, name in zip(fields, called, strict=True)))


def utf8(column: Column) -> Column:
    """The bytes as text; those that are none end the query."""
    return F.decode(column, "UTF-8")


def struct_columns(column: Column, layout: str) -> list[Column]:
    """The fields of bytes that `struct.pack` has made with this format. Raises `InvalidRequest`."""
    fields = fields_of(layout)
    size = struct.calcsize(layout)
    is_little = layout.startswith("<")
    message = f"expected {size} bytes as {layout} has them, found "
    found = F.length(column)
    checked = F.when(found == size, column).otherwise(
        F.raise_error(F.concat(F.lit(message), found.cast("string"))).cast("binary")
    )
    return [_field(checked, part, is_little=is_little) for part in fields]


def fields_of(layout: str) -> list[Field]:
    """The fields of a format, one or more. Raises `InvalidRequest`."""
    fields = [*_fields(layout)] if _LAYOUT.fullmatch(layout) else []
    if not fields:
        problem = "expected utf-8, or a format such as >Q: < or >, and codes of integers and bytes"
        raise InvalidRequest("format", f"{layout!r}: {problem}")
    return fields


def _fields(layout: str) -> Iterator[Field]:
    offset = 0
    for count, code in _CODE.findall(layout[1:]):
        number = int(count or 1)
        if code == "x":
            offset += number
            continue
        width = number if code == "s" else struct.calcsize(f"<{code}")
        for _ in range(1 if code == "s" else number):
            yield Field(code, offset, width)
            offset += width


def _field(column: Column, part: Field, *, is_little: bool) -> Column:
    code, offset, width = part
    if code == "s":
        return F.substring(column, offset + 1, width)
    if is_little:
        digits = F.concat(
            *(F.hex(F.substring(column, offset + at, 1)) for at in range(width, 0, -1))
        )
    else:
        digits = F.hex(F.substring(column, offset + 1, width))
    if code == "Q" or (code == "L" and width == _LONG_BYTES):
        return F.conv(digits, 16, 10).cast(_DECIMAL)
    if width == _LONG_BYTES:
        return F.conv(digits, 16, -10).cast("long")
    number = F.conv(digits, 16, 10).cast("long")
    if code.isupper():
        return number
    # The upper half of what so many bytes can say are the negative numbers.
    half = 1 << (_BITS * width - 1)
    return F.when(number >= half, number - 2 * half).otherwise(number)
