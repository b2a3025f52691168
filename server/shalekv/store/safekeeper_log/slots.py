"""The small files of a member, `control` and `synced`: two slots each, so that one is always whole.

They are written once in full when the member is created, and overwritten in place from then on:
this works on a full disk.

The control file is saved slot by slot, each with a sync: at any moment, one slot holds either the
previous or the new contents. Afterwards both slots are equal, so that bit rot in one of them does
not bring an older promise back.

The synced file is written after each sync of the log, without a sync of its own: it is a lower
bound of what was durable. If the log is found to be shorter, records were lost. A power cut may
leave any of the bounds that were written since the last sync of this file. None of them is too
high, because the bound is lowered, with a sync, before the log is cut. One that is too low is
harmless, since records are synced before they are acknowledged.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from shalekv.errors import CorruptObject, LogDamaged, LogFull, Truncated, UnsupportedVersion
from shalekv.format.quorum.member_files import (
    Control,
    Synced,
    decode_control,
    decode_synced,
    encode_control,
    encode_synced,
)
from shalekv.store.files import DurableFiles, OpenFile

CONTROL_NAME = "control"
SYNCED_NAME = "synced"
SLOT_OFFSETS = (0, 4096)  # in different pages, so that a failed write of one spares the other
FILE_BYTES = SLOT_OFFSETS[-1] + 4096
RETRY_AFTER_MS = 10_000  # an operator has to free space
EMPTY = Synced(generation=0, sequence=0, lsn=0, checksum=0, committed_lsn=0)  # of no log


class ControlFile:
    """The durable state of a member besides its records. Everything blocks."""

    def __init__(self, file: OpenFile, control: Control) -> None:
        """Use `create` or `open` instead."""
        self._file = file
        self.control = control

    @classmethod
    def create(cls, files: DurableFiles, folder: Path, control: Control) -> ControlFile:
        """Create the file, durably except for its name. Raises `LogFull` without space."""
        file = _create(files, folder / CONTROL_NAME, encode_control(control))
        return cls(file, control)

    @classmethod
    def open(cls, files: DurableFiles, folder: Path) -> ControlFile:
        """Open the file, with the last saved state. Raises `CorruptObject` without a whole slot."""
        try:
            file = _open(files, folder / CONTROL_NAME)
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
        """Save `control` durably."""
        self.control = replace(control, sequence=self.control.sequence + 1)
        data = encode_control(self.control)
        stored = _read(self._file)
        # The slot with the latest contents is overwritten last.
        order = sorted(SLOT_OFFSETS, key=lambda at: _control_sequence(stored, at))
        for offset in order:
            self._file.write(offset, data)
            self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class SyncedFile:
    """A lower bound of the durable part of the log. Everything blocks."""

    def __init__(self, file: OpenFile, synced: Synced | None) -> None:
        """Use `create` or `open` instead."""
        self._file = file
        self.synced = synced  # None: it was lost, and it is unknown what was durable
        self._sequence = synced.sequence if synced else 0

    @classmethod
    def create(cls, files: DurableFiles, folder: Path) -> SyncedFile:
        """Create an empty file, durably except for its name. Raises `LogFull` without space."""
        return cls(_create(files, folder / SYNCED_NAME, encode_synced(EMPTY)), EMPTY)

    @classmethod
    def open(cls, files: DurableFiles, folder: Path) -> SyncedFile:
        """Open the file and read the last bound; create it if it is missing."""
        try:
            file = _open(files, folder / SYNCED_NAME)
        except FileNotFoundError:
            return cls(_create(files, folder / SYNCED_NAME, b""), None)
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

    def write(self, synced: Synced) -> None:
        """Write the bound, without a sync: an older bound, being lower, is safe."""
        self._sequence += 1
        self.synced = replace(synced, sequence=self._sequence)
        data = encode_synced(self.synced)
        for offset in SLOT_OFFSETS:
            self._file.write(offset, data)

    def lower(self, synced: Synced) -> None:
        """Write a lower bound than the last one, durably, before the log is cut.

        The last one would be too high for the log then.
        """
        self.write(synced)
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _create(files: DurableFiles, path: Path, slot: bytes) -> OpenFile:
    if not files.allocate(path, FILE_BYTES):
        raise LogFull(f"no room on the disk for {path}", retry_after_ms=RETRY_AFTER_MS)
    file = files.open(path)
    # The whole file is written, so that overwriting it allocates nothing.
    file.write(0, b"".join(slot.ljust(SLOT_OFFSETS[1], b"\0") for _ in SLOT_OFFSETS))
    file.sync()
    return file


def _open(files: DurableFiles, path: Path) -> OpenFile:
    file = files.open(path)
    file.sync_and_drop_cache()
    file.allocate(FILE_BYTES)  # if it was cut; its slots then show what is missing
    return file


def _read(file: OpenFile) -> bytes:
    """Read both slots; an unreadable one is replaced by zeros, which are no valid slot."""
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
