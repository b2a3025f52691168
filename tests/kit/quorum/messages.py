"""Members, marks and records for tests of the formats of quorum messages."""

from __future__ import annotations

from shalekv.format.wal_record import make_record
from shalekv.protocol.quorum_records import Ballot, EpochSection, LogEnd, LogShape, RelayTarget

ID = b"m" * 16
BALLOT = Ballot(7, b"n" * 16)
TARGET = RelayTarget(ID, "sk2:7655")
BASE = LogEnd(4, 2, 99, 3, ends_object=False)
SHAPE = LogShape(
    BASE, (EpochSection(5, LogEnd(6, 2, 1, 4)), EpochSection(7, LogEnd(9, 5, 2**32 - 1, 2**60)))
)
RECORD = make_record(BASE, epoch=7, wal_id=4, ends_object=True, payload=b"\0payload")
BOUNDARY = make_record(RECORD.mark, epoch=7, wal_id=5, ends_object=False, payload=b"")
