"""Every bit of the files of a safekeeper: found, or harmless for a reason that stands here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import pytest

from shalekv.core.quorum.acceptor import Flush, Save, Write
from shalekv.core.quorum.messages import Health
from shalekv.format.member_files import HEAD_BYTES
from shalekv.format.wal_record import encode_record
from tests.kit.disks.crashing import CrashingDisk
from tests.kit.disks.member_logs import new_log
from tests.unit.store.member_log.test_damage import FOLDER, PROMISE, RECORDS, check_found, files

SLOT_BYTES = 4096
USED_BYTES = 260  # of a slot: what is behind is zeros up to its checksum

# Where a bit may flip, what is found then, and why it is as it must be.
REGIONS = {
    "slot of control": ("all", "the other slot says the same, and is copied over it"),
    "slot of synced": ("all", "the other slot says the same"),
    "between slots of synced": ("all", "nobody ever reads what is there"),
    "head of a segment": ("damaged", "its checksum does not match: records may be missing"),
    "record": ("damaged", "its checksum does not match, and it was durable once"),
    "behind the last record": ("all", "no record begins there; it is overwritten with zeros"),
}


@cache
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


def region(name: str, at: int) -> str:
    """Where byte `at` of this file is."""
    if name == "control":
        return "slot of control"
    if name == "synced":
        return "slot of synced" if at % SLOT_BYTES < HEAD_BYTES else "between slots of synced"
    if at < HEAD_BYTES:
        return "head of a segment"
    first_lsn = int(Path(name).stem)
    later = [int(Path(other).stem) for other in files(disk()) if other.endswith(".log")]
    past = min((lsn for lsn in later if lsn > first_lsn), default=len(RECORDS) + 1)
    held_bytes = sum(len(encode_record(each)) for each in RECORDS[first_lsn - 1 : past - 1])
    return "record" if at < HEAD_BYTES + held_bytes else "behind the last record"


def places(name: str, *, is_every_bit: bool) -> Iterator[tuple[int, int]]:
    """Bytes and bits of a file: all, or one of each byte that says something."""
    random = Random(name)
    for at in range(len(disk().bytes_of(FOLDER / name))):
        said = name.endswith(".log") or at % SLOT_BYTES < USED_BYTES
        said = said or at % SLOT_BYTES >= SLOT_BYTES - 4
        if is_every_bit:
            yield from ((at, bit) for bit in range(8))
        elif said or at % 16 == 0:
            yield at, random.randrange(8)


def check_flips(name: str, *, is_every_bit: bool) -> set[str]:
    """Open the log with bits of a file flipped; which regions they were in."""
    seen = set()
    for at, bit in places(name, is_every_bit=is_every_bit):
        damaged = copy.deepcopy(disk())
        damaged.bytes_of(FOLDER / name)[at] ^= 1 << bit
        where = region(name, at)
        assert check_found(damaged) == REGIONS[where][0], f"bit {bit} of byte {at}: {where}"
        seen.add(where)
    return seen


def test_a_flipped_bit_in_any_file() -> None:
    """A record that was lost is told, a promise never goes back, and what is read is right."""
    seen = [check_flips(name, is_every_bit=False) for name in files(disk())]
    assert set().union(*seen) == {*REGIONS}


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", files(disk()))
def test_every_flipped_bit_of_any_file(name: str) -> None:
    """The same for every bit."""
    check_flips(name, is_every_bit=True)


def test_files_that_changed_places() -> None:
    """A file of the member under the name of another one is not taken for it."""
    for name in files(disk()):
        for other in files(disk()):
            if name != other:
                damaged = copy.deepcopy(disk())
                damaged.bytes_of(FOLDER / name)[:] = disk().bytes_of(FOLDER / other)
                expected = "unknown" if name == "control" else "damaged"
                assert check_found(damaged) == expected, (name, other)


def test_an_older_file_that_is_put_back() -> None:
    """An older `synced` claims less, which is harmless; an older segment is missed."""
    older = CrashingDisk()
    older.mkdir(FOLDER.parent)
    log = new_log(FOLDER, filesystem=older)
    log.perform([Save(PROMISE, Health.SOUND)])
    for record in RECORDS[:2]:
        log.perform([Write((record,)), Flush()])
    log.close()
    segment = files(older)[0]
    for name, expected in (("synced", "all"), (segment, "damaged")):
        damaged = copy.deepcopy(disk())
        damaged.bytes_of(FOLDER / name)[:] = older.bytes_of(FOLDER / name)
        assert check_found(damaged) == expected, name
