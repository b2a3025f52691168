"""The check of a database: of its manifests, the WAL, the SSTs, and at last of what is missing.

Servers, compactors and collectors may run meanwhile. Objects never change, so damage found in one
is final. But a missing object may not be needed any more, and an unreferenced one may be new. These
are decided at the end, by manifests that are read again.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from shalekv.errors import CorruptObject, DatabaseNotFound, ObjectNotFound, StoreError
from shalekv.format.access import decode_policy
from shalekv.format.names import (
    ACCESS_FOLDER,
    is_uuid7,
    level_name,
    manifest_name,
    parse_level_name,
    parse_policy_name,
    parse_wal_name,
    policy_name,
)
from shalekv.jobs.fsck.objects import (
    ActiveManifestSet,
    CheckProgress,
    NamedSst,
    Scope,
    finding_of,
    read_active,
    unreadable,
)
from shalekv.jobs.fsck.wal_and_ssts import check_log, check_ssts, list_levels, orphans
from shalekv.jobs.pinned_clones import CloneState, check_clones, removal_command
from shalekv.protocol.audit import (
    Finding,
    FindingKind,
    level_findings,
    manifest_findings,
    succession_findings,
)
from shalekv.protocol.entry import NO_RANGE_TOMBSTONES, Entry, KeyRange, RangeTombstones
from shalekv.protocol.manifest import Manifest, SortedRun, Version
from shalekv.protocol.origins import is_pin, needed_pins
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.origins import OriginPins, Origins
from shalekv.read.source import LevelSource
from shalekv.read.sst_reader import LevelSsts
from shalekv.settings import CacheSettings
from shalekv.store.cas import CasStore

DEFAULT_PARALLEL = 4
_ALL_KEYS = KeyRange(b"", b"")
_KEYS_PER_YIELD = 2_000  # merged between two chances for other tasks


@dataclass(slots=True)
class _Source:
    """One SST of L0, or one sorted run; `rank` 0 is the newest."""

    rank: int
    run: SortedRun
    reader: LevelSource
    tombstones: RangeTombstones = NO_RANGE_TOMBSTONES
    entries: list[Entry] = field(default_factory=list)
    at: int = 0

    async def head(self) -> Entry | None:
        """Return the next entry; None: there is none."""
        while self.at >= len(self.entries):
            window = await self.reader.next()
            if window is None:
                return None
            if window.range_tombstones:
                self.tombstones = self.tombstones.with_added(window.range_tombstones)
            self.entries, self.at = list(window.run.entries), 0
        return self.entries[self.at]

    def name_at(self, key: bytes) -> str:
        """Return the name of the object that holds the key."""
        number = max(bisect_right(self.run.first_keys, key) - 1, 0)
        return level_name(self.run.ssts[number].id)


async def check_order(scope: Scope, manifest: Manifest) -> AsyncIterator[Finding]:
    """Check that every version of a key in a level is newer than those in the levels below (I9).

    This is the deep check.

    All keys of all sources are merged, by the readers that scans use, a window of each at a time.
    Yields a finding for each SST: the first violation in it, and the number of violations.
    """
    try:
        version = Version.of(manifest)
    except ValueError:
        return  # the damage of the table of SSTs is reported already
    ssts = LevelSsts(scope.store, database_id=manifest.database_id, settings=CacheSettings())
    ssts.origins = scope.origins
    runs = [SortedRun.of(0, [info]) for info in version.l0] + [*version.runs]
    sources = [_Source(rank, run, _reader(ssts, run.ssts)) for rank, run in enumerate(runs)]
    found: dict[str, tuple[str, int]] = {}
    with suppress(CorruptObject, StoreError):  # the audit of the objects reports these
        await _merge(scope, sources, found)
    for name, (problem, count) in sorted(found.items()):
        more = f"; {count} keys in all" if count > 1 else ""
        yield Finding(name, FindingKind.STALE_VERSION, problem + more)


def _reader(ssts: LevelSsts, infos: Sequence[SstInfo]) -> LevelSource:
    return LevelSource(ssts, infos, _ALL_KEYS, reverse=False)


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
        if scope.progress.merged_keys % _KEYS_PER_YIELD == 0:
            await scope.store.runtime.clock.sleep_ms(0)


def _compare(
    sources: list[_Source],
    key: bytes,
    versions: dict[int, Entry],
    found: dict[str, tuple[str, int]],
) -> None:
    """Compare the versions of a key: from the oldest source to the newest, numbers must rise."""
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


async def check_origins(scope: Scope, active: ActiveManifestSet) -> AsyncIterator[Finding]:
    """Check that the databases with which a clone shares SSTs still keep them.

    Yields the pins of readable manifests that are gone, or may expire.
    """
    named = {
        (url, snapshot_id): manifest_name(manifest.manifest_id)
        for manifest in active.readable()
        for snapshot_id, url in needed_pins(manifest).items()
    }
    for (url, snapshot_id), name in sorted(named.items()):
        try:
            found = await OriginPins(scope.origins).find(url, snapshot_id)
        except DatabaseNotFound:
            found = None
        except StoreError as error:
            yield unreadable(name, error)
            continue
        except CorruptObject as error:
            yield finding_of(error)
            continue
        if found is not None and is_pin(found):
            continue
        pin = f"the snapshot {snapshot_id.hex()} of {url}, which keeps SSTs that this names,"
        if found is None:
            yield Finding(name, FindingKind.ORIGIN, f"{pin} is gone")
        else:
            problem = f"{pin} may expire: start a writer or a compactor, which mends it"
            yield Finding(name, FindingKind.ORIGIN, problem)


async def check_pinned_clones(scope: Scope, current: Manifest) -> AsyncIterator[Finding]:
    """Check that the clones for which the current manifest keeps SSTs are still there."""
    for pin in await check_clones(scope.store, current):
        if pin.state is CloneState.NEEDED:
            continue
        name, command = pin.snapshot.name, removal_command(scope.store.url, pin.snapshot)
        if pin.state is CloneState.GONE:
            problem = (
                f"the snapshot {name!r} keeps SSTs for a clone that is gone: {pin.remark}. Remove "
                "the snapshot with"
            )
        else:
            problem = (
                f"the snapshot {name!r} keeps SSTs for a clone that was not found: "
                f"{pin.remark}. Only if the clone does not exist any more, remove the snapshot with"
            )
        manifest = manifest_name(current.manifest_id)
        yield Finding(manifest, FindingKind.CLONE_PIN, f"{problem} `{command}`")


async def check_policies(scope: Scope, current: Manifest) -> AsyncIterator[Finding]:
    """Check every version of the access policy, and that none is missing.

    Versions are never deleted: the oldest one has number 1.
    """
    names = [info.name async for info in scope.store.list(ACCESS_FOLDER)]
    expected = 1
    for version in sorted(version for name in names if (version := parse_policy_name(name))):
        if version > expected:
            problem = f"is missing, and a later version is there: the next one is {version}"
            yield Finding(policy_name(expected), FindingKind.POLICY, problem)
        expected = version + 1
        name = policy_name(version)
        try:
            data = (await scope.store.get(name)).data
            decode_policy(name, data, database_id=current.database_id)
        except StoreError as error:
            yield unreadable(name, error)
        except CorruptObject as error:
            yield finding_of(error)


class Fsck:
    """One check of the database in `store`, which is only read."""

    def __init__(
        self, store: CasStore, *, parallel: int = DEFAULT_PARALLEL, is_deep: bool = False
    ) -> None:
        """Check `parallel` objects at once, each with a few megabytes in memory.

        With `is_deep`, all keys of the current version are merged as well.
        """
        self._scope = Scope(store, parallel)
        self._is_deep = is_deep

    @property
    def progress(self) -> CheckProgress:
        """The progress, which changes while `findings` runs."""
        return self._scope.progress

    async def findings(self) -> AsyncIterator[Finding]:
        """Yield everything that is wrong, as it is found. Raises `DatabaseNotFound`.

        The check goes on after a finding, as far as the database is readable.
        """
        try:
            async for finding in self._findings():
                yield finding
        finally:
            await self._scope.origins.close()

    async def _findings(self) -> AsyncIterator[Finding]:
        scope = self._scope
        active = await read_active(scope.store)
        scope.progress.manifests = len(active.manifests)
        scope.progress.size_bytes = active.sizes_bytes
        for finding in _manifest_findings(active):
            if finding.kind is FindingKind.MISSING:
                scope.missing.append(finding.name)
            else:
                yield finding
        current = active.current
        if current is None:
            return  # without it, nothing says which objects must exist
        scope.origins = Origins(scope.store, current.database_id)
        for manifest in active.manifests.values():
            scope.origins.learn(manifest.origins)
        listed: dict[str, int] = {}
        async for finding in self._check_objects(active, current, listed):
            yield finding
        async for finding in self._check_with_newer_manifests(active, listed):
            yield finding

    async def _check_with_newer_manifests(
        self, active: ActiveManifestSet, listed: dict[str, int]
    ) -> AsyncIterator[Finding]:
        """Check missing objects, origins and orphans, by manifests read after the objects."""
        scope = self._scope
        again = await read_active(scope.store)
        async for finding in _missing(scope, again):
            yield finding
        async for finding in check_origins(scope, again):
            yield finding
        if again.current is not None:
            async for finding in check_pinned_clones(scope, again.current):
                yield finding
        if active.is_complete and again.is_complete:
            still_there = await list_levels(scope)
            for finding in orphans(again, listed):
                if finding.name in still_there:
                    yield finding

    async def _check_objects(
        self, active: ActiveManifestSet, current: Manifest, listed: dict[str, int]
    ) -> AsyncIterator[Finding]:
        """Check the WAL, the levels and the policies; add the objects of the levels to `listed`."""
        scope = self._scope
        async for finding in check_log(scope, active, current):
            yield finding
        listed.update(await list_levels(scope))
        async for finding in check_ssts(scope, active, listed):
            yield finding
        async for finding in check_policies(scope, current):
            yield finding
        if self._is_deep:
            async for finding in check_order(scope, current):
                yield finding


def _manifest_findings(active: ActiveManifestSet) -> list[Finding]:
    findings = [*active.findings]
    ordered = [active.manifests[manifest_id] for manifest_id in sorted(active.manifests)]
    for manifest in ordered:
        name = manifest_name(manifest.manifest_id)
        findings += manifest_findings(name, manifest)
        findings += level_findings(name, manifest)
    for older, newer in pairwise(ordered):
        findings += succession_findings(manifest_name(newer.manifest_id), older, newer)
    return findings


async def _missing(scope: Scope, again: ActiveManifestSet) -> AsyncIterator[Finding]:
    """Find those of the missing objects that are needed and still missing."""
    problems = {f.name: f.problem for f in again.findings if f.kind is FindingKind.MISSING}
    named = {level_name(sst.info.id): sst.by for sst in _needed(scope, again)}
    for name in sorted({*scope.missing}):
        wal_id = parse_wal_name(name)
        if wal_id is not None and wal_id >= again.first_wal_id:
            problems[name] = "is missing although it was written"
        if parse_level_name(name) is not None and name in named:
            problems[name] = f"is missing, and {named[name]} names it"
        if name not in problems:
            continue
        sst_id = parse_level_name(name)
        place = None if sst_id is None else scope.origins.locate(sst_id)
        if await _is_gone(scope.store if place is None else place.store, name):
            yield Finding(scope.reported_name(name), FindingKind.MISSING, problems[name])


def _needed(scope: Scope, active: ActiveManifestSet) -> Iterator[NamedSst]:
    """Yield the SSTs that must exist: the SSTs of a load without a record may not exist yet."""
    for sst in active.ssts():
        if is_uuid7(sst.info.id) and (sst.pending is None or sst.pending in scope.recorded):
            yield sst


async def _is_gone(store: CasStore, name: str) -> bool:
    try:
        await store.head(name)
    except ObjectNotFound:
        return True
    return False
