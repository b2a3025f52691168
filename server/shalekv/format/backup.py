"""Backups: names of the objects in a repository of backups, and the object that describes one.

A repository has these folders. None of them is a folder of a database, so no collector touches
their objects:

    backups/<id>.backup                               the description of a backup
    backup_levels/<UUID version 7>.<CRC-32C>.sst      a copy of an SST of the levels
    backup_wal/<20 digits>.<write id>.<CRC-32C>.sst   a copy of a WAL object
    backup_marks/<id>.<creation or deletion>          a process that makes or deletes backups
    backup_marks/<id>.creation.<id>                   its heartbeat: the second id has a later time
    backup_marks/restoration                          in a place where a backup is restored: its id

An id begins with the time at which the backup began. The name of a copy identifies its bytes: slots
of the WAL are filled again when an older copy of a database is used, and a write id belongs to one
slot and its bytes.

A description is JSON in an envelope:

    backup_id, source_url, database_id (hexadecimal), seq, logical_time_ms,
    manifest_id, manifest (base64; that of the snapshot, without the pending loads that no WAL
    object among the copies commits),
    copies: [name in the repository, size in bytes], the WAL first, in the order of its slots,
    policy (base64; the message `AccessPolicy`), only in version 2

Version 2 is written if the database has an access policy: an older reader, which would restore it
without, refuses it.
"""

from __future__ import annotations

import base64
import enum
import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import DecodeError

from shalekv.errors import BadStructure, CorruptObject, WrongObject
from shalekv.format.access import policy_message, policy_of
from shalekv.format.envelope import Envelope
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import (
    level_name,
    manifest_name,
    parse_level_name,
    parse_wal_name,
    wal_name,
)
from shalekv.protocol.access import Policy
from shalekv.protocol.manifest import Manifest
from shalekv.v1 import access_pb2

ENVELOPE = Envelope(b"ShaleBak", 2)
_WITHOUT_POLICY = 1  # the version

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """The description of a backup: the manifest of a snapshot, and copies of what it needs."""

    backup_id: str
    source_url: str  # without credentials
    seq: int  # the last commit that it contains
    logical_time_ms: int  # of that commit
    manifest: Manifest
    manifest_bytes: bytes  # of the snapshot, without loads that no copy of a WAL object commits
    copies: tuple[tuple[Copy, int], ...]  # and the size of each, bytes
    # Without its secret; version 0: the database has none.
    policy: Policy = field(default_factory=Policy)

    @property
    def name(self) -> str:
        """The name of the object with this description."""
        return backup_name(self.backup_id)

    @property
    def begun_ms(self) -> int:
        """The time at which it began, by the repository's clock."""
        return begun_ms(self.backup_id)

    @property
    def size_bytes(self) -> int:
        """The size of all copies."""
        return sum(size_bytes for _, size_bytes in self.copies)


def encode_backup(backup: Backup) -> bytes:
    """Return the object that describes this backup."""
    fields = {
        "backup_id": backup.backup_id,
        "source_url": backup.source_url,
        "database_id": backup.manifest.database_id.hex(),
        "seq": backup.seq,
        "logical_time_ms": backup.logical_time_ms,
        "manifest_id": backup.manifest.manifest_id,
        "manifest": base64.b64encode(backup.manifest_bytes).decode(),
        "copies": [[str(copy), size_bytes] for copy, size_bytes in backup.copies],
    }
    if backup.policy.version:
        policy = policy_message(backup.policy).SerializeToString(deterministic=True)
        fields["policy"] = base64.b64encode(policy).decode()
    body = json.dumps(fields, separators=(",", ":")).encode()
    return ENVELOPE.seal(body, version=None if backup.policy.version else _WITHOUT_POLICY)


def decode_backup(name: str, data: bytes) -> Backup:
    """Return the backup that `data`, the bytes of the object `name`, describes.

    Raises a `CorruptObject`.
    """
    piece = ENVELOPE.unseal(name, data)
    try:
        fields = json.loads(piece.data)
        manifest_bytes = base64.b64decode(fields["manifest"], validate=True)
        backup = Backup(
            backup_id=_of(str, fields["backup_id"]),
            source_url=_of(str, fields["source_url"]),
            seq=_of(int, fields["seq"]),
            logical_time_ms=_of(int, fields["logical_time_ms"]),
            manifest=_manifest(fields["manifest_id"], manifest_bytes),
            manifest_bytes=manifest_bytes,
            copies=tuple((_copy(copy), _of(int, size)) for copy, size in fields["copies"]),
            policy=_policy(fields.get("policy", "")),
        )
        is_own = fields["database_id"] == backup.manifest.database_id.hex()
    except (
        *(ValueError, KeyError, TypeError, AttributeError, RecursionError),
        *(CorruptObject, DecodeError),
    ) as error:
        raise BadStructure(
            name, piece.offset, f"is not the description of a backup: {error}"
        ) from error
    if backup.name != name or not is_own:
        raise WrongObject(name, piece.offset, f"these are the bytes of backup {backup.backup_id}")
    return backup


def _manifest(manifest_id: Any, data: bytes) -> Manifest:
    return decode_manifest(manifest_name(_of(int, manifest_id)), data)


def _policy(text: Any) -> Policy:
    data = base64.b64decode(_of(str, text), validate=True)
    return policy_of(access_pb2.AccessPolicy.FromString(data))


def _copy(name: Any) -> Copy:
    copy = parse_copy(_of(str, name))
    if copy is None:
        raise ValueError(f"{name!r} is not the name of a copy")
    return copy


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {value!r}")
    return value


class MarkPurpose(enum.StrEnum):
    """The work of a process that has put a mark."""

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
        """Return the name of the copy."""
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
        """Return the name of the copy."""
        return f"backup_{_stem(self.source)}.{self.write_id.hex()}.{self.checksum:08x}.sst"


Copy = LevelCopy | WalCopy


@dataclass(frozen=True, slots=True)
class BackupMark:
    """The mark of a process that works in the repository, or was interrupted."""

    work_id: str
    work: MarkPurpose
    heartbeat_id: str = ""  # of a heartbeat: an id with its time

    @property
    def seen_ms(self) -> int:
        """The time at which the process was last known to be at work."""
        return begun_ms(self.heartbeat_id or self.work_id)

    def __str__(self) -> str:
        """Return the name of the mark."""
        heartbeat = f".{self.heartbeat_id}" if self.heartbeat_id else ""
        return f"{MARKS_FOLDER}{self.work_id}.{self.work}{heartbeat}"


def new_backup_id(now_ms: int, random_bytes: bytes) -> str:
    """Return the id of a backup that begins now, by the repository's clock.

    Ids of later backups are greater.
    """
    seconds, milliseconds = divmod(now_ms, 1_000)
    stamp = datetime.fromtimestamp(seconds, UTC).strftime(_STAMP)
    return f"{stamp}{milliseconds:03d}Z-{random_bytes.hex()}"


def begun_ms(backup_id: str) -> int:
    """Return the time at which the backup with this id began."""
    stamp = datetime.strptime(backup_id[:15], _STAMP).replace(tzinfo=UTC)
    return round(stamp.timestamp()) * 1_000 + int(backup_id[15:18])


def is_backup_id(text: str) -> bool:
    """Return whether this is the id of a backup."""
    return parse_backup_name(f"{BACKUPS_FOLDER}{text}.backup") is not None


def backup_name(backup_id: str) -> str:
    """Return the name of the object that describes this backup."""
    return f"{BACKUPS_FOLDER}{backup_id}.backup"


def parse_backup_name(name: str) -> str | None:
    """Return the id of the backup that this object describes; None: it describes none."""
    match = _BACKUP.fullmatch(name)
    if match is None:
        return None
    try:
        begun_ms(match[1])
    except ValueError:  # there is no such day
        return None
    return match[1]


def parse_mark(name: str) -> BackupMark | None:
    """Return the mark with this name; None: it is not the name of a mark."""
    match = _MARK.fullmatch(name)
    if match is None:
        return None
    ids = [each for each in (match[1], match[3]) if each is not None]
    is_named = all(is_backup_id(each) for each in ids)
    return BackupMark(match[1], MarkPurpose(match[2]), match[3] or "") if is_named else None


def parse_copy(name: str) -> Copy | None:
    """Return the copy with this name; None: it is not the name of a copy."""
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
