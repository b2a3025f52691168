"""Bits that rot, files that are cut or lost while a node is down: no wrong record, no silent loss.

What is found is one of three: everything; a log that says it is damaged; or a member that nobody
knows any more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from shalekv.core.quorum.acceptor import Flush, Reset, Save, Write
from shalekv.core.quorum.messages import Health
from shalekv.core.quorum.record import Ballot, Mark, Record
from shalekv.errors import CorruptObject
from shalekv.store.member_log.log import MemberLog
from tests.kit.disks.crashing import CrashingDisk
from tests.kit.disks.member_logs import ALL, new_log, old_log, payloads, records_after

FOLDER = Path("/data/member")
PROMISE = Ballot(7, b"n" * 16)
RECORDS = records_after(Mark(), payloads(7), epoch=1)
TRIMMED = RECORDS[1].mark
SLOT_BYTES = 4096

Damage = Callable[[bytearray], None]


@pytest.fixture(scope="module")
def disk() -> CrashingDisk:
    """With a log of three segments that was closed."""
    made = CrashingDisk()
    made.mkdir(FOLDER.parent)
    log = new_log(FOLDER, filesystem=made)
    log.perform([Save(PROMISE, Health.SOUND)])
    for record in RECORDS:
        log.perform([Write((record,)), Flush()])
    log.close()
    return made


def files(disk: CrashingDisk) -> list[str]:
    """The names of all files of the log."""
    return sorted(file.name for file in disk.list_files(FOLDER))


def check_found(disk: CrashingDisk) -> str:
    """Open the log, and judge what is found: which of the three it is."""
    try:
        log = old_log(FOLDER, filesystem=disk)
    except CorruptObject:
        return "unknown"
    found = log.read(1, ALL, ALL)
    assert found == list(RECORDS[: len(found)])
    assert log.recovered.log.last.lsn == len(found)
    assert log.recovered.promise == PROMISE
    if log.recovered.health is Health.DAMAGED:
        again = old_log(FOLDER, filesystem=disk)
        assert again.recovered.health is Health.DAMAGED
        refill(again)
        return "damaged"
    assert log.recovered.health is Health.SOUND
    assert len(found) == len(RECORDS)
    return "all"


def refill(log: MemberLog) -> None:
    """Have a damaged log filled by a leader, and find that in turn."""
    base = RECORDS[3].mark
    log.perform([Reset(base), Save(PROMISE, Health.REFILLING), Flush()])
    log.perform([Write(RECORDS[4:]), Flush()])
    assert log.read(5, ALL, ALL) == list(RECORDS[4:])
    assert log.durable_lsn == len(RECORDS)


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_in_a_segment(disk: CrashingDisk, bit: int) -> None:
    """A bit that flips anywhere in a segment harms nothing, or the log says that it is damaged."""
    outcomes = set()
    for name in files(disk):
        if not name.endswith(".log"):
            continue
        for offset in range(len(disk.bytes_of(FOLDER / name))):
            damaged = copy.deepcopy(disk)
            damaged.bytes_of(FOLDER / name)[offset] ^= 1 << bit
            outcomes.add(check_found(damaged))
    assert outcomes == {"all", "damaged"}


@pytest.mark.parametrize("name", ["control", "synced"])
def test_a_flipped_bit_in_a_slot(disk: CrashingDisk, name: str) -> None:
    """A bit that flips in one slot of a small file harms nothing: the other one says the same."""
    for begin in (0, SLOT_BYTES):
        for offset in (*range(begin, begin + 260), begin + SLOT_BYTES // 2, begin + SLOT_BYTES - 1):
            damaged = copy.deepcopy(disk)
            damaged.bytes_of(FOLDER / name)[offset] ^= 4
            assert check_found(damaged) == "all"


@pytest.mark.parametrize(("name", "outcome"), [("control", "unknown"), ("synced", "damaged")])
def test_both_slots_are_damaged(disk: CrashingDisk, name: str, outcome: str) -> None:
    """Without any slot a promise is not guessed, and what was durable is taken for lost."""
    for begin in (0, SLOT_BYTES):
        disk = copy.deepcopy(disk)
        disk.bytes_of(FOLDER / name)[begin + 9] ^= 1
    assert check_found(disk) == outcome


def test_a_file_is_cut(disk: CrashingDisk) -> None:
    """A file that is cut at any length harms nothing, or the log says so."""
    outcomes: dict[str, set[str]] = {}
    for name in files(disk):
        size_bytes = len(disk.bytes_of(FOLDER / name))
        step = 1 if name.endswith(".log") else 97
        for length in range(0, size_bytes, step):
            damaged = copy.deepcopy(disk)
            del damaged.bytes_of(FOLDER / name)[length:]
            outcomes.setdefault(name, set()).add(check_found(damaged))
    assert outcomes.pop("control") == {"unknown", "all"}
    assert outcomes.pop("synced") == {"damaged", "all"}
    assert all("damaged" in found <= {"damaged", "all"} for found in outcomes.values())


def test_a_file_is_gone(disk: CrashingDisk) -> None:
    """A file that is gone is missed."""
    for name in files(disk):
        damaged = copy.deepcopy(disk)
        damaged.unlink(FOLDER / name)
        assert check_found(damaged) == ("unknown" if name == "control" else "damaged")


def test_a_record_of_another_place(disk: CrashingDisk) -> None:
    """An intact record in the place of another one is not believed."""
    damaged = copy.deepcopy(disk)
    data = damaged.bytes_of(FOLDER / files(disk)[0])
    data[64:212], data[212:360] = data[212:360], data[64:212]
    assert check_found(damaged) == "damaged"


def test_a_bit_rots_while_the_node_runs(disk: CrashingDisk) -> None:
    """A record that was changed on the disk is refused when it is read, and those beside it not."""
    rotten = copy.deepcopy(disk)
    log = old_log(FOLDER, filesystem=rotten)
    first = files(rotten)[0]
    rotten.bytes_of(FOLDER / first)[70] ^= 1
    with pytest.raises(CorruptObject):
        log.read(1, 1, ALL)
    assert log.read(2, 3, ALL) == list(RECORDS[1:3])


def test_an_old_segment_does_not_return(disk: CrashingDisk) -> None:
    """A segment of before a reset is no part of the log, even if its records would follow."""
    changed = copy.deepcopy(disk)
    log = old_log(FOLDER, filesystem=changed)
    old = {name: bytes(changed.bytes_of(FOLDER / name)) for name in files(changed)}
    log.perform([Reset(Mark()), Flush()])
    kept: list[Record] = list(RECORDS[:3])
    log.perform([Write(tuple(kept)), Flush()])
    log.close()
    for name, data in old.items():
        if name.endswith(".log") and name not in files(changed):
            changed.close(changed.create(FOLDER / name))
            changed.bytes_of(FOLDER / name).extend(data)
    again = old_log(FOLDER, filesystem=changed)
    assert again.recovered.health is Health.SOUND
    assert again.read(1, ALL, ALL) == kept
