"""Process ends at moments that once broke a log."""

from __future__ import annotations

from random import Random

import pytest

from shalekv.format.wal_record import encode_record
from shalekv.protocol.quorum.acceptor import Truncate, Write
from shalekv.protocol.quorum_records import LogEnd, LogHealth
from tests.kit.disks.member_logs import (
    ALL,
    FOLDER,
    new_disk,
    new_log,
    old_log,
    payloads,
    perform,
    records_after,
    write,
)

RECORDS = records_after(LogEnd(), payloads(6))


class Killed(BaseException):
    """The process was killed."""


def test_an_empty_segment_is_taken_over() -> None:
    """The name of a segment whose records were lost is reused for one with space for a larger
    record.
    """
    disk = new_disk()
    log = new_log(FOLDER, filesystem=disk)
    effects = [Write(RECORDS[:1])]
    log.submitted(effects)
    log.apply(effects)  # and the power goes before it is synced
    segment = disk.bytes_of(FOLDER / f"{1:020}.log")
    segment[64:] = bytes(136)  # and a part of the file is lost with them
    log = old_log(FOLDER, filesystem=disk)
    assert log.recovered.log.last == LogEnd()
    large = records_after(LogEnd(), [bytes(150), b"next", *payloads(6)], epoch=2)
    write(log, large)
    log.trim(large[0].mark)
    assert log.read(2, ALL, ALL) == list(large[1:])
    log.close()
    log = old_log(FOLDER, filesystem=disk)
    assert log.recovered.health is LogHealth.SOUND
    assert log.read(2, ALL, ALL) == list(large[1:])


@pytest.mark.parametrize("seed", range(5))
def test_a_segment_that_was_found_deleted_does_not_return(seed: int) -> None:
    """A segment that a start did not find never returns, even if the process is killed before the
    sync of the folder.
    """
    disk = new_disk()
    log = new_log(FOLDER, filesystem=disk)
    write(log, RECORDS)
    calls: list[str] = []

    def kill(call: str) -> None:
        if calls and calls[-1] == "unlink":
            raise Killed
        calls.append(call)

    disk.before_call = kill
    with pytest.raises(Killed):
        perform(log, [Truncate(RECORDS[1].mark)])
    disk.before_call = lambda _: None
    found = old_log(FOLDER, filesystem=disk).recovered
    assert found.log.last == RECORDS[2].mark
    after = old_log(FOLDER, filesystem=disk.after_cut(Random(seed)))
    assert after.recovered.log.last == found.log.last


def test_a_record_of_another_chain_is_no_part_of_the_log() -> None:
    """An intact record that does not follow the record before it is cut."""
    disk = new_disk()
    log = new_log(FOLDER, filesystem=disk)
    write(log, RECORDS[:1])
    effects = [Write(RECORDS[1:3])]
    log.submitted(effects)
    log.apply(effects)  # and the power goes before it is synced
    other = records_after(LogEnd(2, 1, 12345, 1), payloads(1))[0]
    disk.bytes_of(FOLDER / f"{1:020}.log")[360:508] = encode_record(other)
    log = old_log(FOLDER, filesystem=disk)
    assert log.recovered.health is LogHealth.SOUND
    assert log.read(1, ALL, ALL) == list(RECORDS[:2])
    assert not any(disk.bytes_of(FOLDER / f"{1:020}.log")[360:])


def test_a_later_segment_says_what_was_durable() -> None:
    """Damage before a later segment is detected, even if the durable bound is an old one."""
    disk = new_disk()
    log = new_log(FOLDER, filesystem=disk)
    bound = bytes(disk.bytes_of(FOLDER / "synced"))
    write(log, RECORDS)
    disk.bytes_of(FOLDER / "synced")[:] = bound
    disk.bytes_of(FOLDER / f"{1:020}.log")[220] ^= 1
    assert old_log(FOLDER, filesystem=disk).recovered.health is LogHealth.DAMAGED
