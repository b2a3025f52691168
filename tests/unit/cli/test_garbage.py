"""The garbage collector in a process that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shalekv.cli.garbage import tame_garbage_collector

ENTRIES = 200_000


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_no_full_collection_interrupts_a_growing_memtable() -> None:
    """Young objects are collected all the same."""
    tame_garbage_collector()
    before = [generation["collections"] for generation in gc.get_stats()]
    kept = {number: [number] for number in range(ENTRIES)}
    after = [generation["collections"] for generation in gc.get_stats()]
    young, middle, full = (b - a for a, b in zip(before, after, strict=True))
    assert len(kept) == ENTRIES
    assert young > 10
    assert middle > 0
    assert full == 0


def test_what_was_there_is_out_of_sight() -> None:
    """A collection later looks at none of it."""
    kept = {number: [number] for number in range(ENTRIES)}
    tame_garbage_collector()
    assert gc.get_freeze_count() >= len(kept)
