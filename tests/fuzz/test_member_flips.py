"""Every bit flip in the files of a safekeeper is found, or harmless for a reason given here."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest

from shalekv.format.quorum.member_files import HEAD_BYTES
from shalekv.format.wal_record import encode_record
from tests.fuzz.budget import attempts, replayable
from tests.kit.disks.crashing import CrashingDisk
from tests.kit.disks.member_logs import (
    FOLDER,
    RECORDS,
    SLOT_BYTES,
    check_found,
    disk_with_records,
    files_of,
)

BUDGET_S = 2.0
USED_BYTES = 260  # of a slot: zeros follow, up to its checksum

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
    return disk_with_records()


def region(name: str, at: int) -> str:
    if name == "control":
        return "slot of control"
    if name == "synced":
        return "slot of synced" if at % SLOT_BYTES < HEAD_BYTES else "between slots of synced"
    if at < HEAD_BYTES:
        return "head of a segment"
    first_lsn = int(Path(name).stem)
    later = [int(Path(other).stem) for other in files_of(disk()) if other.endswith(".log")]
    past = min((lsn for lsn in later if lsn > first_lsn), default=len(RECORDS) + 1)
    held_bytes = sum(len(encode_record(each)) for each in RECORDS[first_lsn - 1 : past - 1])
    return "record" if at < HEAD_BYTES + held_bytes else "behind the last record"


def places(name: str) -> dict[str, list[int]]:
    """Return the bytes of a file by region; of a slot those in use."""
    found: dict[str, list[int]] = {}
    for at in range(len(disk().bytes_of(FOLDER / name))):
        is_used = at % SLOT_BYTES < USED_BYTES or at % SLOT_BYTES >= SLOT_BYTES - 4
        if name.endswith(".log") or is_used:
            found.setdefault(region(name, at), []).append(at)
    return found


def check_flip(name: str, bit: int) -> None:
    """Check that a lost record is reported, a promise never goes back, and reads are right."""
    damaged = copy.deepcopy(disk())
    damaged.bytes_of(FOLDER / name)[bit // 8] ^= 1 << bit % 8
    where = region(name, bit // 8)
    assert check_found(damaged) == REGIONS[where][0], f"bit {bit} of {name}: {where}"


def test_flipped_bits_of_any_file() -> None:
    """Bits of every region of every file, as many as the budget allows."""
    regions = [(name, *each) for name in files_of(disk()) for each in places(name).items()]
    assert {where for _, where, _ in regions} == {*REGIONS}
    for number, random in attempts("members", BUDGET_S):
        name, _, bytes_ = regions[number % len(regions)]
        with replayable(number):
            check_flip(name, 8 * random.choice(bytes_) + random.randrange(8))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", files_of(disk()))
def test_every_flipped_bit_of_any_file(name: str) -> None:
    """Each bit of a file."""
    for bit in range(8 * len(disk().bytes_of(FOLDER / name))):
        check_flip(name, bit)
