"""Sizes and amplification of levels, as packed tables tell them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.level_sizes import (
    LevelSize,
    most_over_one_key,
    read_amplification,
    space_amplification,
    total_bytes,
)
from shalekv.core.tree import SYSTEM_LEVEL, upper_bound
from tests.kit.manifests import some_info


def sizes(**levels: int) -> list[LevelSize]:
    """Levels by name, each with so many bytes in two SSTs."""
    return [LevelSize(int(name[1:]), 2, bytes_, 0, 0) for name, bytes_ in levels.items()]


@pytest.mark.parametrize(
    ("levels", "space", "reads"),
    [
        ({}, 0.0, 0),
        ({"L0": 10}, 1.0, 2),
        ({"L0": 10, "L6": 90, "L7": 100}, 2.0, 4),
        ({"L7": 100, f"L{SYSTEM_LEVEL}": 900}, 1.0, 1),
        ({f"L{SYSTEM_LEVEL}": 900}, 0.0, 0),
    ],
)
def test_amplification(levels: dict[str, int], space: float, reads: int) -> None:
    """Records of the system count in the sum of bytes alone."""
    found = sizes(**levels)
    assert (space_amplification(found), read_amplification(found)) == (space, reads)
    assert total_bytes(found) == sum(levels.values())


keys = st.binary(min_size=1, max_size=2)
ranges = st.tuples(keys, keys | st.just(b"")).filter(lambda pair: not pair[1] or pair[0] <= pair[1])


@given(st.lists(ranges, max_size=8))
def test_most_over_one_key(bounds: list[tuple[bytes, bytes]]) -> None:
    """As many as contain the first key of one of them, at the worst of these."""
    infos = [
        replace(some_info(number), first_key=first, last_key=last)
        for number, (first, last) in enumerate(bounds)
    ]
    expected = max(
        (
            sum(info.first_key <= other.first_key <= upper_bound(info) for info in infos)
            for other in infos
        ),
        default=0,
    )
    assert most_over_one_key(infos) == expected
