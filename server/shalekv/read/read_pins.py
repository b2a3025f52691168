"""Read pins: the snapshots by which a process protects the versions that it reads.

A version is read only while a snapshot in the manifest names the manifest of that version, which
keeps its SSTs from collection (`protocol.snapshot`, I8). `ReadPins` adds a snapshot for each new
version, renews those that are in use, and removes the others:

    edit(created) --> current version ---- a newer one ----> older version, in use
                           renewed                                 renewed
                                                                      |  no read refers to it
                                                                      v
                                                                   removed

If the process was suspended for longer than its snapshots live, a collector may have removed them.
They are not added again, since their objects may be deleted: `protects` is false then, and
`VersionSet` replaces the version by a newer one under a new snapshot.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from shalekv.protocol.manifest import Manifest
from shalekv.protocol.snapshot import find_snapshot, has_snapshot, maintain_snapshots
from shalekv.read.version import LoadPin, PinnedVersion
from shalekv.store.cas import CasStore
from shalekv.store.manifests import Edit, Landed

SNAPSHOT_ID_BYTES = 16
NO_SNAPSHOT = b""  # the id in versions of a process that protects nothing
RENEWED_PARTS = 3  # a snapshot is renewed when a third of its life is over
# A snapshot lives for whole seconds, and for a little less by a clock that runs ahead.
UNSURE_MS, UNSURE_PARTS = 1_000, 100


class EditedManifest(Protocol):
    """The part of `StoredManifest` that is used here."""

    @property
    def current(self) -> Manifest:
        """The newest manifest that was seen."""
        ...

    async def edit(self, edit: Edit, landed: Landed) -> Manifest:
        """Edit the manifest; see `StoredManifest.edit`."""
        ...


class ReadPins:
    """Keeps the snapshots of one process: of its current version, and of older ones in use."""

    def __init__(
        self,
        store: CasStore,
        manifest: EditedManifest,
        snapshot_id: bytes,
        *,
        ttl_s: int | None,
        since_ms: float | None = None,
        archived: Callable[[], int | None] = lambda: None,
        accept_ms: Callable[[int, float], int] = lambda store_ms, _took_ms: store_ms,
    ) -> None:
        """Begin with the snapshot of the current version, whose life began at `since_ms`.

        `since_ms` is monotonic time (None: now). Snapshots live for `ttl_s` seconds. Without
        `ttl_s` nothing is protected, and the manifest is never edited. `archived` returns the last
        WAL object that a replica knows to be in the store: an edit that adds a snapshot records it
        as `wal_id_last_seen`. `accept_ms` is called before each edit with the time of the store's
        clock and the duration of the request for it (both in milliseconds), and returns the time
        from which the snapshots live: a writer does not believe a jump that nothing confirms.
        """
        self._store = store
        self._manifest = manifest
        self._ttl_s = ttl_s
        self._archived = archived
        self._accept_ms = accept_ms
        self._renewed_ms = self._now_ms() if since_ms is None else since_ms
        self._current_id = snapshot_id
        # By the ids of their snapshots: older versions and loads that may still be read.
        self._older: dict[bytes, weakref.ref[PinnedVersion] | weakref.ref[LoadPin]] = {}

    @property
    def is_enabled(self) -> bool:
        """Return whether this process protects what it reads."""
        return self._ttl_s is not None

    @property
    def manifest(self) -> Manifest:
        """The newest manifest that was seen."""
        return self._manifest.current

    @property
    def is_renewal_due(self) -> bool:
        """Return whether the lives of the snapshots should be extended."""
        return self._ttl_s is not None and self._age_ms >= self._ttl_s * 1_000 / RENEWED_PARTS

    @property
    def is_edit_due(self) -> bool:
        """Return whether `edit` has anything to renew or to remove."""
        return self.is_enabled and (self.is_renewal_due or bool(self._unused()))

    @property
    def is_unexpired(self) -> bool:
        """Return whether no snapshot of the last edit can have expired yet, by this process's
        clock.
        """
        if self._ttl_s is None:
            return False
        life_ms = self._ttl_s * 1_000
        return self._age_ms < life_ms - life_ms / UNSURE_PARTS - UNSURE_MS

    def protects(self, pinned: PinnedVersion) -> bool:
        """Return whether the manifest that was seen last has all snapshots of that version."""
        return all(has_snapshot(self.manifest, each) for each in pinned.snapshot_ids)

    def keep_load(self, pin: LoadPin) -> None:
        """Renew the snapshot of a load until nothing refers to the pin."""
        self._older[pin.snapshot_id] = weakref.ref(pin)

    def switch(self, old: PinnedVersion, snapshot_id: bytes) -> None:
        """Make `snapshot_id` that of the current version; keep that of `old` while it is read."""
        if self._current_id != NO_SNAPSHOT:
            self._older[self._current_id] = weakref.ref(old)
        self._current_id = snapshot_id

    def new_id(self) -> bytes:
        """Return the id for a new snapshot."""
        return self._store.runtime.random.randbytes(SNAPSHOT_ID_BYTES)

    async def edit(self, created: bytes | None = None) -> Manifest:
        """Renew the snapshots in use and remove the others; return the manifest of this edit.

        `created` is the id of a snapshot of that manifest to add. Raises as
        `StoredManifest.edit`.
        """
        unused = self._unused()
        manifest = await self._edit(unused, created)
        for snapshot_id in unused:
            del self._older[snapshot_id]
        return manifest

    async def remove_all(self) -> None:
        """Remove all snapshots of this process. REQUIRES: nothing is read from now on."""
        if not self.is_enabled:
            return
        own = {self._current_id, *self._older}

        def edit(manifest: Manifest) -> Manifest:
            return maintain_snapshots(
                manifest, renewed=(), removed=own, created=None, expire_time_s=0
            )

        await self._manifest.edit(edit, lambda m: not any(has_snapshot(m, each) for each in own))

    def _unused(self) -> set[bytes]:
        """Return the snapshots of versions and loads that nothing refers to any more."""
        return {each for each, ref in self._older.items() if ref() is None}

    async def _edit(self, unused: set[bytes], created: bytes | None) -> Manifest:
        began_ms = self._now_ms()
        store_ms = await self._store.now_ms()
        now_ms = self._accept_ms(store_ms, self._now_ms() - began_ms)
        expire_time_s = now_ms // 1_000 + (self._ttl_s or 0)
        archived_wal_id = self._archived()
        renewed = {self._current_id, *self._older} - unused

        def edit(manifest: Manifest) -> Manifest:
            kept = maintain_snapshots(
                manifest,
                renewed=renewed,
                removed=unused,
                created=created,
                expire_time_s=expire_time_s,
            )
            return kept if created is None else _with_last_seen(kept, archived_wal_id)

        def landed(manifest: Manifest) -> bool:
            if created is not None:
                return has_snapshot(manifest, created)
            kept = find_snapshot(manifest, self._current_id)
            is_renewed = kept is None or kept.snapshot_expire_time_s >= expire_time_s
            return is_renewed and not any(has_snapshot(manifest, each) for each in unused)

        manifest = await self._manifest.edit(edit, landed)
        self._renewed_ms = began_ms
        return manifest

    @property
    def _age_ms(self) -> float:
        """Milliseconds since the last renewal began."""
        return self._now_ms() - self._renewed_ms

    def _now_ms(self) -> float:
        return self._store.runtime.clock.monotonic_ms()


def _with_last_seen(manifest: Manifest, wal_id: int | None) -> Manifest:
    """Return the manifest with `wal_id_last_seen` set to this WAL object, if that is newer."""
    known = manifest.wal_id_last_seen
    if wal_id is None or (known is not None and known >= wal_id):
        return manifest
    return replace(manifest, wal_id_last_seen=wal_id)
