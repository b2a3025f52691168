"""Tests of the keys that may have older versions outside of a merge, and of output cuts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shalekv.protocol.compaction.jobs import MergeJob, OlderKeys, older_ssts, output_cuts
from shalekv.protocol.entry import END_OF_KEYS
from shalekv.protocol.manifest import SYSTEM_LEVEL, Manifest, Version, upper_bound
from shalekv.protocol.sst_table import SstInfo, SstTable
from shalekv.settings.model import KIB
from tests.unit.protocol.compaction.driven import DELETE, PUT, SMALL_LEVELS, Driven


def info(number: int, level: int, first: bytes, last: bytes, max_seq: int) -> SstInfo:
    return SstInfo(
        bytes(15) + bytes([number]), level, first, last, 1, 1, 1, 1, 1, max_seq, 1, 1, 1, 1
    )


SSTS = {
    "newest": info(1, 0, b"a", b"z", 90),
    "newer": info(2, 0, b"a", b"z", 80),
    "oldest": info(3, 0, b"a", b"z", 70),
    "upper": info(4, 1, b"a", b"m", 60),
    "beside": info(5, 1, b"n", b"z", 60),
    "lower": info(6, 2, b"a", b"m", 50),
    "lowest": info(7, 5, b"c", b"", 40),
    "records": info(8, SYSTEM_LEVEL, b"", b"", 90),
    "old records": info(9, SYSTEM_LEVEL, b"", b"", 10),
}
TREE = Version.of(
    Manifest(
        database_id=bytes(16),
        manifest_id=1,
        write_id=bytes(16),
        leveled_ssts=SstTable.from_infos(SSTS.values()),
    )
)


@pytest.mark.parametrize(
    ("source", "target", "sources", "overlapped", "older"),
    [
        (0, 1, ["oldest"], ["upper", "beside"], ["lower", "lowest"]),
        (0, 1, ["oldest", "newer"], ["upper"], ["beside", "lower", "lowest"]),
        (0, 1, ["newer"], ["upper"], ["oldest", "beside", "lower", "lowest"]),
        (1, 2, ["upper"], ["lower"], ["lowest"]),
        (1, 5, ["upper"], [], ["lower", "lowest"]),
        (2, 5, ["lower"], ["lowest"], []),
        (SYSTEM_LEVEL, SYSTEM_LEVEL, ["records"], [], ["old records"]),
        (SYSTEM_LEVEL, SYSTEM_LEVEL, ["old records"], [], []),
    ],
)
def test_all_that_is_older_and_not_merged(
    source: int, target: int, sources: list[str], overlapped: list[str], older: list[str]
) -> None:
    """Older SSTs of L0 and all SSTs below count, except for the inputs; newer ones do not."""
    job = MergeJob(
        source,
        target,
        [SSTS[name] for name in sources],
        [SSTS[name] for name in overlapped],
        is_move=False,
        reason="",
    )
    found = {each.id for each in older_ssts(TREE, job)}
    assert found == {SSTS[name].id for name in older}


def test_bounds_are_closed() -> None:
    """Both bounds of an interval belong to it, and intervals that touch or overlap are joined."""
    older = OlderKeys.of(
        [info(1, 2, b"m", b"p", 1), info(2, 2, b"c", b"e", 1), info(3, 3, b"d", b"g", 1)]
    )
    assert (older.firsts, older.lasts) == ([b"c", b"m"], [b"g", b"p"])
    held = [key for key in (b"b", b"c", b"f", b"g", b"h", b"m", b"p", b"q") if older.may_hold(key)]
    assert held == [b"c", b"f", b"g", b"m", b"p"]
    assert not older.may_hold_any(b"a", b"c")
    assert older.may_hold_any(b"a", b"c\x00")
    assert older.may_hold_any(b"g", b"h")
    assert not older.may_hold_any(b"g\x00", b"m")
    assert older.may_hold_any(b"h", END_OF_KEYS)
    assert not older.may_hold_any(b"p\x00", END_OF_KEYS)
    assert OlderKeys.of([info(1, 2, b"x", b"", 1)]).may_hold(b"\xff" * 9)
    assert not OlderKeys().may_hold(b"")


SST_BYTES = SMALL_LEVELS.sst_bytes


def time_series(commits: int) -> Driven:
    """Return a database whose commits put keys at the end and delete keys at the beginning."""
    driven = Driven()
    for commit in range(commits):
        fresh = [(commit * 1_000 + number, PUT) for number in range(20)]
        old = [(commit // 4 * 1_000 + commit % 4, DELETE)]
        driven.write([*fresh, *old])
        driven.settle()
    return driven


@pytest.mark.usefixtures("small_levels")
def test_cuts_stand_eight_ssts_apart() -> None:
    """Between two cuts the level below has at most 8 target sizes; cuts are before its SSTs."""
    driven = time_series(300)
    last = driven.version.runs[-1]
    cuts = output_cuts(driven.version, last.level - 1, sst_bytes=SST_BYTES)
    assert set(cuts) <= set(last.first_keys)
    bounds = [b"", *cuts, upper_bound(last.ssts[-1]) + b"\x00"]
    for start, end in pairwise(bounds):
        held = [info.size_bytes for info in last.ssts if start <= info.first_key < end]
        assert sum(held) <= 8 * SST_BYTES
    assert len(cuts) <= 2 * last.size_bytes / (8 * SST_BYTES)


@pytest.mark.usefixtures("small_levels")
def test_time_series_are_merged_in_small_jobs() -> None:
    """Deletes at one end and puts at the other do not cause a merge of all keys between them."""
    driven = time_series(300)
    largest = max(job.input_bytes for job in driven.jobs if hasattr(job, "input_bytes"))
    last_bytes = driven.version.runs[-1].size_bytes
    assert last_bytes > 100 * SST_BYTES
    assert largest < 30 * SST_BYTES + 512 * KIB
