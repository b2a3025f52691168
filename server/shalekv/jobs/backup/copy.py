"""Objects that are copied beside each other, as many as fit into the memory that is given them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from shalekv.engine.levels.parallel import in_parallel
from shalekv.read.read_budget import ReadBudget
from shalekv.settings.model import MIB

ItemT = TypeVar("ItemT")

DEFAULT_PARALLEL = 8
DEFAULT_BYTES_MAX = 256 * MIB


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """How much is under way at once; an object that is larger than `bytes_max` goes alone."""

    parallel: int = DEFAULT_PARALLEL
    bytes_max: int = DEFAULT_BYTES_MAX


@dataclass(slots=True)
class Copying:
    """How far it has come, and how much there is as far as that is known."""

    objects_total: int = 0
    bytes_total: int = 0
    objects_copied: int = 0
    bytes_copied: int = 0
    objects_present: int = 0  # they were there before
    bytes_present: int = 0

    def expect(self, objects: int, size_bytes: int) -> None:
        """So much more is to be looked at."""
        self.objects_total += objects
        self.bytes_total += size_bytes

    def copied(self, size_bytes: int) -> None:
        """One object more, which is there now."""
        self.objects_copied += 1
        self.bytes_copied += size_bytes

    def present(self, size_bytes: int) -> None:
        """One object more, which was there."""
        self.objects_present += 1
        self.bytes_present += size_bytes


async def for_each(
    items: Iterable[ItemT],
    act: Callable[[ItemT], Awaitable[None]],
    size_bytes: Callable[[ItemT], int],
    limits: CopyLimits,
) -> None:
    """Call `act` for every item, several at once. The first error ends all, and is raised."""
    remaining = iter(items)
    budget = ReadBudget(limits.bytes_max)

    async def work() -> None:
        for item in remaining:
            async with budget.room(size_bytes(item)):
                await act(item)

    await in_parallel(work, limits.parallel)
