"""Logs with records, for the tests beside this file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shalekv.core.quorum.acceptor import Flush, Write
from shalekv.core.quorum.record import Mark, Record
from shalekv.format.member_files import MemberIdentity
from shalekv.format.wal_record import make_record
from shalekv.store.filesystem import REAL_FILE_SYSTEM, FileSystem
from shalekv.store.member_log.files import Files
from shalekv.store.member_log.log import MemberLog
from shalekv.store.member_log.opening import create_log, open_log

SEGMENT_BYTES = 512
IDENTITY = MemberIdentity(b"d" * 16, b"m" * 16, "s3://bucket/db", b"r" * 16)
ALL = 1 << 30


def records_after(
    mark: Mark, payloads: Iterable[bytes], *, epoch: int = 1, ends_object: bool = True
) -> tuple[Record, ...]:
    """Records that follow `mark` and each other."""
    records = []
    for payload in payloads:
        wal_id = mark.next_wal_id
        if not mark.ends_object and mark.epoch == epoch:
            wal_id = mark.wal_id or 0
        record = make_record(
            mark, epoch=epoch, wal_id=wal_id, ends_object=ends_object, payload=payload
        )
        records.append(record)
        mark = record.mark
    return tuple(records)


def payloads(count: int, size_bytes: int = 100) -> list[bytes]:
    """Different ones."""
    return [bytes([number % 251]) * size_bytes for number in range(count)]


def new_log(
    folder: Path,
    *,
    filesystem: FileSystem = REAL_FILE_SYSTEM,
    segment_bytes: int = SEGMENT_BYTES,
) -> MemberLog:
    """An empty one."""
    files = Files(filesystem, "test")
    return create_log(files, folder, IDENTITY, segment_bytes=segment_bytes)


def old_log(
    folder: Path,
    *,
    filesystem: FileSystem = REAL_FILE_SYSTEM,
    segment_bytes: int = SEGMENT_BYTES,
) -> MemberLog:
    """The one that is there."""
    return open_log(Files(filesystem, "test"), folder, segment_bytes=segment_bytes)


def write(log: MemberLog, records: Iterable[Record]) -> None:
    """Have records written and durable."""
    log.perform([Write(tuple(records)), Flush()])


def held(log: MemberLog) -> list[Record]:
    """All records that can be read, from the base that was found on."""
    return log.read(log.recovered.log.base.lsn + 1, ALL, ALL)
