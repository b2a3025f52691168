"""The manifest in the store: create it, find the current one, edit it by compare-and-swap.

The manifest with the highest id is current. An edit creates the next id. A collector may have
deleted that id, and a stalled process may create it again; so an edit counts only when a list
sent after its create shows it as the highest, or the current manifest contains it (rule F2).

`StoredManifest` is the manifest for any process. The writer uses it through `WriterManifest` and
the compactor through `CompactorManifest`, which check the owner at every read and edit, so that no
caller can forget the check.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from shalekv.errors import (
    DatabaseExists,
    DatabaseMismatch,
    DatabaseNotFound,
    IllegalState,
    ManifestConflict,
    ManifestVersionExists,
    ObjectNotFound,
    WrongObject,
)
from shalekv.format import names
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.protocol.compaction.publish import CompactorId, check_compactor
from shalekv.protocol.fencing import WriterId, check_owner
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.snapshot import find_snapshot, not_found
from shalekv.store.api import ObjectInfo
from shalekv.store.cas import CasStore, Claimed, Taken

# Returns the edited manifest; the id and the write id of the result are set by `edit`.
Edit = Callable[[Manifest], Manifest]
# Whether a manifest, the edited one or a later one, contains the edit.
Landed = Callable[[Manifest], bool]

EDIT_TIMEOUT_MS = 60_000


class StoredManifest:
    """The manifest of one database. `current` is the newest that this process has seen."""

    def __init__(self, store: CasStore, *, even_dropped: bool = False) -> None:
        """Start without reading: call `refresh` before `current`.

        Only with `even_dropped` a database that is being deleted can be read and edited.
        """
        self._store = store
        self._even_dropped = even_dropped
        self._workers = store.runtime.workers
        self._current: Manifest | None = None
        # `current` was still the current manifest at this monotonic time, or later.
        self.confirmed_ms = -math.inf

    @property
    def current(self) -> Manifest:
        """The newest manifest that this process has seen. REQUIRES: `refresh` has returned once."""
        if self._current is None:
            message = "no manifest was read yet"
            raise DatabaseNotFound(message)
        return self._current

    async def refresh(self) -> Manifest:
        """List the manifests, read the one with the highest id, and return it.

        Raises `DatabaseNotFound`, `CorruptObject`, `StoreUnavailable`, `IllegalState` when the
        database is being deleted, and `ObjectNotFound` when the store lists twice a manifest that
        cannot be read.
        """
        missing: int | None = None
        other: ObjectInfo | None = None
        while True:
            asked_ms = self._store.runtime.clock.monotonic_ms()
            # One empty list may be torn. After two, the database counts as deleted.
            listed = await self._highest() or await self._highest()
            if listed is None:
                raise DatabaseNotFound(self._not_found())
            name, highest = listed.name, _id_of(listed)
            if self._current is not None and highest <= self._current.manifest_id:
                self.confirmed_ms = max(self.confirmed_ms, asked_ms)
                return self._current
            try:
                stored = await self._store.get(name)
            except ObjectNotFound:
                if highest == missing:
                    raise
                missing = highest  # collected since the list, so there is a newer one
                continue
            if not _is_same_object(stored.info, listed) and listed != other:
                # Collected since the list, and created again by a stalled process: such a manifest
                # has no effect (rule F2), and must not be read. A second list would not show the
                # old one again, unless the store reports times in two precisions.
                other = listed
                continue
            manifest = self._see(await self._workers.run(decode_manifest, name, stored.data))
            self.confirmed_ms = max(self.confirmed_ms, asked_ms)
            return manifest

    async def edit(self, edit: Edit, landed: Landed, *, retry: bool = True) -> Manifest:
        """Apply `edit` to the current manifest until it has landed; return the resulting manifest.

        `landed` says whether a manifest contains the edit; the result may be a newer manifest than
        the one of the edit. `edit` may raise to give up. After a conflict this raises
        `ManifestVersionExists` if not `retry`, else it retries without limit: callers set a
        deadline. Raises `DatabaseMismatch` as `check_cas_mode` does, and the errors of `refresh`
        and `CasStore.claim`. After a `StoreError`, or when it is cancelled, it is unknown whether
        the edit was made.
        """
        conflicts = 0
        while True:
            current = await self.refresh()
            self.check_cas_mode(current)
            edited = await self._create_next(current, edit(current))
            if edited is not None and await self._has_landed(edited, landed):
                return self.current
            if not retry:
                message = (
                    f"{names.manifest_name(current.manifest_id + 1)} was written by another "
                    "process first. Try again"
                )
                raise ManifestVersionExists(message)
            conflicts += 1
            await self._store.pause(conflicts)

    def check_cas_mode(self, manifest: Manifest) -> None:
        """Raise `DatabaseMismatch` unless this process uses the CAS mode of the database.

        Two modes in one database would not see each other's claims. Reading needs no mode.
        """
        if manifest.cas_mode is self._store.cas_mode:
            return
        wanted, given = manifest.cas_mode.name.lower(), self._store.cas_mode.name.lower()
        message = (
            f"{self._store.url} was created with --cas {wanted}, and cannot be changed with "
            f"--cas {given}: start with the flags of its creator"
        )
        raise DatabaseMismatch(message)

    async def _create_next(self, current: Manifest, edited: Manifest) -> Manifest | None:
        """Create the manifest after `current`; return None if another process was first."""
        edited = replace(
            edited,
            manifest_id=current.manifest_id + 1,
            write_id=self._store.runtime.random.randbytes(16),
        )
        data = await self._workers.run(encode_manifest, edited)
        name = names.manifest_name(edited.manifest_id)
        outcome = await self._store.claim(name, data)
        return edited if isinstance(outcome, Claimed) else None

    async def _has_landed(self, edited: Manifest, landed: Landed) -> bool:
        """Return whether the edit counts; only a list that is sent after the create can say (rule
        F2).
        """
        highest = await self._highest()
        if highest is not None and _id_of(highest) == edited.manifest_id:
            self._see(edited)
            return True
        return landed(await self.refresh())

    def _see(self, manifest: Manifest) -> Manifest:
        """Make `manifest` current unless a newer one was seen meanwhile; return the current one.

        Raises `WrongObject` when it belongs to another database, and `IllegalState` when the state
        has gone back (I5).
        """
        current = self._current
        if current is not None and manifest.database_id != current.database_id:
            name = names.manifest_name(manifest.manifest_id)
            problem = (
                f"belongs to the database {manifest.database_id.hex()}, not to "
                f"{current.database_id.hex()}"
            )
            raise WrongObject(name, 0, problem)
        if manifest.is_dropped and not self._even_dropped:
            raise IllegalState(
                f"{self._store.url} is being deleted, and cannot be used: complete that with "
                f"`shalekv drop --url {self._store.url}`"
            )
        if current is None or manifest.manifest_id > current.manifest_id:
            if current is not None and _progress(manifest) < _progress(current):
                raise IllegalState(
                    f"{names.manifest_name(manifest.manifest_id)} knows less than "
                    f"{names.manifest_name(current.manifest_id)} did, which this process has seen: "
                    "an older state was put in place of the database. Start this process again"
                )
            self._current = manifest
        return self.current

    async def _highest(self) -> ObjectInfo | None:
        """Send a list; return the manifest with the highest id in it, or None without manifests."""
        known = 0 if self._current is None else self._current.manifest_id
        # The list begins at the known manifest: if it shows neither that nor a newer one, all
        # manifests are gone.
        start_after = names.manifest_name(known - 1) if known else ""
        highest: ObjectInfo | None = None
        async for info in self._store.list(names.MANIFEST_FOLDER, start_after=start_after):
            if names.parse_manifest_name(info.name) is not None:
                highest = info  # names are in the order of ids
        return highest

    def _not_found(self) -> str:
        url = self._store.url
        if self._current is not None:
            return (
                f"{url}: {names.manifest_name(self._current.manifest_id)} is gone, and there is no "
                "newer manifest: the database was deleted, or another was made in its place. End "
                "whatever serves it"
            )
        return (
            f"{url} holds no database: it has no manifest. Check the URL, or create a database "
            "there with `shalekv serve --create`"
        )


def _id_of(listed: ObjectInfo) -> int:
    manifest_id = names.parse_manifest_name(listed.name)
    assert manifest_id is not None, listed
    return manifest_id


def _is_same_object(read: ObjectInfo, listed: ObjectInfo) -> bool:
    """Return whether the object that was read can be the one that was listed.

    Some stores report whole seconds in one of the two replies. An object that was created again
    is younger by more than the age at which the first was collected.
    """
    first, second = read.modified_ms, listed.modified_ms
    is_as_old = first == second or first == _second(second) or second == _second(first)
    return is_as_old and read.size_bytes == listed.size_bytes


def _second(time_ms: int) -> int:
    return time_ms - time_ms % 1_000


def _progress(manifest: Manifest) -> tuple[int, int]:
    """Return values that never decrease, unless an older state of the database was restored."""
    return manifest.first_uncompacted_wal_id, manifest.last_compacted_seq


async def named_manifest(store: CasStore, seen: Manifest, snapshot_id: bytes) -> Manifest:
    """Return the manifest that a snapshot in `seen` names; the snapshot keeps its objects.

    An edit that creates a snapshot may return a newer manifest than the one it has created. That
    may name objects which the snapshot does not keep, so readers of the snapshot must not use it.
    Raises `SnapshotNotFound`, `CorruptObject`, `StoreError`, and `ObjectNotFound` when the snapshot
    has expired.
    """
    snapshot = find_snapshot(seen, snapshot_id)
    if snapshot is None:
        raise not_found(snapshot_id, seen)
    if snapshot.manifest_id == seen.manifest_id:
        return seen
    name = names.manifest_name(snapshot.manifest_id)
    data = (await store.get(name)).data
    return await store.runtime.workers.run(decode_manifest, name, data)


class WriterManifest:
    """The manifest for its writer: raises `Fenced` as soon as another writer owns it.

    `own` is that writer: an edit of its own has entered its epoch before.
    """

    def __init__(self, stored: StoredManifest, own: WriterId) -> None:
        self._stored = stored
        self.own = own

    @property
    def current(self) -> Manifest:
        """The newest manifest that this process has seen; this writer owned it."""
        return self._stored.current

    async def refresh(self) -> Manifest:
        """Refresh as `StoredManifest.refresh`. Raises `Fenced`."""
        manifest = await self._stored.refresh()
        check_owner(manifest, self.own)
        return manifest

    async def edit(self, edit: Edit, landed: Landed) -> Manifest:
        """Edit as `StoredManifest.edit`, as long as this writer owns it. Raises `Fenced`."""

        def owned_edit(manifest: Manifest) -> Manifest:
            check_owner(manifest, self.own)
            return edit(manifest)

        manifest = await self._stored.edit(owned_edit, landed)
        check_owner(manifest, self.own)
        return manifest


class CompactorManifest:
    """The manifest for its compactor: raises `Superseded` as soon as there is another compactor.

    `own` is that compactor: an edit of its own has entered its epoch before.
    """

    def __init__(self, stored: StoredManifest, own: CompactorId) -> None:
        self._stored = stored
        self._edit_lock = asyncio.Lock()  # edits of one process must not conflict with each other
        self.own = own

    @property
    def current(self) -> Manifest:
        """The newest manifest that this process has seen."""
        return self._stored.current

    async def refresh(self) -> Manifest:
        """Refresh as `StoredManifest.refresh`. Raises `Superseded`."""
        manifest = await self._stored.refresh()
        check_compactor(manifest, self.own)
        return manifest

    async def edit(self, edit: Edit, landed: Landed) -> Manifest:
        """Edit as `StoredManifest.edit`, while this is its compactor. Raises `Superseded`."""

        def own_edit(manifest: Manifest) -> Manifest:
            check_compactor(manifest, self.own)
            return edit(manifest)

        async with self._edit_lock:
            manifest = await self._stored.edit(own_edit, landed)
        check_compactor(manifest, self.own)
        return manifest


@asynccontextmanager
async def edit_deadline(store: CasStore, timeout_ms: int = EDIT_TIMEOUT_MS) -> AsyncIterator[None]:
    """Bound an edit of the manifest, which otherwise retries until it wins.

    For processes other than the writer. Raises `ManifestConflict` at the deadline; it is unknown
    then whether the edit was made.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1_000):
            yield
    except TimeoutError:
        message = (
            f"{store.url}: the manifest could not be edited within {timeout_ms} ms, because the "
            "store did not answer or other processes edited it first. Try again later"
        )
        raise ManifestConflict(message) from None


async def check_vacant(cas: CasStore) -> None:
    """Raise `DatabaseExists` when there is any manifest: the first may have been collected."""
    if await _manifest_ids(cas):
        raise _exists(cas)


async def any_wal_object(cas: CasStore) -> str | None:
    """Return the name of the first WAL object, or None without one."""
    async for info in cas.list(names.WAL_FOLDER):
        if names.parse_wal_name(info.name) is not None:
            return info.name
    return None


async def create_first_manifest(cas: CasStore, manifest: Manifest) -> None:
    """Create a database by creating its first manifest. Raises `DatabaseExists`."""
    name = names.manifest_name(manifest.manifest_id)
    outcome = await cas.claim(name, encode_manifest(manifest))
    # Since `check_vacant`, another process may have created the database and collected its first
    # manifest (F2).
    if isinstance(outcome, Taken) or await _manifest_ids(cas) != {manifest.manifest_id}:
        raise _exists(cas)


def manifests_lost(cas: CasStore, name: str) -> IllegalState:
    """Return the error for a new database at a URL with an object `name`, but no manifest."""
    return IllegalState(
        f"{cas.url} holds {name} and no manifest: the manifests of this database are lost. "
        "Put them back, restore the database from a copy, or create one at another URL"
    )


async def _manifest_ids(cas: CasStore) -> set[int]:
    listed = cas.list(names.MANIFEST_FOLDER)
    ids = {names.parse_manifest_name(info.name) async for info in listed}
    return {manifest_id for manifest_id in ids if manifest_id is not None}


def _exists(cas: CasStore) -> DatabaseExists:
    return DatabaseExists(f"{cas.url} holds a database already")
