"""Records of the elected log that a voter returns: which are taken, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shalekv.protocol.quorum.opening import COMPARED_MAX, FetchedTail, TailMismatch, TailVerifier
from shalekv.protocol.quorum_records import LogShape, Record
from tests.unit.protocol.logs import log, records

EPOCHS = "11223"


def _read(
    found: Sequence[Record], *, tip: int | None, log_now: LogShape | None = None
) -> FetchedTail:
    verifier = TailVerifier(log(EPOCHS).last, tip, log(EPOCHS) if log_now is None else log_now)
    for record in found:
        verifier.add(record)
    return verifier.end()


@pytest.mark.parametrize("tip", [None, 0, 2, 4])
def test_archived_records_are_passed_over(tip: int | None) -> None:
    """The tail has the records behind the archive, and begins with the last archived one."""
    made = records(EPOCHS)
    count = 0 if tip is None else tip + 1
    tail = _read(made, tip=tip)
    assert list(tail.records) == made[count:]
    assert tail.base == (made[count - 1].mark if count else log(EPOCHS).base)
    assert tail.last == made[-1].mark
    assert tail.first_wal_id == count


def test_ends_of_the_last_archived_objects_are_compared() -> None:
    """At most `COMPARED_MAX` objects are compared: the last ones."""
    epochs = "1" * (COMPARED_MAX + 9)
    made = records(epochs)
    verifier = TailVerifier(made[-1].mark, COMPARED_MAX + 6, log(epochs))
    for record in made:
        verifier.add(record)
    assert sorted(verifier.archived_ends) == list(range(7, COMPARED_MAX + 7))
    assert len(verifier.end().records) == 2


def test_archived_sections_need_not_be_read() -> None:
    """Sections of epochs that end before the compared objects are known without their records."""
    epochs = "1" * 9 + "2" * COMPARED_MAX
    verifier = TailVerifier(log(epochs).last, COMPARED_MAX + 8, log(epochs))
    assert verifier.next_lsn == 10


@pytest.mark.parametrize(
    ("found", "tip", "log_now", "problem"),
    [
        (records("1122"), None, log("1122"), "its log ends with record 4, not 5"),
        (records("11224"), None, log("11224"), "its log ends with record 5, not 5"),
        ([], 1, log(EPOCHS, trimmed=3), "has let go of WAL objects up to 2"),
        (records("1122"), None, log(EPOCHS), "its records end with 4, not 5"),
        (records("11224"), None, log(EPOCHS), "its records end with 5, not 5"),
        (records(EPOCHS)[1:], None, log(EPOCHS), "record 2 does not follow record 0"),
        ([*records("112"), *records("12123")[3:]], None, log(EPOCHS), "4 does not follow"),
    ],
)
def test_another_log_is_refused(
    found: Sequence[Record], tip: int | None, log_now: LogShape, problem: str
) -> None:
    """A voter that was trimmed, cut or written to since its vote is not taken for the donor."""
    with pytest.raises(TailMismatch, match=problem):
        _read(found, tip=tip, log_now=log_now)
