"""How far a check has come, and checks of several objects at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from shalekv.engine.levels.origins import Origins
from shalekv.format.names import parse_level_name
from shalekv.store.cas import CasStore

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class CheckProgress:
    """What was checked so far, and how much there is as far as that is known."""

    manifests: int = 0
    wal_objects: int = 0
    fences: int = 0  # of them
    ssts: int = 0
    size_bytes: int = 0  # of all of them
    objects_total: int = 0
    bytes_total: int = 0
    merged_keys: int = 0  # by a deep check


@dataclass(slots=True)
class Scope:
    """What all parts of one check share."""

    store: CasStore
    parallel: int
    progress: CheckProgress = field(default_factory=CheckProgress)
    missing: list[str] = field(default_factory=list)  # to be looked at once more, at the end
    recorded: set[str] = field(default_factory=set)  # ids of loads that the log commits
    origins: Origins = field(init=False)  # where SSTs are

    def __post_init__(self) -> None:
        self.origins = Origins(self.store, b"")  # no manifest is read yet

    def told(self, name: str) -> str:
        """What an object is called in findings: with the URL, if it is in another database."""
        sst_id = parse_level_name(name)
        if sst_id is None or not self.origins.is_foreign(sst_id):
            return name
        return f"{self.origins.locate(sst_id).store.url}/{name}"


async def in_chunks(
    items: Iterable[ItemT], check: Callable[[ItemT], Awaitable[ResultT]], parallel: int
) -> AsyncIterator[ResultT]:
    """The results for all items, in their order; `parallel` are looked at together."""

    async def run(item: ItemT) -> ResultT:
        return await check(item)

    remaining = iter(items)
    while chunk := list(islice(remaining, parallel)):
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(item)) for item in chunk]
        for task in running:
            yield task.result()
