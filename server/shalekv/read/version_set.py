"""The `Version` that reads use, and what memory may drop because that version has it.

`VersionSet` follows the manifest: a new `Version` is read only after the manifest has a snapshot of
it, and the snapshot of an older one is removed when nobody reads that version any more
(`read.read_pins`). So the collector never deletes what is read (I8), as long as this process renews
its snapshots in time. If the process was suspended for longer, reads of older versions fail with a
typed error, and new reads use a version that is protected again.

`MemtablePruner` drops entries from memory that the new version holds as well. It waits until no
transaction can be decided again by an older version. Reads do not delay it: a get takes its entries
from memory and the current version in one step, and a view keeps the runs that it refers to.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Sequence

import structlog

from shalekv.clock import Clock
from shalekv.errors import ShaleError
from shalekv.protocol.loads import CommittedLoad
from shalekv.protocol.manifest import Manifest, Version
from shalekv.read.memtable import Memtable
from shalekv.read.read_pins import NO_SNAPSHOT, ReadPins
from shalekv.read.read_set import ReadSet, VersionToken
from shalekv.read.sst_reader import LevelSsts
from shalekv.read.version import LoadedVersion, LoadPin, PinnedVersion
from shalekv.read.watermark import Watermark
from shalekv.store.cas import CasStore
from shalekv.store.manifests import named_manifest

log = structlog.get_logger()

RELEASE_TIMEOUT_MS = 10_000.0  # for the edit with which an ending process removes its snapshots
WAIT_MS = 5  # between two polls for something that takes some milliseconds


class VersionSet:
    """Keeps the current `Version` of one process: the one that new reads use."""

    def __init__(
        self,
        store: CasStore,
        pins: ReadPins,
        pinned: PinnedVersion,
        *,
        loads: Sequence[CommittedLoad],
        memtable: Memtable,
        watermark: Watermark,
        drop_through: Callable[[int], Awaitable[None]],
        jump: Callable[[Version], None] | None = None,
    ) -> None:
        """Begin with `pinned`: the version of the current manifest, protected by `pins`.

        `loads` are those that were replayed; for each of them the memtable has set aside what is
        older. `drop_through` drops what is in memory up to a sequence number.

        Only a replica gives `jump`. It is called with a version that holds more of the log than
        was applied here, and continues the log behind that version: the objects in between may be
        deleted.
        """
        self._store = store
        self._watermark = watermark
        self._jump = jump
        self._edit_lock = asyncio.Lock()
        self._memtable = memtable
        self._loads: list[tuple[CommittedLoad, LoadPin | None]] = [(load, None) for load in loads]
        self._table = pins.manifest.leveled_ssts  # of the manifest of the current version
        self.pins = pins
        self.current = self._with_loads(pinned)  # the version that new reads use
        self.lost_count = 0  # how often it was found unprotected, and replaced
        self.pruner = MemtablePruner(
            store.runtime.clock, pinned.version.last_seq, drop_through=drop_through
        )

    @property
    def ssts(self) -> LevelSsts:
        """The reader of the objects of all versions."""
        return self.current.ssts

    @property
    def is_surely_protected(self) -> bool:
        """Return whether the snapshots cannot have expired yet, whatever others did to the
        manifest.
        """
        return not self.is_lost and self.pins.is_unexpired

    @property
    def is_lost(self) -> bool:
        """Return whether the manifest that was seen last does not protect the current version any
        more.
        """
        return self.pins.is_enabled and not self.pins.protects(self.current)

    @property
    def load_count(self) -> int:
        """Loads that are durable and not compacted: each is a layer that every read searches."""
        return len(self._loads)

    def land_load(self, load: CommittedLoad, pin: LoadPin | None) -> None:
        """Add a load that has landed: new reads find it, below what lands later.

        REQUIRES: nothing that is newer has landed, and nothing is in flight.
        """
        self._loads.append((load, pin))
        self._memtable.set_aside(load.seq)
        self.current = LoadedVersion(
            load, self._memtable.view_below_load(load.seq), self.current, pin
        )
        self.pruner.replace_token()

    async def follow_manifest(self, *, is_forced: bool = False) -> None:
        """Make the version of the manifest that was seen last the current one, where needed.

        This is done if it has other levels and all that they hold has landed here, if the current
        version is lost, or with `is_forced`, which REQUIRES that `jump` was given. The manifest is
        edited to add a snapshot for the new version, and to renew or remove others when that is
        due. Raises what an edit raises: the current version stays as it is then.
        """
        async with self._edit_lock:
            await self._follow(is_forced=is_forced)

    async def replace_lost(self, pinned: PinnedVersion) -> None:
        """Replace `pinned`, of which objects are gone, if it is still the current version.

        REQUIRES: `jump` was given. Raises as `follow_manifest`.
        """
        async with self._edit_lock:
            await self._follow(is_forced=pinned.without_loads is self.current.without_loads)

    def release_dropped(self) -> None:
        """Rebuild the layers of loads, without the runs that the memtable has dropped."""
        if self._loads:
            self.current = self._with_loads(self.current.without_loads)

    async def close(self, timeout_ms: float) -> None:
        """Remove all snapshots of this process. REQUIRES: nothing is read from now on.

        After `timeout_ms`, and after an error, they are left to expire.
        """
        problem = f"the object store did not take the edit within {timeout_ms:.0f} ms"
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                await self.ssts.origins.close()
                await self.pins.remove_all()
        except TimeoutError:
            log.warning("snapshots are left to expire", problem=problem)
        except ShaleError as error:
            log.warning("snapshots are left to expire", problem=str(error))

    async def _follow(self, *, is_forced: bool) -> None:
        seen = self.pins.manifest
        is_lost = self.is_lost
        is_switched = is_forced or self._is_newer(seen) or is_lost
        if not self.pins.is_enabled:
            if is_switched:
                await self._install(seen, NO_SNAPSHOT)
        elif is_switched:
            created = self.pins.new_id()
            manifest = await self.pins.edit(created)
            await self._install(await named_manifest(self._store, manifest, created), created)
            self.lost_count += is_lost
        elif self.pins.is_edit_due:
            await self.pins.edit()

    def _is_newer(self, manifest: Manifest) -> bool:
        """Return whether the manifest has other levels, and all that they hold has landed here.

        A slot may be compacted while this process still waits for the reply that it landed.
        """
        if not self._has_landed(manifest.wal_id_last_compacted):
            return False
        is_same = manifest.wal_id_last_compacted == self.current.version.wal_id
        return not is_same or manifest.leveled_ssts != self._table

    def _has_landed(self, wal_id: int | None) -> bool:
        return wal_id is None or self._watermark.has_whole(wal_id)

    async def _install(self, manifest: Manifest, snapshot_id: bytes) -> None:
        """Use the levels of `manifest` from now on, and let `pruner` drop what they hold."""
        version = await self._store.runtime.workers.run(Version.of, manifest)
        while not self._has_landed(version.wal_id):  # another edit came between
            if self._jump is not None:
                self._jump(version)
                break
            await self._store.runtime.clock.sleep_ms(WAIT_MS)
        self.pins.switch(self.current.without_loads, snapshot_id)
        self._table = manifest.leveled_ssts
        self.ssts.origins.learn(manifest.origins)
        self.current = self._with_loads(PinnedVersion(version, self.ssts, snapshot_id))
        self.pruner.switch(version.last_seq)
        log.debug(
            "levels read", manifest_id=version.manifest_id, wal_id_last_compacted=version.wal_id
        )

    def _with_loads(self, pinned: PinnedVersion) -> PinnedVersion:
        """Return a version of a manifest with the loads above it that it does not hold."""
        self._loads = [pair for pair in self._loads if pair[0].seq > pinned.version.last_seq]
        for load, pin in self._loads:
            pinned = LoadedVersion(load, self._memtable.view_below_load(load.seq), pinned, pin)
        return pinned


class MemtablePruner:
    """Drops from memory what the current version holds, once no transaction needs it there.

    A transaction is decided by memory and by a read set of one version. It may be decided again by
    the same read set, as long as memory has everything that came after that version. So nothing is
    dropped while the token of an older version is held.
    """

    def __init__(
        self, clock: Clock, last_seq: int, *, drop_through: Callable[[int], Awaitable[None]]
    ) -> None:
        """Begin with a version that holds all commits up to `last_seq`."""
        self._clock = clock
        self._drop_through = drop_through
        self._version_seq = last_seq
        self._older_tokens: list[weakref.ref[VersionToken]] = []
        self._switched = asyncio.Event()
        # Memory may drop entries up to this sequence number at any moment, since the current
        # version has them: transactions read those from the version. 0: memory drops nothing until
        # the version changes.
        self.droppable_seq = last_seq
        self.token = VersionToken()  # held by what is decided by the current version
        self.empty_read_set = ReadSet(self.token)  # for lookups of which the levels have nothing

    def replace_token(self) -> None:
        """Give a new token to read sets from now on, and wait for the old one before drops."""
        self._older_tokens.append(weakref.ref(self.token))
        self.token = VersionToken()
        self.empty_read_set = ReadSet(self.token)

    def switch(self, last_seq: int) -> None:
        """Begin to drop what a new version holds: all commits up to `last_seq`."""
        self.droppable_seq = self._version_seq = last_seq
        self.replace_token()
        self._switched.set()

    async def run(self) -> None:
        """Drop what may be dropped after each change of the version, until cancelled.

        Each drop waits until nothing refers to the tokens of older versions.
        """
        while True:
            seq = self._version_seq
            older = tuple(self._older_tokens)
            while any(token() is not None for token in older):
                await self._clock.sleep_ms(WAIT_MS)
            self._older_tokens = [token for token in self._older_tokens if token() is not None]
            await self._drop_through(seq)
            if not self._switched.is_set():
                self.droppable_seq = 0
            await self._switched.wait()
            self._switched.clear()
