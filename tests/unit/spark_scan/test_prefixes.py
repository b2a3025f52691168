"""What statistics count, batch by batch."""

from __future__ import annotations

import pyarrow as pa
import pytest

from shalekv.core.entry import Kind
from shalekv_spark.scanning.prefixes import Prefixes

KEYS = [b"a/b/c", b"a/x", b"q", b"\xff\n\x00/y", b"/"]


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [
        (Prefixes(), [b""] * 5),
        (Prefixes(prefix_bytes=2), [b"a/", b"a/", b"q", b"\xff\n", b"/"]),
        (Prefixes(delimiter=b"/"), [b"a/", b"a/", b"", b"\xff\n\x00/", b"/"]),
        (Prefixes(delimiter=b"\xff"), [b"", b"", b"", b"\xff", b""]),
        (Prefixes(delimiter=b"b/"), [b"a/b/", b"", b"", b"", b""]),
        (Prefixes(delimiter=b"."), [b""] * 5),
    ],
)
def test_prefixes_of_any_bytes(prefixes: Prefixes, expected: list[bytes]) -> None:
    """Keys are bytes, and so are delimiters: none of them means anything else."""
    assert prefixes.of(pa.array(KEYS, pa.binary())).to_pylist() == expected


def test_versions_are_counted_by_what_they_are() -> None:
    """Only what a read sees counts as a key; whatever is stored is a version."""
    put, tombstone = int(Kind.PUT), int(Kind.TOMBSTONE)
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"a1", b"a1", b"a2", b"b"], pa.binary()),
            "value_bytes": pa.array([10, 20, 0, 5], pa.int32()),
            "kind": pa.array([put, put, tombstone, put], pa.uint8()),
            "is_live": pa.array([True, False, False, True]),
        }
    )
    assert Prefixes(prefix_bytes=1).count(batch).to_pylist() == [
        {"prefix": b"a", "keys": 1, "bytes": 12, "tombstones": 1, "versions": 3},
        {"prefix": b"b", "keys": 1, "bytes": 6, "tombstones": 0, "versions": 1},
    ]
