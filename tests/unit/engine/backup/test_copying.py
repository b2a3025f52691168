"""How many objects are under way at once."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.engine.backup.copying import CopyLimits, for_each


@pytest.mark.parametrize(("parallel", "bytes_max"), [(1, 1_000), (3, 1_000), (8, 100), (8, 7)])
async def test_neither_bound_is_passed(parallel: int, bytes_max: int) -> None:
    """No more objects and bytes at once than are allowed, but one object; all are done."""
    sizes = [(number * 37) % 50 + 1 for number in range(60)]
    done: list[int] = []
    in_flight: list[int] = []
    peak_count = 0

    async def act(size_bytes: int) -> None:
        nonlocal peak_count
        in_flight.append(size_bytes)
        peak_count = max(peak_count, len(in_flight))
        assert len(in_flight) == 1 or sum(in_flight) <= bytes_max
        for _ in range(3):
            await asyncio.sleep(0)
        in_flight.remove(size_bytes)
        done.append(size_bytes)

    await for_each(sizes, act, lambda size_bytes: size_bytes, CopyLimits(parallel, bytes_max))
    assert sorted(done) == sorted(sizes)
    assert peak_count <= parallel
    assert peak_count == parallel or bytes_max < 1_000


async def test_the_first_error_ends_all() -> None:
    """It is raised itself, and nothing more is begun."""
    begun = []

    async def act(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(0)
        if number == 2:
            raise ValueError("the second")

    with pytest.raises(ValueError, match="the second"):
        await for_each(range(100), act, lambda _: 1, CopyLimits(2, 100))
    assert len(begun) < 6
