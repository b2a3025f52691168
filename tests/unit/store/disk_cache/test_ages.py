"""What is deleted to make room is what was used longest ago, and not much more than asked for."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from shalekv.store.disk_cache_ages import Ages

FILES = st.lists(st.tuples(st.integers(0, 10**13), st.integers(1, 1_000)), max_size=200)


def aged(files: Sequence[tuple[int, int]], classes_max: int) -> Ages:
    """The ages of files, each a time and a size."""
    ages = Ages(classes_max)
    for used_ms, size_bytes in files:
        ages.add(used_ms, size_bytes)
    return ages


@given(FILES, st.integers(1, 300), st.integers(0, 100_000))
def test_a_cut_frees_enough_and_keeps_what_is_newer(
    files: list[tuple[int, int]], classes_max: int, wanted_bytes: int
) -> None:
    """All that is asked for if there is so much, at most a file too much, and the oldest first."""
    ages = aged(files, classes_max)
    cut = ages.cut(wanted_bytes)
    taken = [cut.takes(*file) for file in files]
    total_bytes = sum(size for _, size in files)
    freed_bytes = sum(size for (_, size), gone in zip(files, taken, strict=True) if gone)
    assert ages.total_bytes == total_bytes
    assert freed_bytes >= min(wanted_bytes, total_bytes)
    largest_bytes = max((size for _, size in files), default=0)
    assert freed_bytes < wanted_bytes + largest_bytes + 1
    gone_ms = [used for (used, _), gone in zip(files, taken, strict=True) if gone]
    kept_ms = [used for (used, _), gone in zip(files, taken, strict=True) if not gone]
    if gone_ms and kept_ms:
        assert max(gone_ms) < min(kept_ms) + ages.class_ms


def test_memory_is_bounded() -> None:
    """However many times there are, only so many classes are told apart, of even lengths."""
    ages = aged([(number * 1_000, 1) for number in range(100_000)], 1_000)
    assert 100_000 * 1_000 / ages.class_ms <= 1_000
    cut = ages.cut(50_000)
    assert abs(cut.from_ms - 50_000_000) <= ages.class_ms
