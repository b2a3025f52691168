"""The `Version` that reads use, and the snapshots in the manifest that keep its objects.

`VersionSet` follows the manifest: a new `Version` is read only after the manifest has a snapshot of
it, and the snapshot of an older one is removed when nobody reads that version any more. So the
collector never deletes what is read (I8), as long as this process renews its snapshots in time. If
the process was suspended for longer, reads of older versions fail with a typed error, and new reads
use a version that is protected again.

Entries that are both in memory and in the new version are dropped from memory when nothing is left
that was decided by an older version and may be decided again.

`LoadedVersion` adds a load that is durable and not compacted. Sources are merged in the order of
their sequence numbers, not of their places: a load is newer than everything that was in memory when
its record landed, and older than everything that came after. So when a load lands, the contents of
the memtable are set aside below it, and the memtable begins anew. To a read, the three layers (the
load, what was in memory, and the levels or another `LoadedVersion`) are one version.
"""

from __future__ import annotations

import asyncio
import weakref
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from shalekv.errors import ShaleError
from shalekv.protocol.entry import Entry, KeyRange
from shalekv.protocol.loads import CommittedLoad, level_rows, load_version
from shalekv.protocol.manifest import Manifest, Version
from shalekv.protocol.range_tombstones import NONE, RangeTombstones
from shalekv.protocol.snapshot import find_snapshot, has_snapshot, maintain_snapshots
from shalekv.read import lookup
from shalekv.read.memtable import Memtable
from shalekv.read.read_set import ReadSet, VersionToken
from shalekv.read.sorted_runs import EMPTY_RUN, MemoryRun, entries_bytes
from shalekv.read.source import WINDOW_ROWS, MergeSource, MergeWindow, entries_in, level_sources
from shalekv.read.sst_reader import LevelSsts
from shalekv.read.version import PinnedVersion, ReadView
from shalekv.read.watermark import Watermark
from shalekv.store.cas import CasStore
from shalekv.store.manifests import Edit, Landed, named_manifest

log = structlog.get_logger()

SNAPSHOT_ID_BYTES = 16
RENEWED_PARTS = 3  # a snapshot is renewed when a third of its life is over
RELEASE_TIMEOUT_MS = 10_000.0  # for the edit with which an ending process removes its snapshots
WAIT_MS = 5  # between two polls for something that takes some milliseconds
# A snapshot lives for whole seconds, and for a little less by a clock that runs ahead.
UNSURE_MS, UNSURE_PARTS = 1_000, 100
NO_SNAPSHOT = b""


class LoadPin:
    """Keeps a snapshot whose manifest names the files of a load, as long as it is referred to.

    `VersionSet` renews the snapshot until this object is gone, which it notices by a weak
    reference.
    """

    __slots__ = ("__weakref__", "snapshot_id")

    def __init__(self, snapshot_id: bytes) -> None:
        """REQUIRES: the snapshot is in the manifest."""
        self.snapshot_id = snapshot_id


class LoadedVersion(PinnedVersion):
    """A load above what was in memory when it landed, above another version."""

    __slots__ = ("below", "load", "memory", "pin", "run")

    def __init__(
        self,
        load: CommittedLoad,
        memory: ReadView,
        below: PinnedVersion,
        pin: LoadPin | None = None,
    ) -> None:
        """Put `load` above `memory`, and both above `below`.

        `memory` is everything that is older than the load and not in `below`; its `pinned` is not
        used. REQUIRES: snapshots keep the files of the load: that of `below`, or that of `pin`.
        """
        # The shape, for callers that count SSTs or ask whether there are any.
        shape = replace(below.version, l0=(*level_rows(load), *below.version.l0))
        super().__init__(shape, below.ssts, below.snapshot_id)
        self.load = load
        self.memory = memory
        self.below = below
        self.pin = pin
        self.run = load_version(load)

    @property
    def without_loads(self) -> PinnedVersion:
        """The lowest version: that of a manifest, to which the snapshot belongs."""
        return self.below.without_loads

    @property
    def snapshot_ids(self) -> Sequence[bytes]:
        """All snapshots that keep objects which are read here."""
        pins = () if self.pin is None else (self.pin.snapshot_id,)
        return (*pins, *self.below.snapshot_ids)

    async def find(self, key: bytes) -> Entry | None:
        """Return the newest version of `key` here or below; may be a tombstone or expired."""
        found = await lookup.find(self.ssts, self.run, key) or self._in_memory(key)
        return found or await self.below.find(key)

    async def find_many(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        """Return what `find` returns, for each of many keys; keys not found are missing."""
        found = await lookup.find_many(self.ssts, self.run, keys)
        left = []
        for key in keys:
            if key in found:
                continue
            entry = self._in_memory(key)
            if entry is None:
                left.append(key)
            else:
                found[key] = entry
        return found | await self.below.find_many(left) if left else found

    async def find_record(self, record_key: bytes) -> Entry | None:
        """Return the newest system record with this key in the levels: loads have none."""
        return await self.below.find_record(record_key)

    def may_hold(self, key: bytes) -> bool:
        """Return whether `key` may be here or below, as far as memory can say."""
        if lookup.may_hold(self.ssts, self.run, key) or self._in_memory(key) is not None:
            return True
        return self.below.may_hold(key)

    def may_hold_record(self, record_key: bytes) -> bool:
        """Return whether a system record may be in the levels: loads have none."""
        return self.below.may_hold_record(record_key)

    def _in_memory(self, key: bytes) -> Entry | None:
        """Return the entry of `key` in memory if it is newer than the levels below.

        Older ones do not count: of what the levels hold, memory may have dropped a part. A range
        delete may still be there while a put that is newer than it is gone.
        """
        found = self.memory.get(key)
        return found if found is not None and found.seq > self.version.last_seq else None

    def sources(self, keys: KeyRange, *, reverse: bool) -> Sequence[MergeSource]:
        """Return the sources that a scan merges, oldest first."""
        return [
            *self.below.sources(keys, reverse=reverse),
            *memory_sources(self.memory, keys, reverse=reverse),
            *level_sources(self.ssts, self.run, keys, reverse=reverse),
        ]


def memory_sources(view: ReadView, keys: KeyRange, *, reverse: bool) -> list[MemorySource]:
    """Return sources for what is in memory, oldest first; the first has the range deletes."""
    tombstones = entries_in(view.range_tombstones, keys)
    sources = [MemorySource(run, keys, reverse=reverse) for run in view.runs]
    if not tombstones:
        return sources
    first = MemorySource(EMPTY_RUN, keys, reverse=reverse, range_tombstones=tombstones)
    return [first, *sources]


class MemorySource:
    """A run in memory, between two keys, as a source of a scan."""

    def __init__(
        self,
        run: MemoryRun,
        keys: KeyRange,
        *,
        reverse: bool,
        range_tombstones: Sequence[Entry] = (),
    ) -> None:
        """Read `keys` of `run`; the first window contains `range_tombstones`."""
        self._run = run
        self._low = bisect_left(run.keys, keys.start)
        self._high = bisect_left(run.keys, keys.end) if keys.end else len(run.keys)
        self._reverse = reverse
        self._range_tombstones = range_tombstones

    async def next(self, hidden: RangeTombstones = NONE) -> MergeWindow | None:
        """Return the next window; None: there is no more.

        `hidden` is ignored: what it hides costs nothing to read here.
        """
        del hidden
        tombstones, self._range_tombstones = self._range_tombstones, ()
        low, high = self._low, self._high
        if low >= high and not tombstones:
            return None
        if self._reverse:
            low = max(low, high - WINDOW_ROWS)
            self._high = low
        else:
            high = min(high, low + WINDOW_ROWS)
            self._low = high
        run = self._run
        entries = run.entries[low:high]
        part = MemoryRun(run.keys[low:high], entries, entries_bytes(entries), run.max_seq)
        return MergeWindow(part, tombstones)


class PinManifest(Protocol):
    """The part of `StoredManifest` that a `VersionSet` uses."""

    @property
    def current(self) -> Manifest:
        """The newest manifest that was seen."""
        ...

    async def edit(self, edit: Edit, landed: Landed) -> Manifest:
        """Edit the manifest; see `StoredManifest.edit`."""
        ...


class VersionSet:
    """Keeps the current `Version` of one serving process, and its snapshots."""

    def __init__(  # noqa: PLR0913 - what it connects, for a writer and for a replica
        self,
        store: CasStore,
        manifest: PinManifest,
        pinned: PinnedVersion,
        *,
        loads: Sequence[CommittedLoad],
        memtable: Memtable,
        prefix: Watermark,
        snapshot_ttl_s: int | None,
        on_compacted: Callable[[int], Awaitable[None]],
        jump: Callable[[Version], None] | None = None,
        archived: Callable[[], int | None] = lambda: None,
        protected_since_ms: float | None = None,
        believed_ms: Callable[[int, float], int] = lambda reported_ms, _took_ms: reported_ms,
    ) -> None:
        """Begin with `pinned`: the version of the current manifest, which has its snapshot.

        `loads` are those that were replayed; for each of them the memtable has set aside what is
        older. `on_compacted` drops what is in memory up to a sequence number.

        A replica gives `jump` and `archived`. `jump` lets its log go on behind a version that holds
        more than it has read, when what it had to read next may be deleted. `archived` returns the
        last WAL object of which the replica knows that it is in the store.

        The life of the snapshot began at `protected_since_ms` (monotonic time; None: now). Without
        `snapshot_ttl_s` nothing is protected, and the manifest is never edited. `believed_ms` is
        called each time that snapshots are renewed, with the time that the store's clock shows and
        the duration of the request (both milliseconds); it returns the time to use in its place.
        """
        self._store = store
        self._clock = store.runtime.clock
        self._manifest = manifest
        self._prefix = prefix
        self._ttl_s = snapshot_ttl_s
        self._on_compacted = on_compacted
        self._jump = jump
        self._archived = archived
        self._believed_ms = believed_ms
        # By the ids of their snapshots: versions and pins of loads that may still be read.
        self._older: dict[bytes, weakref.ref[PinnedVersion] | weakref.ref[LoadPin]] = {}
        self._older_tokens: list[weakref.ref[VersionToken]] = []
        self._table = manifest.current.leveled_ssts
        now_ms = self._clock.monotonic_ms()
        self._renewed_ms = now_ms if protected_since_ms is None else protected_since_ms
        self._edit_lock = asyncio.Lock()
        self._installed = asyncio.Event()
        self._memtable = memtable
        self._loads: list[tuple[CommittedLoad, LoadPin | None]] = [(load, None) for load in loads]
        self.current = self._with_loads(pinned)  # the version that new reads use
        self.lost_count = 0  # how often it was found unprotected, and replaced
        # Memory may drop entries up to this sequence number at any moment, since the current
        # version has them: transactions read those from the version. 0: memory drops nothing until
        # the version changes.
        self.droppable_seq = pinned.version.last_seq
        self.token = (
            VersionToken()
        )  # held by what rests on the current version and may be decided again
        self.empty_read_set = ReadSet(self.token)  # for lookups of which the levels have nothing

    @property
    def ssts(self) -> LevelSsts:
        """The reader of the objects of all versions."""
        return self.current.ssts

    @property
    def is_renewal_due(self) -> bool:
        """Whether the lives of the snapshots should be extended."""
        if self._ttl_s is None:
            return False
        age_ms = self._clock.monotonic_ms() - self._renewed_ms
        return age_ms >= self._ttl_s * 1_000 / RENEWED_PARTS

    @property
    def is_surely_protected(self) -> bool:
        """Whether the snapshots cannot have expired yet, whatever others did to the manifest."""
        if self._ttl_s is None or self.is_lost:
            return False
        age_ms = self._clock.monotonic_ms() - self._renewed_ms
        life_ms = self._ttl_s * 1_000
        return age_ms < life_ms - life_ms / UNSURE_PARTS - UNSURE_MS

    @property
    def is_lost(self) -> bool:
        """Whether the manifest that was seen last does not protect the current version any more."""
        return self._ttl_s is not None and not self.protects(self.current)

    def keep_pin(self, pin: LoadPin) -> None:
        """Renew the snapshot of a load until nothing refers to the pin."""
        self._older[pin.snapshot_id] = weakref.ref(pin)

    def land_load(self, load: CommittedLoad, pin: LoadPin | None) -> None:
        """Add a load that is durable: from now on reads find it, below what lands later.

        REQUIRES: nothing that is newer has landed, and nothing is in flight.
        """
        self._loads.append((load, pin))
        self._memtable.set_aside(load.seq)
        self.current = LoadedVersion(load, self._memtable.aside(load.seq), self.current, pin)
        self._renew_token()

    async def keep(self) -> None:
        """Follow the manifest that was seen last; edit it if a snapshot is needed or free.

        Raises what an edit raises: the current version stays as it is then.
        """
        async with self._edit_lock:
            await self._keep()

    async def move(self) -> None:
        """Read the version of the manifest that was seen last, also if it holds more than memory.

        REQUIRES: `jump` was given. Raises as `keep`.
        """
        async with self._edit_lock:
            await self._keep(is_forced=True)

    async def replace_lost(self, pinned: PinnedVersion) -> None:
        """Replace `pinned`, of which objects are gone, if it is still the current version.

        REQUIRES: `jump` was given. Raises as `keep`.
        """
        async with self._edit_lock:
            await self._keep(is_forced=pinned.without_loads is self.current.without_loads)

    async def _keep(self, *, is_forced: bool = False) -> None:
        seen = self._manifest.current
        is_lost = self.is_lost
        is_moved = is_forced or self._is_newer(seen) or is_lost
        if self._ttl_s is None:
            if is_moved:
                await self._install(seen, NO_SNAPSHOT)
            return
        dead = {each for each, ref in self._older.items() if ref() is None}
        if not (is_moved or dead or self.is_renewal_due):
            return
        created = self._store.runtime.random.randbytes(SNAPSHOT_ID_BYTES) if is_moved else None
        manifest = await self._edit(dead, created)
        for snapshot_id in dead:
            del self._older[snapshot_id]
        if created is not None:
            named = await named_manifest(self._store, manifest, created)
            await self._install(named, created)
            self.lost_count += is_lost

    @property
    def load_count(self) -> int:
        """Loads that are durable and not in the levels: each is a layer of every read."""
        return len(self._loads)

    def forget_dropped(self) -> None:
        """Rebuild the layers of loads from what memory still holds.

        They hold less then, but nothing else.
        """
        if self._loads:
            self.current = self._with_loads(self.current.without_loads)

    async def drop_compacted(self) -> None:
        """Drop from memory what the current version holds as well, until cancelled."""
        while True:
            version = self.current.version
            older = tuple(self._older_tokens)
            while any(token() is not None for token in older):
                await self._clock.sleep_ms(WAIT_MS)
            self._older_tokens = [token for token in self._older_tokens if token() is not None]
            await self._on_compacted(version.last_seq)
            if not self._installed.is_set():
                self.droppable_seq = 0
            await self._installed.wait()
            self._installed.clear()

    def protects(self, pinned: PinnedVersion) -> bool:
        """Return whether the manifest that was seen last has all snapshots of that version."""
        manifest = self._manifest.current
        return all(has_snapshot(manifest, each) for each in pinned.snapshot_ids)

    async def close(self, timeout_ms: float) -> None:
        """Remove all snapshots of this process. REQUIRES: nothing is read from now on.

        After `timeout_ms`, and after an error, they are left to expire.
        """
        problem = f"the object store did not take the edit within {timeout_ms:.0f} ms"
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                await self._remove_snapshots()
        except TimeoutError:
            log.warning("snapshots are left to expire", problem=problem)
        except ShaleError as error:
            log.warning("snapshots are left to expire", problem=str(error))

    async def _remove_snapshots(self) -> None:
        await self.ssts.origins.close()
        if self._ttl_s is None:
            return
        own = {self.current.snapshot_id, *self._older}

        def edit(manifest: Manifest) -> Manifest:
            return maintain_snapshots(
                manifest, renewed=(), removed=own, created=None, expire_time_s=0
            )

        await self._manifest.edit(edit, lambda m: not any(has_snapshot(m, each) for each in own))

    def _is_newer(self, manifest: Manifest) -> bool:
        """Return whether other levels are to be read, and all that they hold has landed here.

        A slot may be compacted while this process still waits for the reply that it landed.
        """
        if not self._has_landed(manifest.wal_id_last_compacted):
            return False
        is_same = manifest.wal_id_last_compacted == self.current.version.wal_id
        return not is_same or manifest.leveled_ssts != self._table

    def _has_landed(self, wal_id: int | None) -> bool:
        return wal_id is None or self._prefix.has_whole(wal_id)

    async def _edit(self, dead: set[bytes], created: bytes | None) -> Manifest:
        began_ms = self._clock.monotonic_ms()
        reported_ms = await self._store.reads.now_ms()
        now_ms = self._believed_ms(reported_ms, self._clock.monotonic_ms() - began_ms)
        expire_time_s = now_ms // 1_000 + (self._ttl_s or 0)
        seen_wal_id = self._archived()
        renewed = {self.current.snapshot_id, *self._older} - dead

        def edit(manifest: Manifest) -> Manifest:
            kept = maintain_snapshots(
                manifest,
                renewed=renewed,
                removed=dead,
                created=created,
                expire_time_s=expire_time_s,
            )
            return kept if created is None else _with_seen(kept, seen_wal_id)

        def landed(manifest: Manifest) -> bool:
            if created is not None:
                return has_snapshot(manifest, created)
            kept = find_snapshot(manifest, self.current.snapshot_id)
            is_renewed = kept is None or kept.snapshot_expire_time_s >= expire_time_s
            return is_renewed and not any(has_snapshot(manifest, each) for each in dead)

        manifest = await self._manifest.edit(edit, landed)
        self._renewed_ms = began_ms
        return manifest

    async def _install(self, manifest: Manifest, snapshot_id: bytes) -> None:
        """Read the levels of `manifest` from now on, and drop what they hold from memory."""
        version = await self._store.runtime.workers.run(Version.of, manifest)
        while not self._has_landed(version.wal_id):  # another edit came between
            if self._jump is not None:
                self._jump(version)
                break
            await self._clock.sleep_ms(WAIT_MS)
        if self.current.snapshot_id != NO_SNAPSHOT:
            self._older[self.current.snapshot_id] = weakref.ref(self.current.without_loads)
        self._table = manifest.leveled_ssts
        self.ssts.origins.learn(manifest.origins)
        self.current = self._with_loads(PinnedVersion(version, self.ssts, snapshot_id))
        self.droppable_seq = version.last_seq
        self._renew_token()
        self._installed.set()
        log.debug(
            "levels read", manifest_id=version.manifest_id, wal_id_last_compacted=version.wal_id
        )

    def _with_loads(self, pinned: PinnedVersion) -> PinnedVersion:
        """Return a version of a manifest with the loads above it that it does not hold."""
        self._loads = [pair for pair in self._loads if pair[0].seq > pinned.version.last_seq]
        for load, pin in self._loads:
            pinned = LoadedVersion(load, self._memtable.aside(load.seq), pinned, pin)
        return pinned

    def _renew_token(self) -> None:
        """Let what is decided from now on rest on another version."""
        self._older_tokens.append(weakref.ref(self.token))
        self.token = VersionToken()
        self.empty_read_set = ReadSet(self.token)


def _with_seen(manifest: Manifest, wal_id: int | None) -> Manifest:
    """Return the manifest with `wal_id_last_seen` set to this WAL object, if that is newer."""
    known = manifest.wal_id_last_seen
    if wal_id is None or (known is not None and known >= wal_id):
        return manifest
    return replace(manifest, wal_id_last_seen=wal_id)
