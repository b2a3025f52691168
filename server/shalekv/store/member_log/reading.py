"""Reads records back, and believes none that is not what was written there."""

from __future__ import annotations

from shalekv.errors import BadChecksum
from shalekv.format.wal_record import decode_record
from shalekv.protocol.quorum_records import Record
from shalekv.store.safekeeper_log.files import Files
from shalekv.store.safekeeper_log.index import Run


def read_run(files: Files, run: Run) -> list[Record]:
    """The records of a run. Raises `CorruptObject`, and `FileNotFoundError`. Blocks."""
    data = files.read(run.path, run.offset, run.size_bytes)
    name, offset, records = str(run.path), 0, []
    for lsn, checksum in enumerate(run.checksums, run.first_lsn):
        record, end = decode_record(name, data, offset)
        if record.lsn != lsn or record.checksum != checksum:
            raise BadChecksum(name, run.offset + offset, f"record {lsn}")
        records.append(record)
        offset = end
    return records
