"""Metrics of a safekeeper."""

from __future__ import annotations

import pytest

from shalekv.protocol.quorum_records import NO_BALLOT, EpochSection, LogEnd, LogHealth, LogShape
from shalekv.server.metrics import add_node
from shalekv.telemetry.metrics import Metrics
from shalekv.write.quorum.links import DatabasePlace, MemberStatus, NodeStatus

DATABASE_ID = b"d" * 16


@pytest.mark.parametrize(
    ("base", "archived", "last", "is_complete", "expected"),
    [
        (None, None, None, True, 0),  # nothing was written
        (None, None, 2, True, 3),
        (None, None, 2, False, 2),  # the last object goes on
        (4, 4, 4, True, 0),  # all was trimmed
        (4, 6, 9, True, 3),
        (6, 4, 9, False, 2),
        (None, 9, 7, True, 0),  # another member has archived more than this one has
    ],
)
def test_what_is_not_in_the_store_is_counted(
    base: int | None, archived: int | None, last: int | None, *, is_complete: bool, expected: int
) -> None:
    """Objects that are complete in the log count until they were seen in the archive."""
    end = LogEnd(9, 1, 0, last, is_complete)
    sections = () if last == base else (EpochSection(1, end),)
    member = MemberStatus(
        place=DatabasePlace(DATABASE_ID, "memory://db"),
        member_id=b"m" * 16,
        promise=NO_BALLOT,
        health=LogHealth.SOUND,
        log=LogShape(LogEnd(wal_id=base), sections),
        committed_lsn=0,
        archived_wal_id=archived,
        log_bytes=7,
        is_archiver=True,
    )
    metrics = Metrics()
    add_node(metrics, NodeStatus("1.0", [member], disk_free_bytes=5))
    assert metrics.get("safekeeper_unarchived_objects", DATABASE_ID.hex()) == expected
    assert metrics.get("safekeeper_log_bytes", DATABASE_ID.hex()) == 7
    assert metrics.get("safekeeper_disk_free_bytes") == 5
