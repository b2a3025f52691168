"""What is in memory only: the newest version of each key that is not durable yet."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from shalekv.clock import Clock
from shalekv.core.entry import Entry
from shalekv.engine.commit import Commit
from shalekv.engine.memtable import Memtable
from shalekv.engine.sorted_runs import Run

SORTED_AT_ONCE_COUNT = 2_000  # entries sorted between two chances for other tasks


class Overlay:
    """Lies over the memtable for those who read at UNCOMMITTED."""

    def __init__(self, memtable: Memtable) -> None:
        """Empty; `memtable` is what it lies over."""
        self._memtable = memtable
        self._newest: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._newest)

    def get(self, key: bytes) -> Entry | None:
        """The newest version of `key`, durable or not."""
        found = self._newest.get(key)
        return self._memtable.get(key) if found is None else found

    def add(self, commit: Commit) -> None:
        """A commit that is newer than all others."""
        for entry in commit.entries:
            self._newest[entry.key] = entry

    def remove(self, commit: Commit) -> None:
        """A commit that is durable by now, or lost."""
        newest = self._newest
        for entry in commit.entries:
            if newest.get(entry.key) is entry:
                del newest[entry.key]

    def rebuild(self, commits: Iterable[Commit]) -> None:
        """Start again from all that is not durable, by sequence number: numbers have changed."""
        self._newest = {}
        for commit in commits:
            self.add(commit)
        for key, entry in list(self._newest.items()):
            durable = self._memtable.get(key)
            if durable is not None and durable.seq > entry.seq:  # landed ahead of its turn
                del self._newest[key]

    async def runs(self, clock: Clock) -> list[Run]:
        """Runs of what it holds at the moment of the call, letting other tasks run."""
        entries = iter(list(self._newest.items()))
        runs = []
        while part := dict(islice(entries, SORTED_AT_ONCE_COUNT)):
            runs.append(Run.from_newest(part))
            await clock.sleep_ms(0)
        return runs
