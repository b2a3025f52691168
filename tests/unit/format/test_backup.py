"""The bytes that say what a backup consists of."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest

from shalekv.core.manifest import Manifest
from shalekv.errors import (
    BadMagic,
    BadStructure,
    CorruptObject,
    UnsupportedVersion,
    WrongObject,
)
from shalekv.format.backup import Backup, decode_backup, encode_backup
from shalekv.format.backup_names import LevelCopy, WalCopy, backup_name
from shalekv.format.coding import crc32c
from shalekv.format.manifest import encode_manifest

MANIFEST = Manifest(database_id=bytes(range(16)), manifest_id=7, write_id=bytes(16))
BACKUP = Backup(
    backup_id="20260131T040000123Z-1f2e3d4c",
    source_url="s3://bucket/folder",
    seq=2**63,
    logical_time_ms=1_700_000_000_000,
    manifest=MANIFEST,
    manifest_bytes=encode_manifest(MANIFEST),
    copies=(
        (WalCopy(3, b"identifies bytes", 0xFFFFFFFF), 12),
        (LevelCopy(bytes.fromhex("0198c0de000070008000000000000001"), 0), 2**40),
    ),
)
DATA = encode_backup(BACKUP)


def test_a_backup_is_read_back() -> None:
    """Every field of it."""
    assert decode_backup(BACKUP.name, DATA) == BACKUP
    assert BACKUP.size_bytes == 2**40 + 12
    assert BACKUP.begun_ms == 1_769_832_000_123


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [(0, b"ShaleMan", BadMagic), (8, b"\2\0", UnsupportedVersion), (10, b"\1", UnsupportedVersion)],
)
def test_other_versions_are_told_from_damage(
    at: int, value: bytes, error: type[CorruptObject]
) -> None:
    """With a checksum that is right."""
    changed = DATA[:at] + value + DATA[at + len(value) :]
    checksum = crc32c(changed[20:], crc32c(changed[:16]))
    with pytest.raises(error):
        decode_backup(BACKUP.name, changed[:16] + struct.pack("<I", checksum) + changed[20:])


def test_another_backup_under_the_name_is_told() -> None:
    """It is intact, and yet not this one."""
    other = replace(BACKUP, backup_id="20260131T040000123Z-00000000")
    with pytest.raises(WrongObject):
        decode_backup(backup_name(BACKUP.backup_id), encode_backup(other))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", "7"),
        ("seq", True),
        ("seq", None),
        ("manifest", "!"),
        ("manifest", ""),
        ("manifest_id", 8),
        ("copies", [["wal/00000000000000000007.sst", 1]]),
        ("copies", [["backup_wal/x", 1]]),
        ("copies", [[str(BACKUP.copies[0][0])]]),
        ("copies", None),
        ("database_id", None),
    ],
)
def test_what_no_backup_says_is_told(field: str, value: object) -> None:
    """Though the checksum is right."""
    fields = json.loads(DATA[20:]) | {field: value}
    body = json.dumps(fields).encode()
    header = DATA[:12] + struct.pack("<I", len(body))
    sealed = header + struct.pack("<I", crc32c(body, crc32c(header))) + body
    with pytest.raises((BadStructure, WrongObject)):
        decode_backup(BACKUP.name, sealed)
