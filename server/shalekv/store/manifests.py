"""The manifest in the store: find the current one, and replace it by compare-and-swap.

The manifest with the highest id is current. An edit creates the next id; since a collector may
have deleted that id and a stalled process may create it anew, an edit counts only when a list
sent after its create shows it as the highest, or the current manifest contains it (rule F2).
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

Edit = Callable[[Manifest], Manifest]
Landed = Callable[[Manifest], bool]


class StoredManifest:
    """The manifest of one database. `current` is the newest that this process has seen."""

    def __init__(self, store: CasStore) -> None:
        """Nothing is read yet."""
        self._store = store
        self._workers = store.runtime.workers
        self._current: Manifest | None = None
        # It was the current one still at this moment of lapsed time, or later.
        self.confirmed_ms = -math.inf

    @property
    def current(self) -> Manifest:
        """The newest manifest that was seen. REQUIRES: `refresh` has returned once."""
        if self._current is None:
            message = "no manifest was read yet"
            raise DatabaseNotFound(message)
        return self._current

    async def refresh(self) -> Manifest:
        """List, then read the manifest with the highest id.

        Raises `DatabaseNotFound`, `CorruptObject`, `StoreUnavailable`, and `ObjectNotFound` when
        the store lists a manifest again that it does not have.
        """
        missing: int | None = None
        other: ObjectInfo | None = None
        while True:
            asked_ms = self._store.runtime.clock.monotonic_ms()
            # One empty list may be torn; of what was deleted, two show nothing.
            listed = await self._highest() or await self._highest()
            if listed is None:
                raise DatabaseNotFound(self._not_found())
            name, highest = listed.name, _id_of(listed)
            if self._current is not None and highest <= self._current.manifest_id:
                self.confirmed_ms = max(self.confirmed_ms, asked_ms)
                return self._current
            try:
                stored = await self._store.reads.get(name)
            except ObjectNotFound:
                if highest == missing:
                    raise
                missing = highest  # collected since the list: there is a newer one
                continue
            if not _may_be(stored.info, listed) and listed != other:
                # Collected since the list, and created anew by a stalled process: that has no
                # effect (rule F2), and nobody may read it. A second list would not show the old one
                # again, unless the store tells times in two ways.
                other = listed
                continue
            manifest = self._see(await self._workers.run(decode_manifest, name, stored.data))
            self.confirmed_ms = max(self.confirmed_ms, asked_ms)
            return manifest

    async def edit(self, edit: Edit, landed: Landed, *, retry: bool = True) -> Manifest:
        """Apply `edit` to the current manifest until it has landed; the manifest that has it.

        `landed` tells whether a manifest contains the edit. `edit` may raise to give up. Raises
        `ManifestVersionExists` on the first conflict if not `retry`, otherwise
        tries until it wins: callers set a deadline. Raises `DatabaseMismatch` as `check_cas_mode`.
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
        """Raise `DatabaseMismatch` unless this process creates objects as the database demands.

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
        """Create the manifest after `current`; None: another process was first."""
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
        """Rule F2: only a list that was sent after the create can tell whether it counts."""
        highest = await self._highest()
        if highest is not None and _id_of(highest) == edited.manifest_id:
            self._see(edited)
            return True
        return landed(await self.refresh())

    def _see(self, manifest: Manifest) -> Manifest:
        """Make `manifest` current unless a newer one was seen meanwhile; the current one.

        Raises `WrongObject` when it is of another database, and `IllegalState` when the state has
        gone back (I5).
        """
        current = self._current
        if current is not None and manifest.database_id != current.database_id:
            name = names.manifest_name(manifest.manifest_id)
            problem = (
                f"belongs to the database {manifest.database_id.hex()}, not to "
                f"{current.database_id.hex()}"
            )
            raise WrongObject(name, 0, problem)
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
        """The manifest with the highest id in a list that is sent now; None: there is none."""
        known = 0 if self._current is None else self._current.manifest_id
        # The one that is known is listed, too: if neither it nor a newer one is there, all is gone.
        start_after = names.manifest_name(known - 1) if known else ""
        highest: ObjectInfo | None = None
        async for info in self._store.reads.list(names.MANIFEST_FOLDER, start_after=start_after):
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


def _may_be(read: ObjectInfo, listed: ObjectInfo) -> bool:
    """Whether what was read is the object that was listed; some stores tell seconds in one of both.

    One that was created anew is younger by more than the age at which the other was collected.
    """
    first, second = read.modified_ms, listed.modified_ms
    is_as_old = first == second or first == _second(second) or second == _second(first)
    return is_as_old and read.size_bytes == listed.size_bytes


def _second(time_ms: int) -> int:
    return time_ms - time_ms % 1_000


def _progress(manifest: Manifest) -> tuple[int, int]:
    """What never goes back while one history goes on, restorations of older states excluded."""
    return manifest.first_uncompacted_wal_id, manifest.last_compacted_seq


# --- named
# The manifest that a snapshot names.


async def named_manifest(store: CasStore, seen: Manifest, snapshot_id: bytes) -> Manifest:
    """The manifest that a snapshot in `seen` names, and so the one whose objects it keeps.

    An edit that creates a snapshot may return a newer manifest than the one that it made: that may
    name objects which the snapshot does not keep, so nobody must read by it. Raises
    `SnapshotNotFound`, `CorruptObject`, `StoreError`, and `ObjectNotFound` when it has expired.
    """
    snapshot = find_snapshot(seen, snapshot_id)
    if snapshot is None:
        raise not_found(snapshot_id, seen)
    if snapshot.manifest_id == seen.manifest_id:
        return seen
    name = names.manifest_name(snapshot.manifest_id)
    data = (await store.reads.get(name)).data
    return await store.runtime.workers.run(decode_manifest, name, data)


# --- fenced
# The manifest as its writer sees it: every read and every edit first checks who owns it.
#
# Fencing is a wrapper around the stored manifest, so that no caller can forget the check.


class FencedManifest:
    """A `StoredManifest` that raises `Fenced` as soon as another writer owns it."""

    def __init__(self, stored: StoredManifest, own: WriterId) -> None:
        """`own` has won its epoch in this manifest."""
        self._stored = stored
        self.own = own

    @property
    def current(self) -> Manifest:
        """The newest manifest that was seen; this writer owned it."""
        return self._stored.current

    async def refresh(self) -> Manifest:
        """The newest manifest, by a list that is sent now. Raises `Fenced`."""
        manifest = await self._stored.refresh()
        check_owner(manifest, self.own)
        return manifest

    async def edit(self, edit: Edit, landed: Landed) -> Manifest:
        """As `StoredManifest.edit`, on manifests that this writer owns. Raises `Fenced`."""

        def owned_edit(manifest: Manifest) -> Manifest:
            check_owner(manifest, self.own)
            return edit(manifest)

        manifest = await self._stored.edit(owned_edit, landed)
        check_owner(manifest, self.own)
        return manifest


# --- compacted
# The manifest as its compactor sees it: every read and every edit first checks who that is.


class CompactedManifest:
    """A `StoredManifest` that raises `Superseded` as soon as there is another compactor."""

    def __init__(self, stored: StoredManifest, own: CompactorId) -> None:
        """`own` has won its epoch in this manifest."""
        self._stored = stored
        self._editing = asyncio.Lock()  # edits of one process need not conflict
        self.own = own

    @property
    def current(self) -> Manifest:
        """The newest manifest that was seen."""
        return self._stored.current

    async def refresh(self) -> Manifest:
        """The newest manifest, by a list that is sent now. Raises `Superseded`."""
        manifest = await self._stored.refresh()
        check_compactor(manifest, self.own)
        return manifest

    async def edit(self, edit: Edit, landed: Landed) -> Manifest:
        """As `StoredManifest.edit`, on manifests whose compactor is this. Raises `Superseded`."""

        def own_edit(manifest: Manifest) -> Manifest:
            check_compactor(manifest, self.own)
            return edit(manifest)

        async with self._editing:
            manifest = await self._stored.edit(own_edit, landed)
        check_compactor(manifest, self.own)
        return manifest


# --- editing
# Edits of the manifest by processes other than the writer, with a deadline.


EDIT_TIMEOUT_MS = 60_000


@asynccontextmanager
async def edit_deadline(store: CasStore, timeout_ms: int = EDIT_TIMEOUT_MS) -> AsyncIterator[None]:
    """Bounds an edit of the manifest, which otherwise goes on until it wins.

    Raises `ManifestConflict`; nobody knows then whether the edit was made.
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


# --- founding
# The first manifest of a database: whoever creates it has made the database.


async def check_vacant(cas: CasStore) -> None:
    """Raise `DatabaseExists` when any manifest is there: the first may have been collected."""
    if await _manifest_ids(cas):
        raise _exists(cas)


async def any_wal_object(cas: CasStore) -> str | None:
    """The name of the first WAL object; None: there is none."""
    async for info in cas.reads.list(names.WAL_FOLDER):
        if names.parse_wal_name(info.name) is not None:
            return info.name
    return None


async def found(cas: CasStore, manifest: Manifest) -> None:
    """Create the database whose first manifest this is. Raises `DatabaseExists`."""
    name = names.manifest_name(manifest.manifest_id)
    outcome = await cas.claim(name, encode_manifest(manifest))
    # Another process may have created the database, and collected its first manifest, since it was
    # looked for (F2).
    if isinstance(outcome, Taken) or await _manifest_ids(cas) != {manifest.manifest_id}:
        raise _exists(cas)


def remains(cas: CasStore, name: str) -> IllegalState:
    """The error of whoever would put a database on what is left of another."""
    return IllegalState(
        f"{cas.url} holds {name} and no manifest: the manifests of this database are lost. "
        "Put them back, restore the database from a copy, or create one at another URL"
    )


async def _manifest_ids(cas: CasStore) -> set[int]:
    listed = cas.reads.list(names.MANIFEST_FOLDER)
    ids = {names.parse_manifest_name(info.name) async for info in listed}
    return {manifest_id for manifest_id in ids if manifest_id is not None}


def _exists(cas: CasStore) -> DatabaseExists:
    return DatabaseExists(f"{cas.url} holds a database already")
