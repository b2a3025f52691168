"""Parts of a node: the records in memory, and the URLs of its databases."""

from __future__ import annotations

import pytest

from shalekv.errors import InvalidUrl
from shalekv.protocol.quorum_records import Record
from shalekv.server.safekeeper.member import RECORD_BYTES, RecentRecords
from shalekv.server.safekeeper.node import check_place

ALL = 1 << 30
SIZE_BYTES = RECORD_BYTES + 100


def records(first_lsn: int, count: int) -> list[Record]:
    lsns = range(first_lsn, first_lsn + count)
    return [Record(lsn, 1, lsn, True, 0, 0, bytes(100)) for lsn in lsns]


def test_what_is_not_on_the_disk_stays() -> None:
    """Records are dropped for space, oldest first, and never before they are flushed."""
    recent = RecentRecords(0, 3 * SIZE_BYTES)
    recent.append(records(1, 10))
    assert recent.first_lsn == 1
    recent.flushed(4)
    assert recent.first_lsn == 5
    recent.flushed(10)
    assert recent.first_lsn == 8
    assert recent.held_bytes == 3 * SIZE_BYTES


def test_read() -> None:
    """A read returns the records that fit, and at least one."""
    recent = RecentRecords(3, ALL)
    made = records(4, 5)
    recent.append(made)
    assert recent.read(5, 8, ALL) == made[1:]
    assert recent.read(5, 8, 2 * SIZE_BYTES) == made[1:3]
    assert recent.read(5, 8, 0) == made[1:2]
    assert recent.read(5, 6, ALL) == made[1:3]


def test_cut_and_filled_again() -> None:
    """Records in memory and their size match the log after a truncation, a trim and a reset."""
    recent = RecentRecords(0, ALL)
    made = records(1, 9)
    recent.append(made)
    recent.truncate(6)
    recent.trim(2)
    assert (recent.first_lsn, recent.held_bytes) == (3, 4 * SIZE_BYTES)
    recent.append(made[6:7])
    assert recent.read(3, 7, ALL) == made[2:7]
    recent.reset(20)
    assert (recent.first_lsn, recent.held_bytes) == (21, 0)
    recent.append(records(21, 2))
    recent.truncate(10)
    assert (recent.first_lsn, recent.held_bytes) == (11, 0)


def test_flushed_after_a_truncation() -> None:
    """A flush does not count for records that were written after a truncation."""
    recent = RecentRecords(0, 0)
    recent.append(records(1, 5))
    recent.flushed(3)
    recent.truncate(2)
    recent.append(records(3, 2))
    recent.flushed(2)
    assert recent.first_lsn == 3


@pytest.mark.parametrize(
    ("url", "node_url"),
    [
        ("file:///srv/databases", "file:///srv/databases"),
        ("file:///srv/databases/one", "file:///srv/databases"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/one", "s3://bucket"),
        ("s3://bucket/folder/one", "s3://bucket/folder/"),
        ("memory://one", "memory://one"),
    ],
)
def test_at_or_below(url: str, node_url: str) -> None:
    """A URL at or below that of the node is accepted."""
    assert check_place(url, node_url) == url


@pytest.mark.parametrize(
    ("url", "node_url"),
    [
        ("file:///srv", "file:///srv/databases"),
        ("file:///srv/databases2", "file:///srv/databases"),
        ("file:///srv/databases/../other", "file:///srv/databases"),
        ("s3://bucket/folder2", "s3://bucket/folder"),
        ("s3://other/folder", "s3://bucket/folder"),
        ("gs://bucket/folder", "s3://bucket/folder"),
        ("file:///bucket", "s3://bucket"),
        ("memory://two", "memory://one"),
        ("", "file:///srv"),
    ],
)
def test_elsewhere(url: str, node_url: str) -> None:
    """Any other URL is refused."""
    with pytest.raises(InvalidUrl):
        check_place(url, node_url)
