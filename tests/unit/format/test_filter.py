"""Filters deny none of their keys, and let few others through."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.errors import BadStructure
from shalekv.format.filter import Filter, first_candidate, key_hash, parse_filter
from shalekv.format.sst import open_filter
from shalekv.format.sst_writer import encode_fence, encode_sst
from shalekv.protocol.entry import Entry
from tests.kit.forging import patched, u32
from tests.kit.samples import (
    LEVEL_NAME,
    POINTS,
    RANGES,
    SYSTEM,
    build_filter,
    opened,
    points,
    properties,
    put,
    sample,
)

bits_per_key = st.floats(1, 64) | st.sampled_from([1, 6.4, 6.5, 10, 64])


def parsed(data: bytes | memoryview) -> Filter:
    found = parse_filter(LEVEL_NAME, 4096, data)
    assert found is not None
    return found


@given(st.lists(st.binary(max_size=40), max_size=200), bits_per_key)
def test_no_key_is_denied(keys: list[bytes], bits: float) -> None:
    """A filter of any keys and size denies none of its keys."""
    found = parsed(build_filter(keys, bits))
    assert all(found.may_contain(key) for key in keys)
    assert all(found.may_contain_hash(key_hash(key)) for key in keys)


@pytest.mark.parametrize(
    ("bits", "least", "most"),
    [(4, 0.13, 0.17), (6, 0.05, 0.075), (8, 0.019, 0.028), (10, 0.007, 0.012), (16, 0.0005, 0.002)],
)
def test_few_other_keys_are_let_through(bits: float, least: float, most: float) -> None:
    """The rate of absent keys that pass is that of server/docs/formats.md."""
    count = 50_000
    for prefix in (b"user/%012d", b"%d"):
        found = parsed(build_filter((prefix % (7 * number) for number in range(count)), bits))
        passed = sum(found.may_contain(prefix % (7 * number + 3)) for number in range(count))
        assert least < passed / count < most


@given(st.integers(0, 3_000), bits_per_key)
def test_a_filter_is_as_large_as_asked_for(count: int, bits: float) -> None:
    """A filter takes its bits for each key, rounded up to a line, and 16 bytes."""
    data = build_filter([b"%d" % number for number in range(count)], bits)
    assert len(data) % 8 == 0
    assert count * bits <= 8 * (len(data) - 16) < max(1, count * bits) + 512


@pytest.mark.parametrize("bits", [0, 0.99, 64.1, -1, float("nan"), float("inf")])
def test_absurd_sizes_are_refused(bits: float) -> None:
    """A filter of less than a bit for a key, or of more than 64, is refused."""
    with pytest.raises(ValueError, match="bits_per_key"):
        build_filter([], bits)


@pytest.mark.parametrize(
    ("at", "new"),
    [
        (0, b"\x00"),
        (0, b"\x02"),
        (0, b"\xff"),
        (1, b"\x00"),
        (1, b"\x05"),
        (1, b"\x09"),
        (2, b"\x01"),
    ],
)
def test_kinds_of_later_versions_are_ignored(at: int, new: bytes) -> None:
    """A filter that this version does not know counts as none."""
    data = patched(build_filter([b"a"]), at, new)
    assert parse_filter(LEVEL_NAME, 0, data) is None
    sst = opened(sample(filter_bytes=data))
    assert open_filter(sst.footer, sst.filter_bytes) is None


@pytest.mark.parametrize("lines", [0, 2, 2**32 - 1])
def test_a_filter_of_another_length_is_refused(lines: int) -> None:
    """A header with another number of lines than there are is a typed error that names the byte."""
    with pytest.raises(BadStructure, match="lines") as caught:
        parsed(patched(build_filter([b"a"]), 4, u32(lines)))
    assert caught.value.offset == 4100
    with pytest.raises(BadStructure):
        parsed(build_filter([b"a"]) + bytes(8))


@given(points, st.sampled_from([1, 99]))
def test_an_sst_has_a_filter_of_its_points(entries: list[Entry], block_bytes: int) -> None:
    """The filter of an SST is that of the keys of its points, or without any, of its records."""
    data = encode_sst(
        properties(), iter(entries), RANGES, SYSTEM, block_bytes=block_bytes, filter_bits_per_key=10
    )
    sst = opened(data)
    sst.audit()
    keys = [entry.key for entry in entries or SYSTEM]
    assert sst.filter_bytes == build_filter(keys, 10)
    found = open_filter(sst.footer, sst.filter_bytes)
    assert found is not None
    assert found.keys == len({*keys})
    assert list(sst.entries()) == entries


def test_an_audit_finds_a_filter_that_denies_keys() -> None:
    """A filter that would hide a key of its SST is found by an audit."""
    for wrong in (build_filter([]), build_filter([entry.key for entry in POINTS[:-1]])):
        with pytest.raises(BadStructure, match="denies"):
            opened(sample(filter_bytes=wrong)).audit()


def test_an_sst_without_entries_has_no_filter() -> None:
    """A fence has no filter, even if its writer wants one."""
    data = encode_sst(properties(), [], block_bytes=9, filter_bits_per_key=10)
    assert data == encode_fence(properties())


def test_an_sst_has_one_filter() -> None:
    """Bytes of a filter and a size for a new one together are refused."""
    with pytest.raises(ValueError, match="one filter"):
        sample(filter_bytes=b"12345678", filter_bits_per_key=10)
    with pytest.raises(ValueError, match="bits_per_key"):
        encode_sst(properties(), [put(b"a", 1)], block_bytes=9, filter_bits_per_key=0)


def test_probing_needs_no_numpy() -> None:
    """Reading and writing SSTs without new filters does not import numpy."""
    data = build_filter([b"a"])
    program = (
        "import sys, shalekv.format.sst_writer, shalekv.format.sst\n"
        "from shalekv.format.filter import parse_filter\n"
        f"assert parse_filter('', 0, {data!r}).may_contain(b'a')\n"
        "assert 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@given(
    added=st.lists(st.none() | st.sets(st.binary(max_size=4), max_size=40), max_size=5),
    keys=st.lists(st.binary(max_size=4), max_size=20),
)
def test_the_first_candidate_is_that_of_a_search(
    added: list[set[bytes] | None], keys: list[bytes]
) -> None:
    """A key is looked up in many filters as in each; what has no filter may have every key."""
    filters = [
        None if added_keys is None else parsed(build_filter(added_keys)) for added_keys in added
    ]
    for key in keys:
        may_have = [one is None or one.may_contain(key) for one in filters]
        for start in range(len(filters) + 1):
            expected = next((n for n in range(start, len(filters)) if may_have[n]), len(filters))
            assert first_candidate(filters, key_hash(key), start) == expected
