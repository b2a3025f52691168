"""Damage to the files of a safekeeper that does not run: bits flip, and ends are torn off."""

from __future__ import annotations

from pathlib import Path

from shalekv.format.quorum.member_files import HEAD_BYTES
from shalekv.store.safekeeper_log.slots import CONTROL_NAME, FILE_BYTES, SLOT_OFFSETS, SYNCED_NAME
from tests.kit.processes.child import Child, Line

SEGMENTS = "*.log"


def segments(folder: Path) -> list[Path]:
    """The files of records, in order; those without a record are left out."""
    return [path for path in sorted(folder.glob(SEGMENTS)) if _end(path) > HEAD_BYTES]


def flip_in_records(folder: Path) -> None:
    """A bit in the middle of the newest records."""
    path = segments(folder)[-1]
    _flip(path, (HEAD_BYTES + _end(path)) // 2)


def flip_in_head(folder: Path) -> None:
    """A bit in the head of the newest segment."""
    _flip(segments(folder)[-1], 20)


def tear_off(folder: Path) -> None:
    """Remove the last quarter of the newest records, as if they were never written although synced.

    The very last ones are uncertain: the process may have been killed before it synced them.
    """
    path = segments(folder)[-1]
    end = _end(path)
    count = (end - HEAD_BYTES) // 4
    _overwrite(path, end - count, bytes(count))


def cut_file(folder: Path) -> None:
    """The newest segment ends in the middle of its records."""
    path = segments(folder)[-1]
    with path.open("r+b") as file:
        file.truncate((HEAD_BYTES + _end(path)) // 2)


def lose_segment(folder: Path) -> None:
    segments(folder)[-1].unlink()


def lose_synced(folder: Path) -> None:
    for offset in SLOT_OFFSETS:
        _flip(folder / SYNCED_NAME, offset + 10)


def lose_control(folder: Path) -> None:
    """Delete the files with the member's identity and promise."""
    assert (folder / CONTROL_NAME).stat().st_size == FILE_BYTES
    for offset in SLOT_OFFSETS:
        _flip(folder / CONTROL_NAME, offset + 50)


ALL = (flip_in_records, flip_in_head, tear_off, cut_file, lose_segment, lose_synced)


def damage_events(node: Child) -> list[Line]:
    return [line for line in node.lines() if line.get("event") == "records were lost"]


def _end(path: Path) -> int:
    """The offset of the zeros that a segment is filled up with."""
    return len(path.read_bytes().rstrip(b"\0"))


def _flip(path: Path, offset: int) -> None:
    (byte,) = path.read_bytes()[offset : offset + 1]
    _overwrite(path, offset, bytes([byte ^ 0x10]))


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
