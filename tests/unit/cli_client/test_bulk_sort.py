"""The external sort of a bulk load: complete, sorted, without duplicates, in bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from shalekv.cli.load import sort as bulk_runs
from shalekv.cli.load.sort import (
    FRAME_BYTES,
    FRAMES_AT_ONCE,
    ROW_BYTES,
    RUNS_MAX,
    ExternalSort,
    Frame,
    RunFile,
)

MIB = 1 << 20

Row = tuple[bytes, bytes, int]


def rows_of(frames: Iterator[Frame]) -> list[Row]:
    return [row for frame in frames for row in zip(*frame, strict=True)]


@pytest.mark.parametrize("seed", range(8))
def test_rows_come_by_key_and_the_last_of_a_key_counts(seed: int, tmp_path: Path) -> None:
    """Rows are sorted and the last of a key wins, for any order, sizes and memory."""
    random = Random(seed)
    memory_bytes = random.choice([1, 2_000, 20_000, 1_000_000])
    expected: dict[bytes, Row] = {}
    with closing(ExternalSort(tmp_path, memory_bytes=memory_bytes)) as sort:
        for _ in range(random.randrange(40)):
            rows = [
                (
                    b"%d" % random.randrange(300),
                    random.randbytes(random.choice([0, 5, 300])),
                    random.choice([0, 1, 2**63]),
                )
                for _ in range(random.randrange(30))
            ]
            sort.add(rows)
            expected |= {row[0]: row for row in rows}
            assert not [*tmp_path.iterdir()]  # no file has a name that a crash would leave
        assert rows_of(sort.sorted()) == sorted(expected.values())


def test_many_runs_are_merged_before_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is written once for each level of merges, not once for each merge."""
    monkeypatch.setattr(bulk_runs, "FRAME_BYTES", 1)  # of a row
    memory_bytes, count = 20_000, 8_000
    row_bytes = ROW_BYTES + 104
    runs_max = memory_bytes // (row_bytes * FRAMES_AT_ONCE)
    random = Random(1)
    keys = [b"%04x" % random.getrandbits(16) for _ in range(count)]
    most_runs = 0
    with closing(ExternalSort(tmp_path, memory_bytes=memory_bytes)) as sort:
        for key in keys:
            sort.add([(key, bytes(100), 0)])
            most_runs = max(most_runs, sort.run_count)
        assert most_runs == runs_max < RUNS_MAX
        assert sort.spilled_bytes < 4 * count * (104 + 32)  # and 32 for the frame of each row
        found = [key for frame in sort.sorted() for key in frame.keys]
    assert found == sorted({*keys})


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Five times as many rows take about the same memory, while sorting and merging."""
    random = Random(1)
    memory_bytes = 4 * MIB
    count = 5 * memory_bytes // (ROW_BYTES + 116)
    tracemalloc.start()
    try:
        with closing(ExternalSort(tmp_path, memory_bytes=memory_bytes)) as sort:
            for _ in range(count):
                sort.add([(random.randbytes(16), random.randbytes(100), 2**40)])
            assert sort.run_count >= 4
            found = sum(len(frame.keys) for frame in sort.sorted())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == count
    assert peak_bytes < 1.5 * memory_bytes


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """Frames are read back, including none, empty values, and the largest expiry."""
    run = RunFile(tmp_path)
    frames = [
        Frame([b"a", b"b"], [b"", b"2"], [0, 2**64 - 1]),
        Frame([b"c"], [bytes(FRAME_BYTES * 2)], [7]),
    ]
    with closing(run):
        assert [*run.frames()] == []
        for frame in frames:
            run.append(frame)
        for _ in range(2):
            read = [*run.frames()]
            assert [[*map(list, frame)] for frame in read] == [[*map(list, f)] for f in frames]
    assert all(one.keys[-1] < other.keys[0] for one, other in pairwise(frames))
