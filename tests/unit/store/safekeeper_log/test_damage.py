"""Files that are cut, lost, exchanged or unreadable: no wrong record, and no silent loss.

`tests/fuzz` covers flipped bits.
"""

from __future__ import annotations

import copy
import errno

import pytest

from shalekv.errors import CorruptObject
from shalekv.protocol.quorum.acceptor import CommittedUpTo, Flush, Reset, Save, Truncate, Write
from shalekv.protocol.quorum_records import Ballot, LogEnd, LogHealth
from shalekv.store.files import FileSystem
from tests.kit.disks.careless import ForwardingFileSystem
from tests.kit.disks.crashing import CrashingDisk
from tests.kit.disks.member_logs import (
    ALL,
    FOLDER,
    PROMISE,
    RECORDS,
    SLOT_BYTES,
    check_found,
    disk_with_records,
    files_of,
    held,
    old_log,
    perform,
    write,
)


@pytest.fixture(scope="module")
def sound() -> CrashingDisk:
    """A disk with a closed log of three segments."""
    return disk_with_records()


@pytest.fixture
def disk(sound: CrashingDisk) -> CrashingDisk:
    """A copy of `sound`, to be damaged."""
    return copy.deepcopy(sound)


@pytest.mark.parametrize(("name", "outcome"), [("control", "unknown"), ("synced", "damaged")])
def test_both_slots_are_damaged(disk: CrashingDisk, name: str, outcome: str) -> None:
    """Without a valid slot, no promise is guessed, and durable records count as lost."""
    for begin in (0, SLOT_BYTES):
        disk.bytes_of(FOLDER / name)[begin + 9] ^= 1
    assert check_found(disk) == outcome


def test_a_file_is_cut(sound: CrashingDisk) -> None:
    """A file that is cut at any length is harmless, or the log reports it."""
    outcomes: dict[str, set[str]] = {}
    for name in files_of(sound):
        size_bytes = len(sound.bytes_of(FOLDER / name))
        for length in range(0, size_bytes, 7 if name.endswith(".log") else 397):
            damaged = copy.deepcopy(sound)
            del damaged.bytes_of(FOLDER / name)[length:]
            outcomes.setdefault(name, set()).add(check_found(damaged))
    assert outcomes.pop("control") == {"unknown", "all"}
    assert outcomes.pop("synced") == {"damaged", "all"}
    assert all("damaged" in found <= {"damaged", "all"} for found in outcomes.values())


def test_a_file_is_gone_or_another(sound: CrashingDisk) -> None:
    """A missing file is detected, and a file under the name of another is not mistaken for it."""
    for name in files_of(sound):
        expected = "unknown" if name == "control" else "damaged"
        damaged = copy.deepcopy(sound)
        damaged.unlink(FOLDER / name)
        assert check_found(damaged) == expected
        for other in files_of(sound):
            if name != other:
                damaged = copy.deepcopy(sound)
                damaged.bytes_of(FOLDER / name)[:] = sound.bytes_of(FOLDER / other)
                assert check_found(damaged) == expected, (name, other)


def test_an_older_file_that_is_put_back(sound: CrashingDisk) -> None:
    """An older `synced` has a lower bound, which is harmless; an older segment is detected."""
    older = disk_with_records(2)
    for name, expected in (("synced", "all"), (files_of(older)[0], "damaged")):
        damaged = copy.deepcopy(sound)
        damaged.bytes_of(FOLDER / name)[:] = older.bytes_of(FOLDER / name)
        assert check_found(damaged) == expected, name


def test_what_was_committed_is_missed(disk: CrashingDisk) -> None:
    """The loss of committed records is detected although an older `synced` has a lower bound."""
    log = old_log(FOLDER, filesystem=disk)
    saves = [Save(PROMISE, health) for health in (LogHealth.REFILLING, LogHealth.SOUND)]
    perform(log, [CommittedUpTo(len(RECORDS)), *saves, Flush()])
    log.close()
    older = disk_with_records(2)
    disk.bytes_of(FOLDER / "synced")[:] = older.bytes_of(FOLDER / "synced")
    segments = [name for name in files_of(disk) if name.endswith(".log")]
    last = disk.bytes_of(FOLDER / segments[-1])
    assert check_found(copy.deepcopy(disk)) == "all"
    del last[64:]  # its records, of which there is one
    assert check_found(disk) == "damaged"


def test_a_record_of_another_place(disk: CrashingDisk) -> None:
    """An intact record in the place of another one is rejected."""
    data = disk.bytes_of(FOLDER / files_of(disk)[0])
    data[64:212], data[212:360] = data[212:360], data[64:212]
    assert check_found(disk) == "damaged"


def test_a_bit_rots_while_the_node_runs(disk: CrashingDisk) -> None:
    """A record that the disk has changed is rejected when it is read; those beside it are not."""
    log = old_log(FOLDER, filesystem=disk)
    disk.bytes_of(FOLDER / files_of(disk)[0])[70] ^= 1
    with pytest.raises(CorruptObject):
        log.read(1, 1, ALL)
    assert log.read(2, 3, ALL) == list(RECORDS[1:3])


def test_an_old_segment_does_not_return(disk: CrashingDisk) -> None:
    """A segment from before a reset is not part of the log, even if its records would follow."""
    log = old_log(FOLDER, filesystem=disk)
    old = {name: bytes(disk.bytes_of(FOLDER / name)) for name in files_of(disk)}
    perform(log, [Reset(LogEnd()), Flush()])
    write(log, RECORDS[:3])
    log.close()
    for name, data in old.items():
        if name.endswith(".log") and name not in files_of(disk):
            disk.close(disk.create(FOLDER / name))
            disk.bytes_of(FOLDER / name).extend(data)
    again = old_log(FOLDER, filesystem=disk)
    assert again.recovered.health is LogHealth.SOUND
    assert again.read(1, ALL, ALL) == list(RECORDS[:3])


class BadSectors(ForwardingFileSystem):
    """Some bytes of the file with this name cannot be read."""

    def __init__(self, inner: FileSystem, name: str, *offsets: int) -> None:
        super().__init__(inner)
        self._name = name
        self.offsets = offsets

    def pread(self, descriptor: int, length: int, offset: int) -> bytes:
        is_hit = any(offset <= bad < offset + length for bad in self.offsets)
        if is_hit and self.open_files[descriptor].name == self._name:
            raise OSError(errno.EIO, "Input/output error")
        return self.inner.pread(descriptor, length, offset)


@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("offset", [0, 70, 500])
def test_bad_sectors_in_a_segment(disk: CrashingDisk, number: int, offset: int) -> None:
    """A log with an unreadable part is damaged; a leader fills it again."""
    name = [name for name in files_of(disk) if name.endswith(".log")][number]
    log = old_log(FOLDER, filesystem=BadSectors(disk, name, offset))
    assert log.recovered.health is LogHealth.DAMAGED
    perform(log, [Reset(LogEnd()), Save(PROMISE, LogHealth.REFILLING), Write(RECORDS[:3]), Flush()])
    log.close()
    again = old_log(FOLDER, filesystem=disk)
    assert again.recovered.health is LogHealth.REFILLING
    assert again.recovered.promise == PROMISE
    assert held(again) == list(RECORDS[:3])


def test_bad_sectors_in_what_is_cut(disk: CrashingDisk) -> None:
    """Unreadable bytes behind a cut are overwritten, and do not return."""
    bad = BadSectors(disk, f"{4:020}.log")
    log = old_log(FOLDER, filesystem=bad)
    bad.offsets = (300,)
    perform(log, [Truncate(RECORDS[3].mark), Flush()])
    log.close()
    assert held(old_log(FOLDER, filesystem=disk)) == list(RECORDS[:4])


def test_what_ends_before_the_base_is_damaged(disk: CrashingDisk) -> None:
    """A log whose records up to its base cannot be read has lost the records that follow."""
    log = old_log(FOLDER, filesystem=disk)
    log.trim(RECORDS[6].mark)
    log.close()
    disk.bytes_of(FOLDER / f"{7:020}.log")[70] ^= 1
    assert old_log(FOLDER, filesystem=disk).recovered.health is LogHealth.DAMAGED


@pytest.mark.parametrize("name", ["control", "synced"])
def test_bad_sectors_in_slots(disk: CrashingDisk, name: str) -> None:
    """If one slot cannot be read, the other has the same contents, and later saves are found. If
    both cannot, no promise is guessed, and durable records count as lost.
    """
    for offset in (0, SLOT_BYTES):
        log = old_log(FOLDER, filesystem=BadSectors(disk, name, offset))
        assert log.recovered.health is LogHealth.SOUND
        higher = Ballot(log.recovered.promise.epoch + 1, b"h" * 16)
        perform(log, [Save(higher, LogHealth.SOUND)])
        log.close()
        again = old_log(FOLDER, filesystem=disk)
        assert again.recovered.promise == higher
        assert held(again) == list(RECORDS)
        again.close()
    bad = BadSectors(disk, name, 0, SLOT_BYTES)
    if name == "control":
        with pytest.raises(CorruptObject):
            old_log(FOLDER, filesystem=bad)
    else:
        assert old_log(FOLDER, filesystem=bad).recovered.health is LogHealth.DAMAGED
