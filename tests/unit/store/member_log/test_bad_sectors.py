"""Sectors that a disk cannot read: they are found at the start, and concern one member."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from shalekv.core.quorum.acceptor import Flush, Reset, Save, Write
from shalekv.core.quorum.messages import Health
from shalekv.core.quorum.record import Ballot, Mark
from shalekv.errors import CorruptObject
from shalekv.store.filesystem import FileSystem
from tests.kit.disks.member_logs import ALL, held, new_log, old_log, payloads, records_after

RECORDS = records_after(Mark(), payloads(7))
BALLOT = Ballot(2, b"n" * 16)
SLOT_BYTES = 4096


class BadSectors(FileSystem):
    """A real file system that cannot read some bytes of the files with one name."""

    def __init__(self, name: str, *offsets: int) -> None:
        self._name = name
        self._offsets = offsets
        self._bad: set[int] = set()  # descriptors of such files

    def open(self, path: Path) -> int:
        return self._opened(path, super().open(path))

    def open_update(self, path: Path) -> int:
        return self._opened(path, super().open_update(path))

    def close(self, descriptor: int) -> None:
        self._bad.discard(descriptor)
        super().close(descriptor)

    def pread(self, descriptor: int, length: int, offset: int) -> bytes:
        is_hit = any(offset <= bad < offset + length for bad in self._offsets)
        if descriptor in self._bad and is_hit:
            raise OSError(errno.EIO, "Input/output error")
        return super().pread(descriptor, length, offset)

    def _opened(self, path: Path, descriptor: int) -> int:
        if path.name == self._name:
            self._bad.add(descriptor)
        return descriptor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a log of several segments that was closed."""
    log = new_log(tmp_path / "member")
    log.perform([Save(BALLOT, Health.SOUND), Write(RECORDS), Flush()])
    log.close()
    return tmp_path / "member"


@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("offset", [0, 70, 500])
def test_in_a_segment(folder: Path, number: int, offset: int) -> None:
    """A log of which any part cannot be read is damaged; a leader fills it again."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix == ".log")
    log = old_log(folder, filesystem=BadSectors(names[number], offset))
    assert log.recovered.health is Health.DAMAGED
    log.perform([Reset(Mark()), Save(BALLOT, Health.REFILLING), Write(RECORDS[:3]), Flush()])
    log.close()
    again = old_log(folder)
    assert again.recovered.health is Health.REFILLING
    assert again.recovered.promise == BALLOT
    assert held(again) == list(RECORDS[:3])


@pytest.mark.parametrize("name", ["control", "synced"])
@pytest.mark.parametrize("offset", [0, SLOT_BYTES])
def test_in_one_slot(folder: Path, name: str, offset: int) -> None:
    """The other slot says the same, and what is saved then is found by the next start."""
    log = old_log(folder, filesystem=BadSectors(name, offset))
    assert (log.recovered.health, log.recovered.promise) == (Health.SOUND, BALLOT)
    higher = Ballot(3, b"h" * 16)
    log.perform([Save(higher, Health.SOUND)])
    log.close()
    again = old_log(folder)
    assert again.recovered.promise == higher
    assert again.read(1, ALL, ALL) == list(RECORDS)


def test_in_both_slots(folder: Path) -> None:
    """A promise that nobody can read is not guessed; what was durable is taken for lost."""
    with pytest.raises(CorruptObject):
        old_log(folder, filesystem=BadSectors("control", 0, SLOT_BYTES))
    log = old_log(folder, filesystem=BadSectors("synced", 0, SLOT_BYTES))
    assert log.recovered.health is Health.DAMAGED
