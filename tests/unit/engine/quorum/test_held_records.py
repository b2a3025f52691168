"""What a writer keeps of its log in memory."""

from __future__ import annotations

from shalekv.core.quorum.record import Mark, Record
from shalekv.engine.quorum.proposing.held_records import HeldRecords
from shalekv.format.wal_record import make_record

PAYLOAD = bytes(1_000)


def records(*wal_ids: int) -> list[Record]:
    """Records that follow each other, of these objects."""
    made: list[Record] = []
    last = Mark()
    for wal_id in wal_ids:
        record = make_record(last, epoch=1, wal_id=wal_id, ends_object=False, payload=PAYLOAD)
        made.append(record)
        last = record.mark
    return made


def test_objects_are_let_go_as_a_whole() -> None:
    """What is archived and needed by nobody goes, up to the end of an object, never further."""
    held = HeldRecords(Mark(), records(0, 0, 1, 1, 2))
    held.archived(1, committed_lsn=5)
    held.drop(needed_lsn=3, bytes_max=1 << 20)
    assert (held.base.lsn, held.last_lsn) == (2, 5)
    held.drop(needed_lsn=0, bytes_max=0)
    assert held.base.lsn == 4
    assert held.unarchived_bytes == held.size_bytes > len(PAYLOAD)


def test_what_is_not_archived_stays() -> None:
    """However much it is, and whether or not all members have it; nor what is not committed."""
    held = HeldRecords(Mark(), records(0, 1, 2))
    held.archived(2, committed_lsn=1)
    held.drop(needed_lsn=3, bytes_max=0)
    assert held.base.lsn == 1
    assert [record.lsn for record in held.after(1, bytes_max=1)] == [2]
    assert [record.lsn for record in held.after(1, bytes_max=1 << 20)] == [2, 3]
    assert [record.lsn for record in held.of_object(2, committed_lsn=3)] == [3]
    assert held.of_object(2, committed_lsn=2) == []
