"""The small files of a member: two slots each, so that one is always whole.

They are written once in full when the member is made, and overwritten in place from then on: this
works on a full disk.

The control file is saved slot by slot, each with a sync: whatever happens meanwhile, one slot holds
what was saved before or what is saved now. Afterwards both hold the same, so that a slot whose bits
rot does not bring an older promise back.

The synced file is written after each sync of the log, without a sync of its own: it says at least
how much of the log was durable once. If the log is found to be shorter, records were lost. A power
cut may leave any of what was written there since its last sync. Each says no more than is there,
since it is lowered, with a sync, before the log is cut; and the log needs none of it, since its
records were synced before anybody was told.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from shalekv.errors import CorruptObject, LogDamaged, LogFull, Truncated, UnsupportedVersion
from shalekv.format.member_files import (
    Control,
    Synced,
    decode_control,
    decode_synced,
    encode_control,
    encode_synced,
)
from shalekv.store.safekeeper_log.files import Files, OpenFile

CONTROL_NAME = "control"
SYNCED_NAME = "synced"
SLOT_OFFSETS = (0, 4096)  # apart, so that no failure to write one touches the other
FILE_BYTES = SLOT_OFFSETS[-1] + 4096
RETRY_AFTER_MS = 10_000  # somebody has to make room
NOTHING = Synced(generation=0, sequence=0, lsn=0, checksum=0, committed_lsn=0)  # of no log


class ControlFile:
    """What must be durable but for the records. Everything blocks."""

    def __init__(self, file: OpenFile, control: Control) -> None:
        """`create` and `open` make it."""
        self._file = file
        self.control = control

    @classmethod
    def create(cls, files: Files, folder: Path, control: Control) -> ControlFile:
        """Write a new one, durably but for its name. Raises `LogFull` when there is no room."""
        file = _created(files, folder / CONTROL_NAME, encode_control(control))
        return cls(file, control)

    @classmethod
    def open(cls, files: Files, folder: Path) -> ControlFile:
        """What was saved last. Raises `CorruptObject` when nobody can tell."""
        try:
            file = _opened(files, folder / CONTROL_NAME)
        except FileNotFoundError as error:
            raise Truncated(str(folder / CONTROL_NAME), 0, "the file, which is gone") from error
        data = _read(file)
        slots: list[Control] = []
        problem: CorruptObject | None = None
        for offset in SLOT_OFFSETS:
            try:
                slots.append(decode_control(str(file.path), data, offset))
            except CorruptObject as error:
                problem = error
                if isinstance(error, UnsupportedVersion):
                    break
        if not slots or isinstance(problem, UnsupportedVersion):
            file.close()
            raise problem or CorruptObject(str(file.path), 0, "no slot")
        opened = cls(file, max(slots, key=lambda slot: slot.sequence))
        if len(slots) < len(SLOT_OFFSETS) or slots[0] != slots[1]:
            opened.save(opened.control)
        return opened

    def save(self, control: Control) -> None:
        """Make this durable."""
        self.control = replace(control, sequence=self.control.sequence + 1)
        data = encode_control(self.control)
        stored = _read(self._file)
        # The slot that holds what was saved before is overwritten last.
        order = sorted(SLOT_OFFSETS, key=lambda at: _control_sequence(stored, at))
        for offset in order:
            self._file.write(offset, data)
            self._file.sync()

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


class SyncedFile:
    """A lower bound of what was durable. Everything blocks."""

    def __init__(self, file: OpenFile, synced: Synced | None) -> None:
        """`create` and `open` make it."""
        self._file = file
        self.synced = synced  # None: it was lost, and nobody can tell what was durable
        self._sequence = synced.sequence if synced else 0

    @classmethod
    def create(cls, files: Files, folder: Path) -> SyncedFile:
        """Make an empty one, durably but for its name."""
        return cls(_created(files, folder / SYNCED_NAME, encode_synced(NOTHING)), NOTHING)

    @classmethod
    def open(cls, files: Files, folder: Path) -> SyncedFile:
        """What was noted last."""
        try:
            file = _opened(files, folder / SYNCED_NAME)
        except FileNotFoundError:
            return cls(_created(files, folder / SYNCED_NAME, b""), None)
        data = _read(file)
        slots = []
        for offset in SLOT_OFFSETS:
            try:
                slots.append(decode_synced(str(file.path), data, offset))
            except UnsupportedVersion:
                file.close()
                raise
            except CorruptObject:
                continue
        return cls(file, max(slots, key=lambda slot: slot.sequence, default=None))

    def note(self, synced: Synced) -> None:
        """What is durable now. This is not, and need not be: an older note says less."""
        self._sequence += 1
        self.synced = replace(synced, sequence=self._sequence)
        data = encode_synced(self.synced)
        for offset in SLOT_OFFSETS:
            self._file.write(offset, data)

    def lower(self, synced: Synced) -> None:
        """As `note`, and durably: an older one would say too much."""
        self.note(synced)
        self._file.sync()

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


def _created(files: Files, path: Path, slot: bytes) -> OpenFile:
    if not files.allocate(path, FILE_BYTES):
        raise LogFull(f"no room on the disk for {path}", retry_after_ms=RETRY_AFTER_MS)
    file = files.open(path)
    # All of it is written, so that nothing has to be allocated when it is overwritten.
    file.write(0, b"".join(slot.ljust(SLOT_OFFSETS[1], b"\0") for _ in SLOT_OFFSETS))
    file.sync()
    return file


def _opened(files: Files, path: Path) -> OpenFile:
    file = files.open(path)
    file.settle()
    file.reserve(FILE_BYTES)  # if it was cut; what is missing shows in its slots
    return file


def _read(file: OpenFile) -> bytes:
    """Both slots; one that the disk cannot read is zeros, which are no slot."""
    data = b""
    for offset in SLOT_OFFSETS:
        with contextlib.suppress(LogDamaged):
            data += file.read(offset, SLOT_OFFSETS[1])
        data = data.ljust(offset + SLOT_OFFSETS[1], b"\0")
    return data


def _control_sequence(data: bytes, offset: int) -> int:
    try:
        return decode_control("", data, offset).sequence
    except CorruptObject:
        return 0
