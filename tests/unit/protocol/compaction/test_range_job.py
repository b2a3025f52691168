"""Tests of range jobs: the SSTs that a job over a range of keys has to include."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from shalekv.protocol.compaction.policy import LAST_LEVEL
from shalekv.protocol.compaction.range_job import RangeJob, is_merged, pick_range
from shalekv.protocol.entry import KeyRange
from shalekv.protocol.manifest import L0, SortedRun, Version, newest_first, overlaps
from shalekv.protocol.sst_table import SstInfo

KEYS = [b"%02d" % number for number in range(24)]
ALL = KeyRange(b"", b"")
Rows = Mapping[bytes, tuple[int, bool]]  # key -> sequence number, and whether it is a tombstone


@dataclass(frozen=True)
class Model:
    """A version, and the rows of its SSTs."""

    version: Version
    rows: Mapping[bytes, Rows]

    def read(self, key: bytes) -> int | None:
        """Return the sequence number that a read finds: the first source with the key decides."""
        for info in self.version.sources_of(key):
            if key in self.rows[info.id]:
                seq, is_tombstone = self.rows[info.id][key]
                return None if is_tombstone else seq
        return None


def info(number: int, level: int, first: bytes, last: bytes, seqs: Iterable[int]) -> SstInfo:
    known = [*seqs] or [1]
    return SstInfo(
        number.to_bytes(16, "big"),
        level,
        first,
        last,
        1,
        1,
        1,
        1,
        min(known),
        max(known),
        1,
        0,
        1,
        1,
    )


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draw versions whose sources are each newer than the next; bounds may be wider than rows."""
    seq, number = 1_000, 0
    rows: dict[bytes, Rows] = {}
    l0: list[SstInfo] = []
    runs: list[SortedRun] = []
    levels = draw(st.lists(st.integers(1, LAST_LEVEL), unique=True, max_size=4).map(sorted))
    for level in [L0] * draw(st.integers(0, 4)) + levels:
        borders = draw(st.lists(st.sampled_from(KEYS), min_size=2, max_size=6, unique=True))
        borders.sort()
        pairs = [*zip(borders[::2], borders[1::2], strict=False)][: 1 if level == L0 else None]
        found = []
        for first, last in pairs:
            number += 1
            span = [key for key in KEYS if first <= key <= last]
            held = draw(st.lists(st.sampled_from(span), max_size=5, unique=True))
            of_sst = {key: (seq - at, draw(st.booleans())) for at, key in enumerate(held)}
            seq -= len(held) + 1
            endless = level == L0 and draw(st.booleans()) and last == borders[-1]
            sst = info(
                number, level, first, b"" if endless else last, [s for s, _ in of_sst.values()]
            )
            sst = (
                replace(sst, max_seq=max(sst.max_seq, seq))
                if of_sst
                else replace(sst, min_seq=seq, max_seq=seq)
            )
            rows[sst.id] = of_sst
            found.append(sst)
        if level == L0:
            l0 += found
        else:
            runs.append(SortedRun.of(level, found))
    return Model(Version(1, 1, 1_000, newest_first(l0), runs, ()), rows)


def merged(model: Model, job: RangeJob) -> Model:
    """Return the version after the job is published; tombstones that it merged are dropped."""
    newest: dict[bytes, tuple[int, bool]] = {}
    for source in job.sources:
        for sst in source:
            for key, row in model.rows[sst.id].items():
                newest.setdefault(key, row)
    kept = {key: row for key, row in newest.items() if not row[1]}
    gone = {sst.id for sst in job.inputs}
    runs = {run.level: [s for s in run.ssts if s.id not in gone] for run in model.version.runs}
    rows = dict(model.rows)
    # In SSTs of two rows, so that outputs have gaps between them, and inside.
    keys = sorted(kept)
    for at in range(0, len(keys), 2):
        part = keys[at : at + 2]
        sst = info(900 + at, job.target_level, part[0], part[-1], [kept[key][0] for key in part])
        rows[sst.id] = {key: kept[key] for key in part}
        runs.setdefault(job.target_level, []).append(sst)
    version = replace(
        model.version,
        l0=[s for s in model.version.l0 if s.id not in gone],
        runs=[SortedRun.of(level, ssts) for level, ssts in sorted(runs.items()) if ssts],
    )
    return Model(version, rows)


ranges = st.tuples(st.sampled_from([b"", *KEYS]), st.sampled_from([b"", *KEYS])).map(
    lambda pair: KeyRange(min(pair), max(pair)) if all(pair) else KeyRange(pair[0], b"")
)


@given(models(), ranges, st.integers(900, 1_000))
def test_no_read_changes(model: Model, keys: KeyRange, reserved_seq: int) -> None:
    """Every key has the same newest version before and after a range job (I2).

    This holds whatever was added after the reservation, and is left out as far as possible.
    """
    job = pick_range(model.version, keys, reserved_seq=reserved_seq)
    if job is None:
        assert not any(
            overlaps(sst, keys) and sst.min_seq <= reserved_seq
            for sst in [*model.version.l0, *(s for run in model.version.runs for s in run.ssts)]
        )
        return
    after = merged(model, job)
    assert {key: after.read(key) for key in KEYS} == {key: model.read(key) for key in KEYS}


def test_older_ones_come_along_by_their_whole_range() -> None:
    """An SST of L0 that extends beyond the range includes all older SSTs in its whole range."""
    wide = info(1, L0, b"05", b"15", [50])
    far, near, other = (
        info(2, 6, b"12", b"14", [20]),
        info(3, 6, b"05", b"06", [21]),
        info(4, 7, b"20", b"22", [5]),
    )
    newer = info(5, L0, b"14", b"23", [60])
    runs = [SortedRun.of(6, [near, far]), SortedRun.of(7, [other])]
    job = pick_range(
        Version(1, 1, 60, [newer, wide], runs, ()), KeyRange(b"05", b"06"), reserved_seq=60
    )
    assert job == RangeJob([[wide], [near, far]], LAST_LEVEL)


def test_ssts_of_one_load_are_one_source() -> None:
    """The SSTs of one load are one source, so a merge needs memory for one of them."""
    load = [info(number, L0, b"%02d" % number, b"%02d" % number, [7]) for number in range(9)]
    job = pick_range(Version(1, 1, 7, load, (), ()), ALL, reserved_seq=7)
    assert job is not None
    assert [len(source) for source in job.sources] == [9]


def test_what_is_merged_needs_no_job() -> None:
    """SSTs in the last level without tombstones and expired values need no range job."""
    sst = info(1, LAST_LEVEL, b"a", b"b", [3])
    assert is_merged(RangeJob([[sst]], LAST_LEVEL), 10)
    assert is_merged(RangeJob([[replace(sst, first_expiry_ms=11)]], LAST_LEVEL), 10)
    for other in (
        replace(sst, level=6),
        replace(sst, tombstone_count=1),
        replace(sst, first_expiry_ms=10),
    ):
        assert not is_merged(RangeJob([[sst], [other]], LAST_LEVEL), 10)
