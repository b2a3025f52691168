"""A full disk is reported before anything is written; a broken disk stays broken."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shalekv.errors import LogDamaged, LogFull, StoreBroken
from shalekv.protocol.quorum.acceptor import Flush, Reset, Save, Truncate, Write
from shalekv.protocol.quorum_records import Ballot, LogEnd, LogHealth
from shalekv.store.files import FileSystem
from shalekv.store.safekeeper_log.folder import DataFolder
from shalekv.store.safekeeper_log.index import frame_bytes
from shalekv.store.safekeeper_log.log import MemberLog
from shalekv.store.safekeeper_log.space import SpaceAccounting
from tests.kit.disks.failing import FailingFileSystem
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

RECORDS = records_after(LogEnd(), payloads(30))
BALLOT = Ballot(3, b"n" * 16)
SMALL_FILES_BYTES = 2 * 8192


class SmallDisk(FileSystem):
    """A real file system with a limited number of bytes: only allocated bytes can be written.

    Overwriting takes no space.
    """

    def __init__(self, size_bytes: int) -> None:
        self.left_bytes = size_bytes
        self._allocated: dict[int, int] = {}  # by inode

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        inode = os.fstat(descriptor).st_ino
        more_bytes = size_bytes - self._allocated.get(inode, 0)
        if more_bytes > self.left_bytes:
            super().allocate(descriptor, max(1, self.left_bytes))  # as far as it goes
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(descriptor, size_bytes)
        self._allocated[inode] = size_bytes
        self.left_bytes -= max(0, more_bytes)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        assert offset + len(data) <= self._allocated[os.fstat(descriptor).st_ino]
        return super().pwrite(descriptor, data, offset)

    def free_bytes(self, path: Path) -> int:  # noqa: ARG002
        return self.left_bytes

    def unlink(self, path: Path) -> None:
        self.left_bytes += self._allocated.pop(path.stat().st_ino, 0)
        super().unlink(path)


def sizes(count: int) -> list[int]:
    return [frame_bytes(record) for record in RECORDS[:count]]


def append_until_full(log: MemberLog) -> int:
    """Append records one by one while there is space; return how many."""
    for count, record in enumerate(RECORDS):
        if not log.has_space([record]) and not log.make_space([frame_bytes(record)]):
            return count
        write(log, [record])
    raise AssertionError("it is never full")


def test_a_part_of_the_disk_stays_free(tmp_path: Path) -> None:
    """No segment is allocated that would leave less than the required free space."""
    disk = SmallDisk(SMALL_FILES_BYTES + 4 * SEGMENT_BYTES)
    folder = DataFolder.open(
        tmp_path / "data",
        segment_bytes=SEGMENT_BYTES,
        free_bytes_min=2 * SEGMENT_BYTES,
        filesystem=disk,
    )
    log = folder.create(IDENTITY)
    assert append_until_full(log) == 6
    assert disk.left_bytes == 2 * SEGMENT_BYTES
    disk.left_bytes += SEGMENT_BYTES
    assert log.make_space(sizes(3))
    log.close()
    folder.close()


def test_trimming_makes_space(tmp_path: Path) -> None:
    """A full disk has space again when segments are trimmed, truncated or reset."""
    disk = SmallDisk(SMALL_FILES_BYTES + 3 * SEGMENT_BYTES)
    log = new_log(tmp_path / "member", filesystem=disk)
    assert append_until_full(log) == 9
    log.trim(RECORDS[2].mark)
    assert log.make_space(sizes(3))
    assert not log.make_space(sizes(4))
    write(log, RECORDS[9:12])
    perform(log, [Truncate(RECORDS[3].mark)])
    assert log.make_space(sizes(8))
    assert not log.make_space(sizes(9))
    perform(log, [Reset(LogEnd())])
    assert log.make_space(sizes(9))
    assert not log.make_space(sizes(10))
    write(log, RECORDS[:9])
    assert held(log) == list(RECORDS[:9])


def test_votes_and_cuts_on_a_full_disk(tmp_path: Path) -> None:
    """A full disk is reported before anything is written, and all written records stay. Without a
    free byte, promises are saved, and logs are truncated and found again.
    """
    disk = SmallDisk(SMALL_FILES_BYTES + 2 * SEGMENT_BYTES)
    log = new_log(tmp_path / "member", filesystem=disk)
    assert append_until_full(log) == 6
    assert disk.left_bytes == 0
    assert held(log) == list(RECORDS[:6])
    perform(log, [Truncate(RECORDS[4].mark), Save(BALLOT, LogHealth.SOUND), Flush()])
    other = records_after(RECORDS[4].mark, payloads(1), epoch=3)
    assert log.has_space(other)
    write(log, other)
    log.close()
    log = old_log(tmp_path / "member", filesystem=disk)
    assert held(log) == [*RECORDS[:5], *other]
    assert log.recovered.promise == BALLOT
    assert not log.has_space(RECORDS[6:7])


def test_a_member_needs_space(tmp_path: Path) -> None:
    """Without space for a member, no half of one is left behind."""
    disk = SmallDisk(SMALL_FILES_BYTES - 1)
    with pytest.raises(LogFull):
        new_log(tmp_path / "member", filesystem=disk)
    assert list(tmp_path.iterdir()) == []
    disk.left_bytes += 1
    new_log(tmp_path / "member", filesystem=disk)


def test_space_counts_what_was_submitted() -> None:
    """Space of submitted records is not promised twice; a spare is used when the open
    segment ends.
    """
    space = SpaceAccounting()
    space.open_bytes = 100
    assert space.fits([60, 40])
    assert not space.fits([60, 41])
    space.submit([60], 0)
    assert not space.fits([41])
    space.add_spare(50)
    assert space.fits([41])
    assert space.fits([41, 9])
    assert space.lacking([41, 10]) == 10
    space.written(60)
    assert space.fits([40, 50])
    space.submit([], 1)
    assert not space.fits([])
    space.settled(10)
    assert space.fits([10, 50])
    assert not space.fits([11, 40])


@pytest.mark.parametrize("call", ["pwrite", "sync_data", "fsync", "rename"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_failed_write_or_sync_ends_everything(tmp_path: Path, call: str, number: int) -> None:
    """After a failed write or sync nothing is written any more, and the next start is sound."""
    disk = FailingFileSystem()
    log = new_log(tmp_path / "member", filesystem=disk)
    write(log, RECORDS[:3])
    assert log.make_space(sizes(3))
    disk.fail(call, number)
    with pytest.raises(StoreBroken):
        write(log, RECORDS[3:6])
    disk.clear_failures()
    for effect in (Flush(), Save(BALLOT, LogHealth.SOUND), Write(RECORDS[3:6]), Truncate(LogEnd())):
        with pytest.raises(StoreBroken):
            perform(log, [effect])
    log.close()
    again = old_log(tmp_path / "member")
    assert again.recovered.health is LogHealth.SOUND
    found = held(again)
    assert found == list(RECORDS[: len(found)])
    assert len(found) >= 3


def test_a_disk_that_cannot_read_breaks_nothing_else(tmp_path: Path) -> None:
    """Unreadable records are lost to their readers; other records can be written."""
    disk = FailingFileSystem()
    log = new_log(tmp_path / "member", filesystem=disk)
    write(log, RECORDS[:3])
    disk.fail("pread", errno.EIO)
    with pytest.raises(LogDamaged):
        log.read(1, 3, ALL)
    write(log, RECORDS[3:6])
    disk.clear_failures()
    assert log.read(1, ALL, ALL) == list(RECORDS[:6])
