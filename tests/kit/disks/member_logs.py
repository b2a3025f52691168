"""Logs of quorum members with records, and the checks of a damaged one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from shalekv.errors import CorruptObject
from shalekv.format.quorum.member_files import MemberIdentity
from shalekv.format.wal_record import make_record
from shalekv.protocol.quorum.acceptor import Effect, Flush, Reset, Save, Write
from shalekv.protocol.quorum_records import Ballot, LogEnd, LogHealth, Record
from shalekv.store.files import REAL_FILE_SYSTEM, DurableFiles, FileSystem
from shalekv.store.safekeeper_log.folder import create_log, open_log
from shalekv.store.safekeeper_log.log import MemberLog
from tests.kit.disks.crashing import CrashingDisk

FOLDER = Path("/data/member")
SEGMENT_BYTES = 512
SLOT_BYTES = 4096  # size of the slots of the files `control` and `synced`
IDENTITY = MemberIdentity(b"d" * 16, b"m" * 16, "s3://bucket/db", b"r" * 16)
PROMISE = Ballot(7, b"n" * 16)
ALL = 1 << 30


def records_after(
    mark: LogEnd, payloads: Iterable[bytes], *, epoch: int = 1, ends_object: bool = True
) -> tuple[Record, ...]:
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
    return [bytes([number % 251]) * size_bytes for number in range(count)]


RECORDS = records_after(LogEnd(), payloads(7), epoch=1)


def new_log(
    folder: Path,
    *,
    filesystem: FileSystem = REAL_FILE_SYSTEM,
    segment_bytes: int = SEGMENT_BYTES,
) -> MemberLog:
    return create_log(
        DurableFiles(filesystem, "test"), folder, IDENTITY, segment_bytes=segment_bytes
    )


def old_log(
    folder: Path,
    *,
    filesystem: FileSystem = REAL_FILE_SYSTEM,
    segment_bytes: int = SEGMENT_BYTES,
) -> MemberLog:
    return open_log(DurableFiles(filesystem, "test"), folder, segment_bytes=segment_bytes)


def perform(log: MemberLog, effects: Sequence[Effect]) -> None:
    """Apply effects in order, durably."""
    log.submitted(effects)
    log.apply(effects)
    log.flush()


def write(log: MemberLog, records: Iterable[Record]) -> None:
    perform(log, [Write(tuple(records)), Flush()])


def held(log: MemberLog) -> list[Record]:
    """Read all records, from the base that the log had on opening."""
    return log.read(log.recovered.log.base.lsn + 1, ALL, ALL)


def new_disk() -> CrashingDisk:
    """A disk in memory with the folder above `FOLDER`."""
    disk = CrashingDisk()
    disk.mkdir(FOLDER.parent)
    disk.fsync(disk.open_folder(Path("/")))
    return disk


def disk_with_records(count: int = len(RECORDS)) -> CrashingDisk:
    """Return a disk with a closed log: `PROMISE`, and this many of `RECORDS`, one by one."""
    disk = new_disk()
    log = new_log(FOLDER, filesystem=disk)
    perform(log, [Save(PROMISE, LogHealth.SOUND)])
    for record in RECORDS[:count]:
        write(log, [record])
    log.close()
    return disk


def files_of(disk: CrashingDisk) -> list[str]:
    return sorted(file.name for file in disk.list_files(FOLDER))


def check_found(disk: CrashingDisk) -> str:
    """Open a log whose files were damaged, and return what was found.

    "all": its records are there; "damaged": it reports that; "unknown": its member is unknown.
    Fails if a record or a promise is wrong.
    """
    try:
        log = old_log(FOLDER, filesystem=disk)
    except CorruptObject:
        return "unknown"
    found = log.read(1, ALL, ALL)
    assert found == list(RECORDS[: len(found)])
    assert log.recovered.log.last.lsn == len(found)
    assert log.recovered.promise == PROMISE
    if log.recovered.health is not LogHealth.DAMAGED:
        assert log.recovered.health is LogHealth.SOUND
        assert len(found) == len(RECORDS)
        return "all"
    again = old_log(FOLDER, filesystem=disk)
    assert again.recovered.health is LogHealth.DAMAGED
    perform(again, [Reset(RECORDS[3].mark), Save(PROMISE, LogHealth.REFILLING), Flush()])
    write(again, RECORDS[4:])
    assert again.read(5, ALL, ALL) == list(RECORDS[4:])
    assert again.durable_lsn == len(RECORDS)
    return "damaged"
