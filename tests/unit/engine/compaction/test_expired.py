"""What compactions make of values that have expired, and of the tombstones of a sweep."""

from __future__ import annotations

import pytest

from shalekv.core.compaction.jobs import WalJob
from shalekv.core.entry import Entry, Kind
from shalekv.core.tree import L0, Tree
from tests.kit.engine.compaction import (
    STORE_NOW_MS,
    Trial,
    merge_job,
    put,
    small_settings,
)
from tests.kit.engine.naive_merge import NaiveTree

OVER_MS = STORE_NOW_MS + 5
SWEPT = Entry(b"a", 0, Kind.TOMBSTONE, b"", OVER_MS)


async def merged(trial: Trial, slots: range, target: int) -> NaiveTree:
    """The levels after a merge of these slots into a level."""
    await trial.run(WalJob(slots, "all"))
    tree = Tree.of(await trial.stored.refresh())
    job = merge_job(tree, L0, target, len(tree.l0))
    assert job is not None
    await trial.run(job)
    return await NaiveTree.read(trial.store, await trial.stored.refresh())


async def test_tombstone_of_a_sweep_keeps_its_expiry() -> None:
    """Above the bottom it stays as it is; at the bottom it goes."""
    trial = await Trial.begun(small_settings(sst_bytes=10_000))
    await trial.write([put(b"a", b"older"), put(b"b")])
    await merged(trial, range(1), 9)
    await trial.write([SWEPT], time_ms=10)
    naive = await merged(trial, range(1, 2), 1)
    upper = [entry for entry in naive.entries() if entry.seq > 1]
    assert [each[2:] for each in upper] == [(Kind.TOMBSTONE, b"", OVER_MS)]
    tree = Tree.of(await trial.stored.refresh())
    job = merge_job(tree, 1, 9, 1)
    assert job is not None
    await trial.run(job)
    naive = await NaiveTree.read(trial.store, await trial.stored.refresh())
    assert [entry.key for entry in naive.entries()] == [b"b"]


@pytest.mark.parametrize(("later_ms", "is_kept"), [(2_004, True), (2_005, False)])
async def test_expired_values_are_kept_for_a_while(later_ms: int, *, is_kept: bool) -> None:
    """For `expired_kept_s` after their moment they stay as they are, by logical time."""
    trial = await Trial.begun(small_settings(sst_bytes=10_000, expired_kept_s=2))
    await trial.write([put(b"a", b"v", OVER_MS)])
    await trial.write([put(b"b")], time_ms=later_ms)
    naive = await merged(trial, range(2), 9)
    assert [entry.key for entry in naive.entries()] == ([b"a", b"b"] if is_kept else [b"b"])
