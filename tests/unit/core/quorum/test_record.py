"""Records, marks and the shapes of logs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shalekv.core.quorum.record import EMPTY_LOG, Mark
from tests.unit.core.quorum.logs import log, records

EPOCHS = st.lists(st.integers(1, 5), max_size=12).map(sorted).map(lambda n: "".join(map(str, n)))


def test_the_epoch_of_the_last_record_ranks_before_its_number() -> None:
    """CE1, CE2: a newer epoch wins over a longer log, and length decides within an epoch."""
    assert log("12").last.rank > log("1111").last.rank
    assert log("1111").last.rank > log("111").last.rank
    assert EMPTY_LOG.last.rank < log("1").last.rank


@pytest.mark.parametrize(
    "wrong",
    [
        {"lsn": 4},
        {"epoch": 1},
        {"previous_checksum": 1},
        {"wal_id": 4},
        {"wal_id": 1},
    ],
    ids=str,
)
def test_a_record_follows_its_predecessor_alone(wrong: dict[str, Any]) -> None:
    """CE11: number, epoch, checksum and object must continue those of the record before."""
    *_, second, third = records("122")
    assert third.follows(second.mark)
    assert not replace(third, **wrong).follows(second.mark)


def test_an_object_goes_on_until_it_is_ended() -> None:
    """CE16: a record may go on with an object that was left open, or begin the next."""
    first, second = records("11")
    left_open = replace(first.mark, ends_object=False)
    assert replace(second, wal_id=0).follows(left_open)
    assert second.follows(left_open)
    assert not replace(second, wal_id=0).follows(first.mark)


def test_a_new_log_begins_with_any_object() -> None:
    """Before the first record of a database nobody knows what the archive holds."""
    (record,) = records("1")
    assert replace(record, wal_id=41).follows(Mark())


@given(EPOCHS, EPOCHS, st.integers(0, 12), st.integers(0, 12))
def test_the_common_end_is_the_last_equal_place(
    one: str, other: str, trim_one: int, trim_other: int
) -> None:
    """Found by sections, it is what a look at each record finds.

    REQUIRES of logs: those with a record of one epoch at one place are equal up to there.
    """
    same = [n for n in range(1, min(len(one), len(other)) + 1) if one[n - 1] == other[n - 1]]
    if any(one[:n] != other[:n] for n in same):
        return
    left = log(one, trimmed=min(trim_one, len(one)))
    right = log(other, trimmed=min(trim_other, len(other)))
    first = max(left.base.lsn, right.base.lsn)
    places = [n for n in [0, *same] if n >= first]
    found = left.common_end(right)
    assert (found and found.lsn) == (max(places) if places else None)
    assert found == right.common_end(left)


@given(EPOCHS, st.integers(0, 12), st.integers(0, 12))
def test_a_cut_log_is_as_if_it_had_never_been_longer(epochs: str, trim: int, cut: int) -> None:
    """Truncating and trimming commute with appending."""
    trim = min(trim, len(epochs))
    cut = max(trim, min(cut, len(epochs)))
    kept = log(epochs[:cut], trimmed=trim)
    assert log(epochs, trimmed=trim).truncated(kept.last) == kept
