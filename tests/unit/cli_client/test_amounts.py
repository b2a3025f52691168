"""Amounts with a unit, numbers in sentences, and options that exclude each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.cli.amounts import duration_ms
from shalekv.core.wording import counted

UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS_MS)))
def test_a_time_is_a_number_with_a_unit(number: int, unit: str) -> None:
    """Each unit is what it says."""
    assert duration_ms(f"{number}{unit}") == number * UNITS_MS[unit]


@pytest.mark.parametrize(
    "text", ["10", "", "s", "1.5h", "-1s", "1 s", "10S", "1h30m", "0s", "\u0661s"]
)
def test_other_times_are_refused(text: str) -> None:
    """A number alone is not guessed to be seconds; the message has examples of what is taken."""
    with pytest.raises(ValueError, match=r"'.*'") as refusal:
        duration_ms(text)
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1_000, "1,000 rows")]
)
def test_one_is_not_many(count: int, words: str) -> None:
    """A number in a sentence agrees with its noun."""
    assert counted(count, "row") == words
