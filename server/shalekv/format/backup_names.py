"""The names of what stands in a repository of backups, built and parsed here and nowhere else.

backups/<id>.backup                                         what a backup consists of
backup_levels/<UUID version 7>.<CRC-32C>.sst                a copy of an SST of the levels
backup_wal/<20 digits>.<write id>.<CRC-32C>.sst             a copy of a WAL object
backup_marks/<id>.<creation or deletion>                    somebody makes or deletes backups
backup_marks/<id>.creation.<id>                             and was still at it later
backup_marks/restoration                                    where one is restored: its id

None of these folders is one of a database: its collector has no say there. A name tells which bytes
belong under it: slots of the WAL are filled again when an older copy of a database lives on, and
a write id belongs to one slot and its bytes. An id begins with the time at which the backup began.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from datetime import UTC, datetime

from shalekv.format.names import level_name, parse_level_name, parse_wal_name, wal_name

BACKUPS_FOLDER = "backups/"
LEVELS_FOLDER = "backup_levels/"
WAL_FOLDER = "backup_wal/"
MARKS_FOLDER = "backup_marks/"

RESTORATION_NAME = f"{MARKS_FOLDER}restoration"

RANDOM_BYTES = 4  # of an id
_STAMP = "%Y%m%dT%H%M%S"
_ID = r"[0-9]{8}T[0-9]{9}Z-[0-9a-f]{8}"
_BACKUP = re.compile(rf"backups/({_ID})\.backup")
_MARK = re.compile(rf"backup_marks/({_ID})\.(creation|deletion)(?:\.({_ID}))?")
_LEVEL = re.compile(r"backup_(levels/[0-9a-f-]+)\.([0-9a-f]{8})\.sst")
_WAL = re.compile(r"backup_(wal/[0-9]+)\.([0-9a-f]{32})\.([0-9a-f]{8})\.sst")


class Work(enum.StrEnum):
    """What whoever has put a mark there is doing."""

    CREATION = "creation"
    DELETION = "deletion"


@dataclass(frozen=True, slots=True)
class LevelCopy:
    """A copy of an SST of the levels."""

    sst_id: bytes
    checksum: int  # CRC-32C of all bytes

    @property
    def source(self) -> str:
        """The name of the object in the database."""
        return level_name(self.sst_id)

    def __str__(self) -> str:
        """The name of the copy."""
        return f"backup_{_stem(self.source)}.{self.checksum:08x}.sst"


@dataclass(frozen=True, slots=True)
class WalCopy:
    """A copy of a WAL object."""

    wal_id: int
    write_id: bytes
    checksum: int  # CRC-32C of all bytes

    @property
    def source(self) -> str:
        """The name of the object in the database."""
        return wal_name(self.wal_id)

    def __str__(self) -> str:
        """The name of the copy."""
        return f"backup_{_stem(self.source)}.{self.write_id.hex()}.{self.checksum:08x}.sst"


Copy = LevelCopy | WalCopy


@dataclass(frozen=True, slots=True)
class Mark:
    """Somebody is at work, or was interrupted."""

    work_id: str
    work: Work
    sign_id: str = ""  # of a sign of life: an id of the time at which it was given

    @property
    def seen_ms(self) -> int:
        """When whoever it is was last known to be at work."""
        return begun_ms(self.sign_id or self.work_id)

    def __str__(self) -> str:
        """Its name."""
        sign = f".{self.sign_id}" if self.sign_id else ""
        return f"{MARKS_FOLDER}{self.work_id}.{self.work}{sign}"


def new_backup_id(now_ms: int, random_bytes: bytes) -> str:
    """The id of a backup that begins now, by the repository's clock: later ones are greater."""
    seconds, milliseconds = divmod(now_ms, 1_000)
    stamp = datetime.fromtimestamp(seconds, UTC).strftime(_STAMP)
    return f"{stamp}{milliseconds:03d}Z-{random_bytes.hex()}"


def begun_ms(backup_id: str) -> int:
    """When the backup with this id began."""
    stamp = datetime.strptime(backup_id[:15], _STAMP).replace(tzinfo=UTC)
    return round(stamp.timestamp()) * 1_000 + int(backup_id[15:18])


def is_backup_id(text: str) -> bool:
    """Whether this is the id of a backup."""
    return parse_backup_name(f"{BACKUPS_FOLDER}{text}.backup") is not None


def backup_name(backup_id: str) -> str:
    """The name of what says what this backup consists of."""
    return f"{BACKUPS_FOLDER}{backup_id}.backup"


def parse_backup_name(name: str) -> str | None:
    """The id of the backup that this object describes."""
    match = _BACKUP.fullmatch(name)
    if match is None:
        return None
    try:
        begun_ms(match[1])
    except ValueError:  # there is no such day
        return None
    return match[1]


def parse_mark(name: str) -> Mark | None:
    """The mark with this name."""
    match = _MARK.fullmatch(name)
    if match is None:
        return None
    ids = [each for each in (match[1], match[3]) if each is not None]
    is_named = all(is_backup_id(each) for each in ids)
    return Mark(match[1], Work(match[2]), match[3] or "") if is_named else None


def parse_copy(name: str) -> Copy | None:
    """The copy with this name."""
    if (match := _LEVEL.fullmatch(name)) is not None:
        sst_id = parse_level_name(f"{match[1]}.sst")
        return None if sst_id is None else LevelCopy(sst_id, int(match[2], 16))
    if (match := _WAL.fullmatch(name)) is not None:
        wal_id = parse_wal_name(f"{match[1]}.sst")
        if wal_id is not None:
            return WalCopy(wal_id, bytes.fromhex(match[2]), int(match[3], 16))
    return None


def _stem(name: str) -> str:
    return name.removesuffix(".sst")
