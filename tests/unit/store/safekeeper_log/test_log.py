"""A log keeps its records until it is trimmed, truncated or reset."""

from __future__ import annotations

from pathlib import Path

import pytest

from shalekv.errors import LogDamaged, RecordTrimmed
from shalekv.protocol.quorum.acceptor import (
    AcceptorState,
    CommittedUpTo,
    Flush,
    Reset,
    Save,
    Truncate,
    Write,
)
from shalekv.protocol.quorum_records import (
    EMPTY_LOG,
    Ballot,
    EpochSection,
    LogEnd,
    LogHealth,
    LogShape,
)
from tests.kit.disks.member_logs import (
    ALL,
    IDENTITY,
    SEGMENT_BYTES,
    held,
    new_log,
    old_log,
    payloads,
    perform,
    records_after,
    write,
)

RECORDS = records_after(LogEnd(), payloads(20))
FRAME_BYTES = 148
BALLOT = Ballot(3, b"n" * 16)


def segments(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.log"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the log."""
    return tmp_path / "member"


def test_a_new_log_is_empty(folder: Path) -> None:
    """A new log has no promise and no records, and a folder has only one log."""
    log = new_log(folder)
    assert log.identity == IDENTITY
    assert log.recovered == AcceptorState(IDENTITY.member_id, log=EMPTY_LOG)
    assert log.read(1, ALL, ALL) == []
    assert log.size_bytes == log.durable_lsn == 0
    with pytest.raises(FileExistsError):
        new_log(folder)


def test_records_are_found_again(folder: Path) -> None:
    """Records, promise and commit point are found when the log is opened again."""
    log = new_log(folder)
    later = records_after(RECORDS[-1].mark, payloads(3), epoch=2)
    perform(log, [Write(RECORDS), Flush(), CommittedUpTo(17)])
    perform(log, [Save(BALLOT, LogHealth.REFILLING), Write(later), Flush()])
    assert log.durable_lsn == 23
    assert held(log) == [*RECORDS, *later]
    log.close()
    again = old_log(folder)
    sections = (EpochSection(1, RECORDS[-1].mark), EpochSection(21, later[-1].mark))
    assert again.recovered == AcceptorState(
        IDENTITY.member_id,
        promise=BALLOT,
        log=LogShape(sections=sections),
        committed_lsn=17,
        health=LogHealth.REFILLING,
    )
    assert held(again) == [*RECORDS, *later]
    assert again.size_bytes == 23 * FRAME_BYTES
    assert segments(folder) == [1, 4, 7, 10, 13, 16, 19, 22]


def test_records_of_all_sizes(folder: Path) -> None:
    """A record that is larger than a segment has its own; empty records take a header."""
    sizes = (0, 5 * SEGMENT_BYTES, 1, SEGMENT_BYTES - 112, SEGMENT_BYTES - 111, 0, 3_000_000)
    records = records_after(LogEnd(), [bytes([size % 250]) * size for size in sizes])
    log = new_log(folder)
    write(log, records[:1])
    write(log, records[1:])
    assert held(log) == list(records)
    log.close()
    assert held(old_log(folder)) == list(records)


def test_what_does_not_follow_is_not_written(folder: Path) -> None:
    """A gap, a repeated record, or another chain is an error of the caller, and nothing is
    written.
    """
    log = new_log(folder)
    write(log, RECORDS[:3])
    for wrong in (RECORDS[2:4], RECORDS[4:5], records_after(LogEnd(3, 1, 99, 2), [b"x"])):
        with pytest.raises(ValueError, match="does not follow"):
            write(log, wrong)
    assert held(log) == list(RECORDS[:3])


def test_reading_is_bounded(folder: Path) -> None:
    """A read stays within the bound, also across segments, but returns at least one record."""
    log = new_log(folder)
    write(log, RECORDS)
    assert log.read(2, 9, ALL) == list(RECORDS[1:9])
    assert log.read(2, ALL, 5 * FRAME_BYTES) == list(RECORDS[1:6])
    assert log.read(2, ALL, 5 * FRAME_BYTES - 1) == list(RECORDS[1:5])
    assert log.read(3, ALL, 1) == [RECORDS[2]]
    assert log.read(20, 20, 0) == [RECORDS[19]]
    assert log.read(21, ALL, ALL) == []
    assert log.read(5, 4, ALL) == []


@pytest.mark.parametrize("last", [0, 1, 3, 4, 8, 19, 20])
def test_truncating(folder: Path, last: int) -> None:
    """Records behind the cut are gone for good, and the log continues with other records."""
    log = new_log(folder)
    write(log, RECORDS)
    perform(
        log, [CommittedUpTo(20), Save(BALLOT, LogHealth.SOUND)]
    )  # a floor, which has to sink with it
    mark = RECORDS[last - 1].mark if last else LogEnd()
    perform(log, [Truncate(mark), Flush()])
    assert log.durable_lsn == last
    assert held(log) == list(RECORDS[:last])
    log.close()
    log = old_log(folder)
    assert (log.recovered.log.last, log.recovered.health) == (mark, LogHealth.SOUND)
    other = records_after(mark, payloads(6), epoch=2)
    write(log, other)
    log.close()
    log = old_log(folder)
    assert log.recovered.health is LogHealth.SOUND
    assert held(log) == [*RECORDS[:last], *other]
    end = other[-1].mark  # unsynced records can be cut as well
    more = records_after(end, payloads(3), epoch=2)
    instead = records_after(end, payloads(2), epoch=3)
    perform(log, [Write(more), Truncate(end), Write(instead), Flush()])
    assert held(old_log(folder)) == [*RECORDS[:last], *other, *instead]


def test_a_reset_begins_another_log(folder: Path) -> None:
    """After a reset the log begins behind the new base, before or after the old end."""
    log = new_log(folder)
    write(log, RECORDS)
    for base in (LogEnd(900, 4, 77, 50), LogEnd(7, 5, 78, 3)):
        records = records_after(base, payloads(5), epoch=6)
        perform(log, [Reset(base), Flush()])
        assert segments(folder) == []
        assert log.durable_lsn == base.lsn
        assert log.size_bytes == 0
        write(log, records)
        assert log.read(base.lsn + 1, ALL, ALL) == list(records)
        with pytest.raises(RecordTrimmed):
            log.read(base.lsn, ALL, ALL)
        log.close()
        log = old_log(folder)
        assert log.recovered.log == LogShape(base, (EpochSection(base.lsn + 1, records[-1].mark),))
        assert held(log) == list(records)


def test_trimming_deletes_whole_segments(folder: Path) -> None:
    """Records before the base are not read, their segments are deleted, and the base is found
    again. A log that was trimmed to its end continues behind it.
    """
    log = new_log(folder)
    write(log, RECORDS)
    log.trim(RECORDS[7].mark)
    assert segments(folder) == [7, 10, 13, 16, 19]
    assert log.size_bytes == 12 * FRAME_BYTES
    assert log.read(9, ALL, ALL) == list(RECORDS[8:])
    with pytest.raises(RecordTrimmed):
        log.read(8, 20, ALL)
    log.trim(RECORDS[3].mark)  # an older one changes nothing
    log.close()
    log = old_log(folder)
    assert log.recovered.log.base == RECORDS[7].mark
    assert log.recovered.committed_lsn == 8
    assert held(log) == list(RECORDS[8:])
    with pytest.raises(ValueError, match="not in the log"):
        log.trim(LogEnd(21, 1, 0))
    log.trim(RECORDS[-1].mark)
    assert log.size_bytes == 0
    assert segments(folder) == [19]
    log.close()
    log = old_log(folder)
    assert log.recovered.log == LogShape(RECORDS[-1].mark)
    more = records_after(RECORDS[-1].mark, payloads(4))
    write(log, more)
    log.close()
    assert held(old_log(folder)) == list(more)


def test_objects_are_found(folder: Path) -> None:
    """The first record of an object is known; for an object without records, it is the next one."""
    log = new_log(folder)
    several = records_after(LogEnd(), payloads(4), ends_object=False)
    apart = records_after(several[-1].mark, payloads(2), epoch=2)
    write(log, [*several, *apart])
    for opened in (log, old_log(folder)):
        assert [opened.first_lsn_of(wal_id) for wal_id in range(4)] == [1, 5, 6, 7]
    perform(log, [Truncate(apart[0].mark)])
    assert [log.first_lsn_of(wal_id) for wal_id in range(4)] == [1, 5, 6, 6]
    log.trim(several[-1].mark)
    with pytest.raises(RecordTrimmed):
        log.first_lsn_of(0)
    assert log.first_lsn_of(1) == 5


def test_nothing_is_written_behind_damage(folder: Path) -> None:
    """A deleted segment is reported, also while the node runs. A damaged log accepts no records
    before it was reset.
    """
    log = new_log(folder)
    write(log, RECORDS[:5])
    (folder / f"{4:020}.log").unlink()
    with pytest.raises(LogDamaged):
        log.read(4, 4, ALL)
    assert log.read(1, 3, ALL) == list(RECORDS[:3])
    log.close()
    log = old_log(folder)
    assert log.recovered.health is LogHealth.DAMAGED
    with pytest.raises(ValueError, match="reset"):
        write(log, RECORDS[3:5])
    perform(log, [Reset(LogEnd()), Save(BALLOT, LogHealth.REFILLING), Write(RECORDS), Flush()])
    perform(log, [Save(BALLOT, LogHealth.SOUND)])
    log.close()
    log = old_log(folder)
    assert log.recovered.health is LogHealth.SOUND
    assert held(log) == list(RECORDS)
