"""The checkers accept what a database may reply, and find every violation that is planted."""

from __future__ import annotations

import pytest

from shalekv.format.names import level_name
from shalekv.protocol.entry import KeyRange
from tests.judging.commits import (
    Between,
    Commits,
    Delete,
    DeleteRange,
    Put,
    Row,
    SeenValue,
    SeenView,
    SeenViews,
    Violation,
)

NOW = Between(1_000, 1_001)
ORPHAN = level_name(bytes.fromhex("0198c0de000170008000000000000001"))


def history() -> Commits:
    commits = Commits()
    commits.add(3, [DeleteRange(KeyRange(b"b", b"d")), Put(b"c", b"3")])
    commits.add(1, [Put(b"a", b"1"), Put(b"b", b"1"), Put(b"t", b"1", Between(900, 950))])
    commits.add(2, [Delete(b"a"), Put(b"u", b"2", Between(1_000, 1_100))])
    return commits


def view(seq: int, *rows: tuple[bytes, bytes, int]) -> SeenView:
    return SeenView(seq, NOW, [Row(*row, None) for row in rows])


@pytest.mark.parametrize(
    "seen",
    [
        view(1, (b"a", b"1", 1), (b"b", b"1", 1)),
        view(2, (b"b", b"1", 1)),
        view(2, (b"b", b"1", 1), (b"u", b"2", 2)),  # it expires at about this time
        view(3, (b"c", b"3", 3)),
        view(3, (b"u", b"2", 2), (b"c", b"3", 3)),  # in reverse
    ],
)
def test_a_possible_answer_is_accepted(seen: SeenView) -> None:
    """The states of the model, each at its number; a value that expires just now may be there."""
    SeenViews(history(), [seen]).check()


@pytest.mark.parametrize(
    "seen",
    [
        view(2, (b"a", b"1", 1), (b"b", b"1", 1)),  # deleted
        view(3, (b"b", b"1", 1), (b"c", b"3", 3)),  # deleted with a range
        view(1, (b"a", b"1", 1), (b"b", b"1", 1), (b"t", b"1", 1)),  # expired
        view(1, (b"a", b"1", 1)),  # one is missing
        view(1, (b"a", b"1", 1), (b"b", b"1", 1), (b"c", b"3", 3)),  # from the future
        view(3, (b"c", b"3", 2)),  # another number
        view(3, (b"c", b"2", 3)),  # another value
        view(1, (b"a", b"1", 1), (b"b", b"1", 1), (b"b", b"1", 1)),  # twice
        view(3, (b"u", b"2", 2), (b"c", b"3", 3), (b"v", b"", 1)),  # out of order
    ],
)
def test_an_impossible_answer_is_found(seen: SeenView) -> None:
    """Resurrected, lost, of another time, twice or out of order."""
    with pytest.raises(Violation):
        SeenViews(history(), [seen]).check()


def test_a_view_is_the_same_for_ever() -> None:
    """A read that resumes behind some rows returns all the others, to the byte."""
    seen = view(1, (b"a", b"1", 1), (b"b", b"1", 1), (b"c", b"1", 1))
    seen.read_again(seen.rows)
    seen.read_again(seen.rows[1:], first=1)
    with pytest.raises(Violation, match="ends after 1 of 3 rows"):
        seen.read_again(seen.rows[:1])
    with pytest.raises(Violation, match="differs"):
        seen.read_again([*seen.rows[:2], seen.rows[2]._replace(seq=2)])
    with pytest.raises(Violation):
        seen.read_again([*seen.rows, seen.rows[0]])


def test_no_number_is_issued_twice() -> None:
    """Two commits with one number are a violation."""
    commits = history()
    with pytest.raises(Violation):
        commits.add(2, [Put(b"z", b"")])
    (state,) = commits.states([9])
    state.check_key(b"c", NOW, SeenValue(b"3", 3))
