"""The deep check: that a source of a tree holds, for every key, only what is newer than below (I9).

All keys of all sources are merged, by the readers that scans use, a window of each at a time.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from shalekv.core.key_range import KeyRange
from shalekv.core.tree import SortedRun, Tree
from shalekv.engine.fsck.progress import Scope
from shalekv.errors import CorruptObject, StoreError
from shalekv.format.names import level_name
from shalekv.protocol.audit import Finding, FindingKind
from shalekv.protocol.entry import Entry
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.range_tombstones import NONE, RangeTombstones
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.source import TreeSource
from shalekv.read.sst_reader import LevelSsts
from shalekv.settings import CacheSettings

_ALL_KEYS = KeyRange(b"", b"")
_TURN_KEYS = 2_000  # merged between two chances for other tasks


@dataclass(slots=True)
class _Source:
    """One SST of L0, or one run; `rank` 0 is the newest."""

    rank: int
    run: SortedRun
    reader: TreeSource
    tombstones: RangeTombstones = NONE
    entries: list[Entry] = field(default_factory=list)
    at: int = 0

    async def head(self) -> Entry | None:
        """The entry that is next; None: there is no more."""
        while self.at >= len(self.entries):
            window = await self.reader.next()
            if window is None:
                return None
            if window.range_tombstones:
                self.tombstones = self.tombstones.with_added(window.range_tombstones)
            self.entries, self.at = list(window.run.entries), 0
        return self.entries[self.at]

    def name_at(self, key: bytes) -> str:
        """The object that holds the key."""
        number = max(bisect_right(self.run.first_keys, key) - 1, 0)
        return level_name(self.run.ssts[number].id)


async def check_order(scope: Scope, manifest: Manifest) -> AsyncIterator[Finding]:
    """Versions that stand above equal or newer ones: the first of each SST, and how many."""
    try:
        tree = Tree.of(manifest)
    except ValueError:
        return  # the table of SSTs was found wrong already
    ssts = LevelSsts(scope.store, database_id=manifest.database_id, settings=CacheSettings())
    ssts.origins = scope.origins
    runs = [SortedRun.of(0, [info]) for info in tree.l0] + [*tree.runs]
    sources = [_Source(rank, run, _reader(ssts, run.ssts)) for rank, run in enumerate(runs)]
    found: dict[str, tuple[str, int]] = {}
    with suppress(CorruptObject, StoreError):  # the audit of the objects tells what is wrong there
        await _merge(scope, sources, found)
    for name, (problem, count) in sorted(found.items()):
        more = f"; {count} keys in all" if count > 1 else ""
        yield Finding(name, FindingKind.STALE_VERSION, problem + more)


def _reader(ssts: LevelSsts, infos: Sequence[SstInfo]) -> TreeSource:
    return TreeSource(ssts, infos, _ALL_KEYS, reverse=False)


async def _merge(scope: Scope, sources: list[_Source], found: dict[str, tuple[str, int]]) -> None:
    heap: list[tuple[bytes, int]] = []
    for source in sources:
        head = await source.head()
        if head is not None:
            heap.append((head.key, source.rank))
    heapq.heapify(heap)
    while heap:
        key = heap[0][0]
        versions: dict[int, Entry] = {}
        while heap and heap[0][0] == key:
            _, rank = heapq.heappop(heap)
            source = sources[rank]
            versions[rank] = source.entries[source.at]
            source.at += 1
            head = await source.head()
            if head is not None:
                heapq.heappush(heap, (head.key, rank))
        _compare(sources, key, versions, found)
        scope.progress.merged_keys += 1
        if scope.progress.merged_keys % _TURN_KEYS == 0:
            await scope.store.runtime.clock.sleep_ms(0)


def _compare(
    sources: list[_Source],
    key: bytes,
    versions: dict[int, Entry],
    found: dict[str, tuple[str, int]],
) -> None:
    """Go from the oldest source to the newest: numbers must rise."""
    newest_below = 0
    for source in reversed(sources):
        own = versions.get(source.rank)
        fragment = source.tombstones.over(key)
        seqs = [each.seq for each in (own, fragment) if each is not None]
        if not seqs:
            continue
        if newest_below and min(seqs) <= newest_below:
            name = source.name_at(key)
            problem = (
                f"key {key.hex()} (hexadecimal) has sequence number {min(seqs)} here, and "
                f"{newest_below} below"
            )
            first, count = found.get(name, (problem, 0))
            found[name] = (first, count + 1)
        newest_below = max(newest_below, *seqs)
