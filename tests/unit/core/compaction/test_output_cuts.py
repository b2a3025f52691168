"""Cuts of outputs: an SST does not come to overlap a great part of the level below."""

from __future__ import annotations

from itertools import pairwise

from shalekv.core.compaction.output_cuts import output_cuts
from shalekv.core.tree import upper_bound
from shalekv.settings.model import KIB
from tests.unit.core.compaction.driven import DELETE, PUT, SMALL_LEVELS, Driven

SST_BYTES = SMALL_LEVELS.sst_bytes


def time_series(commits: int) -> Driven:
    """New keys at the end, deletes of old ones at the beginning, in each commit."""
    driven = Driven()
    for commit in range(commits):
        fresh = [(commit * 1_000 + number, PUT) for number in range(20)]
        old = [(commit // 4 * 1_000 + commit % 4, DELETE)]
        driven.write([*fresh, *old])
        driven.settle()
    return driven


def test_cuts_stand_eight_ssts_apart() -> None:
    """Between two cuts there are at most 8 target sizes of the level below, before SSTs of it."""
    driven = time_series(300)
    last = driven.tree.runs[-1]
    cuts = output_cuts(driven.tree, last.level - 1, sst_bytes=SST_BYTES)
    assert set(cuts) <= set(last.first_keys)
    bounds = [b"", *cuts, upper_bound(last.ssts[-1]) + b"\x00"]
    for start, end in pairwise(bounds):
        held = [info.size_bytes for info in last.ssts if start <= info.first_key < end]
        assert sum(held) <= 8 * SST_BYTES
    assert len(cuts) <= 2 * last.size_bytes / (8 * SST_BYTES)


def test_time_series_are_merged_in_small_jobs() -> None:
    """Deletes at one end and puts at the other do not make a merge of everything between them."""
    driven = time_series(300)
    largest = max(job.input_bytes for job in driven.jobs if hasattr(job, "input_bytes"))
    last_bytes = driven.tree.runs[-1].size_bytes
    assert last_bytes > 100 * SST_BYTES
    assert largest < 30 * SST_BYTES + 512 * KIB
    driven.check_answers()
