"""Which formats of keys and values are understood."""

from __future__ import annotations

import pytest

from shalekv.errors import InvalidRequest
from shalekv_spark.scanning.decoding import fields_of


def test_fields_follow_each_other() -> None:
    """Padding has none; bytes are one."""
    fields = fields_of("<2xHI4s2b")
    assert [(f.code, f.offset, f.width) for f in fields] == [
        ("H", 2, 2),
        ("I", 4, 4),
        ("s", 8, 4),
        ("b", 12, 1),
        ("b", 13, 1),
    ]


@pytest.mark.parametrize("layout", ["", "Q", ">", "=Q", ">d", ">Q ", ">Z", "utf-16", ">2x"])
def test_other_formats_are_refused(layout: str) -> None:
    """Those without a byte order have padding that depends on the machine."""
    with pytest.raises(InvalidRequest, match="format"):
        fields_of(layout)
