"""Named snapshots: created, renewed, shared and removed by edits of the manifest.

An edit that finds its snapshot gone fails: what the snapshot protected may be deleted (rule F3).
All times are by the store's clock. `SnapshotUsage` finds out how many bytes snapshots keep,
`SnapshotSeqs` the sequence number that each reads at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shalekv.concurrency import in_parallel
from shalekv.errors import (
    CorruptObject,
    IllegalState,
    InvalidRequest,
    ManifestVersionExists,
    ObjectNotFound,
    Overloaded,
    SnapshotNotFound,
    StoreError,
)
from shalekv.format import names
from shalekv.format.footer import Footer, needed_tail, read_footer
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import manifest_name
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.protocol.origins import is_pin
from shalekv.protocol.retention import LiveObjects, PinnedBytes, pinned_by_snapshots
from shalekv.protocol.snapshot import (
    NAME_CHARS_MAX,
    NEVER,
    create_snapshot,
    find_snapshot,
    has_snapshot,
    is_expired,
    not_found,
    remove_snapshots,
    renew_snapshot,
    share_snapshot,
)
from shalekv.store.active_manifests import READS_MAX, read_pinned, retry_if_manifest_changed
from shalekv.store.cas import CasStore
from shalekv.store.manifests import EDIT_TIMEOUT_MS, StoredManifest, edit_deadline
from shalekv.write.logical_time import NEAR_MS
from shalekv.write.wal import list_wal

ID_BYTES = 16
# Objects behind a gap in the WAL may be acknowledged when the writer fills the gap, which it is
# about to do. After a crash only the next writer fills it, so waiting is bounded.
GAP_WAIT_MS, GAP_POLL_MS = 3_000, 20
TOO_MANY_RETRY_MS = 1_000

_ID = re.compile(r"[0-9a-fA-F]{32}")
MANIFESTS_MAX = 32  # manifests whose live objects are remembered, 24 bytes for each SST
TAIL_BYTES = 4_096  # contains the footer unless the first and last keys are very long


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """A snapshot, its manifest, and the bytes that it keeps from deletion; None: it has expired."""

    snapshot: Snapshot
    manifest: Manifest | None
    pinned: PinnedBytes | None


class _ManifestChanged(Exception):
    """The manifest has changed since the WAL was listed."""


class Snapshots:
    """The snapshots of one database, for any process that may edit its manifest."""

    def __init__(self, store: CasStore, stored: StoredManifest | None = None) -> None:
        """`stored` is the manifest, if this process follows it already."""
        self._store = store
        self._stored = stored or StoredManifest(store)

    async def create(
        self,
        *,
        name: str = "",
        ttl_ms: int | None,
        count_max: int | None = None,
        logical_ms: int = 0,
        gap_wait_ms: int = 0,
        timeout_ms: int = EDIT_TIMEOUT_MS,
    ) -> Snapshot:
        """Create a snapshot of the current state, up to the first gap in the WAL.

        It contains everything acknowledged before the call, if a writer fills the gaps of that
        moment within `gap_wait_ms`. `ttl_ms` None: it never expires. `logical_ms` is the logical
        time of the server that asks, 0 if none does: values that had expired by then are not in the
        snapshot. It counts as no more than `NEAR_MS` behind the store's clock.

        Raises `SnapshotExists` when another has the name, `InvalidRequest` for an invalid name,
        `Overloaded` when there are `count_max` snapshots already, and as `StoredManifest.edit`.
        """
        check_snapshot_name(name)
        snapshot_id = self._new_id()
        now_ms = await self._store.now_ms()
        landed = partial(has_snapshot, snapshot_id=snapshot_id)
        conflicts = 0
        async with edit_deadline(self._store, timeout_ms):
            while True:
                # The WAL is listed after the manifest was read, and again after a conflict: else
                # the listed objects might have been compacted and collected meanwhile
                # (server/docs/protocol.md, "Readers").
                current = await self._stored.refresh()
                if count_max is not None:
                    _check_count(current, now_ms / 1_000, count_max)
                last_seen = await self._last_before_gap(current, gap_wait_ms)
                edit = partial(
                    _create,
                    seen=current,
                    last_seen=last_seen,
                    snapshot_id=snapshot_id,
                    expire_time_s=_expire_time_s(now_ms, ttl_ms),
                    name=name,
                    created_ms=max(now_ms - NEAR_MS, logical_ms) if logical_ms else now_ms,
                )
                try:
                    return _found(await self._stored.edit(edit, landed, retry=False), snapshot_id)
                except (ManifestVersionExists, _ManifestChanged):
                    conflicts += 1
                    await self._store.pause(conflicts)

    async def share(self, shared: str, *, name: str = "", ttl_ms: int | None) -> Snapshot:
        """Create a second snapshot of the state that the snapshot called `shared` reads.

        Raises as `create`, and `SnapshotNotFound`.
        """
        check_snapshot_name(name)
        snapshot_id = self._new_id()
        now_s = await self._store.now_ms() / 1_000

        async def look(stored: StoredManifest) -> tuple[Snapshot, int]:
            current = await stored.refresh()
            found = _find_named(current, shared)
            if is_expired(found, now_s):
                raise not_found(found.id, current)
            return found, (await read_pinned(self._store, current, found.manifest_id))[1]

        found, checksum = await retry_if_manifest_changed(self._store, look)
        edit = partial(
            share_snapshot,
            shared_id=found.id,
            snapshot_id=snapshot_id,
            expire_time_s=await self._expire_time_s(ttl_ms),
            now_s=now_s,
            name=name,
            manifest_checksum=checksum,
        )
        return await self._edit(edit, partial(has_snapshot, snapshot_id=snapshot_id), snapshot_id)

    async def renew(self, id_or_name: str, *, ttl_ms: int | None) -> Snapshot:
        """Set the remaining lifetime of the snapshot with this id or name.

        Raises `SnapshotNotFound`, and `InvalidRequest` if a snapshot that keeps a clone alive would
        expire.
        """
        found = await self.find(id_or_name)
        if ttl_ms is not None:
            _check_no_pin(found)
        snapshot_id = found.id
        now_s = await self._store.now_ms() / 1_000
        expire_time_s = await self._expire_time_s(ttl_ms)
        edit = partial(
            renew_snapshot, snapshot_id=snapshot_id, expire_time_s=expire_time_s, now_s=now_s
        )

        def landed(manifest: Manifest) -> bool:
            found = find_snapshot(manifest, snapshot_id)
            return found is not None and found.snapshot_expire_time_s == expire_time_s

        return await self._edit(edit, landed, snapshot_id)

    async def delete(self, id_or_name: str, *, is_forced: bool = False) -> Snapshot:
        """Remove the snapshot with this id or name, and return it. Raises `SnapshotNotFound`.

        Raises `InvalidRequest` for one that keeps a clone alive, unless `is_forced`.
        """
        found = await self.find(id_or_name)
        if not is_forced:
            _check_no_pin(found)

        def edit(manifest: Manifest) -> Manifest:
            return remove_snapshots(manifest, {found.id})

        async with edit_deadline(self._store):
            await self._stored.edit(edit, lambda manifest: not has_snapshot(manifest, found.id))
        return found

    async def find(self, id_or_name: str) -> Snapshot:
        """The snapshot with this name or else id, expired or not. Raises `SnapshotNotFound`."""
        return _find_named(await self._stored.refresh(), id_or_name)

    async def list(self) -> Sequence[SnapshotView]:
        """All snapshots, in the order of their creation.

        Raises `CorruptObject` and `IllegalState` when the manifest of one cannot be read.
        """
        return await retry_if_manifest_changed(self._store, self._list)

    async def _list(self, stored: StoredManifest) -> Sequence[SnapshotView]:
        now_s = await self._store.now_ms() / 1_000
        current = await stored.refresh()
        manifests = {current.manifest_id: current}
        for snapshot in current.snapshots:
            manifest_id = snapshot.manifest_id
            if manifest_id not in manifests and not is_expired(snapshot, now_s):
                manifests[manifest_id], _ = await read_pinned(self._store, current, manifest_id)
        wal_bytes = {
            wal_id: info.size_bytes
            async for info in self._store.list(names.WAL_FOLDER)
            if (wal_id := names.parse_wal_name(info.name)) is not None
        }
        known = {manifest_id: LiveObjects.of(each) for manifest_id, each in manifests.items()}
        found = pinned_by_snapshots(current, known, now_s=now_s, wal_bytes=wal_bytes)
        pinned = {each.snapshot.id: each for each in found}
        return [
            SnapshotView(each, manifests.get(each.manifest_id), pinned[each.id])
            if each.id in pinned
            else SnapshotView(each, None, None)
            for each in current.snapshots
        ]

    async def _edit(
        self,
        edit: Callable[[Manifest], Manifest],
        landed: Callable[[Manifest], bool],
        snapshot_id: bytes,
    ) -> Snapshot:
        async with edit_deadline(self._store):
            return _found(await self._stored.edit(edit, landed), snapshot_id)

    async def last_contiguous(self, current: Manifest) -> int | None:
        """The last WAL object before the first gap; None: there is none."""
        return await self._last_before_gap(current, 0)

    async def _last_before_gap(self, current: Manifest, gap_wait_ms: int) -> int | None:
        """The last WAL object before the first gap; waits for gaps to be filled.

        Waits up to `gap_wait_ms`, until all objects that were listed at first are before the first
        gap.
        """
        clock = self._store.runtime.clock
        end_ms = clock.monotonic_ms() + gap_wait_ms
        folder = await list_wal(self._store, current.first_uncompacted_wal_id)
        wanted = max(folder.filled, default=-1)
        while folder.first_gap <= wanted and clock.monotonic_ms() < end_ms:
            await clock.sleep_ms(GAP_POLL_MS)
            if (await self._stored.refresh()).manifest_id != current.manifest_id:
                break  # the edit will fail because of that, too
            folder = await list_wal(self._store, current.first_uncompacted_wal_id)
        last = folder.first_gap - 1
        if current.wal_id_last_seen is not None:
            last = max(last, current.wal_id_last_seen)
        return None if last < 0 else last

    async def _expire_time_s(self, ttl_ms: int | None) -> int:
        return _expire_time_s(await self._store.now_ms(), ttl_ms)

    def _new_id(self) -> bytes:
        return self._store.runtime.random.randbytes(ID_BYTES)


def check_snapshot_name(name: str) -> None:
    """Raise `InvalidRequest` for a name that is too long, not printable, or like an id.

    The empty name is valid.
    """
    if len(name) > NAME_CHARS_MAX or not name.isprintable() or name != name.strip():
        problem = f"expected at most {NAME_CHARS_MAX} characters that can be printed"
        raise InvalidRequest("name", problem)
    if _ID.fullmatch(name.replace("-", "")):
        raise InvalidRequest("name", "looks like the id of a snapshot: choose another name")


def _check_no_pin(snapshot: Snapshot) -> None:
    if is_pin(snapshot):
        raise InvalidRequest(
            "snapshot",
            f"{snapshot.name!r} keeps SSTs which a clone of this database reads: without it the "
            "clone is lost. `shalekv drop` deletes a clone, and this snapshot with it; the clone's "
            "collector removes it when it reads none of them any more. If there is no such "
            "database any more, `shalekv snapshot delete --force` removes it",
        )


def _find_named(manifest: Manifest, id_or_name: str) -> Snapshot:
    for snapshot in manifest.snapshots:
        if id_or_name and snapshot.name == id_or_name:
            return snapshot
    plain = id_or_name.replace("-", "")
    found = find_snapshot(manifest, bytes.fromhex(plain)) if _ID.fullmatch(plain) else None
    if found is None:
        raise SnapshotNotFound(
            f"there is no snapshot called {id_or_name!r} in manifest {manifest.manifest_id}: it "
            "has expired, was deleted, or never was"
        )
    return found


def _create(
    manifest: Manifest,
    *,
    seen: Manifest,
    last_seen: int | None,
    snapshot_id: bytes,
    expire_time_s: int,
    name: str,
    created_ms: int,
) -> Manifest:
    if manifest.manifest_id != seen.manifest_id:
        raise _ManifestChanged
    created = create_snapshot(
        manifest,
        snapshot_id,
        expire_time_s=expire_time_s,
        name=name,
        created_ms=max(created_ms, manifest.logical_time_ms),
    )
    return replace(created, wal_id_last_seen=last_seen)


def _check_count(manifest: Manifest, now_s: float, count_max: int) -> None:
    """Raise `Overloaded` if there are `count_max` snapshots.

    Each snapshot makes every manifest larger, and keeps objects.
    """
    count = sum(not is_expired(each, now_s) for each in manifest.snapshots)
    if count >= count_max:
        raise Overloaded(
            f"there are {count} snapshots, and snapshot_count_max is {count_max}: delete some, or "
            "wait until some have expired",
            retry_after_ms=TOO_MANY_RETRY_MS,
        )


def _expire_time_s(now_ms: int, ttl_ms: int | None) -> int:
    return NEVER if ttl_ms is None else -(-(now_ms + ttl_ms) // 1_000)


def _found(manifest: Manifest, snapshot_id: bytes) -> Snapshot:
    found = find_snapshot(manifest, snapshot_id)
    if found is None:
        raise not_found(snapshot_id, manifest)
    return found


class SnapshotUsage:
    """Finds out which bytes snapshots keep from deletion, as far as their manifests can be read.

    Reads each manifest that a snapshot names once, when first needed.
    """

    def __init__(self, store: CasStore) -> None:
        self._store = store
        self._known: dict[int, LiveObjects] = {}

    def known(self, current: Manifest, now_s: float) -> list[PinnedBytes]:
        """The result of `pinned` as far as it is known without reading anything."""
        return pinned_by_snapshots(current, self._known, now_s=now_s)

    async def known_later(self, current: Manifest, now_s: float) -> list[PinnedBytes]:
        """The same, found out by a worker."""
        return await self._store.runtime.workers.run(self.known, current, now_s)

    async def pinned(self, current: Manifest, now_s: float) -> list[PinnedBytes]:
        """The bytes that each unexpired snapshot of the current manifest keeps, except WAL objects.

        `now_s` is by the store's clock. Snapshots whose manifest cannot be read are left out.
        """
        wanted = {s.manifest_id for s in current.snapshots if not is_expired(s, now_s)}
        for manifest_id in self._known.keys() - wanted:
            del self._known[manifest_id]
        unread = sorted(wanted - self._known.keys() - {current.manifest_id})
        for manifest_id in unread[: MANIFESTS_MAX - len(self._known)]:
            live = await self._read(manifest_id)
            if live is not None:
                self._known[manifest_id] = live
        return await self.known_later(current, now_s)

    async def _read(self, manifest_id: int) -> LiveObjects | None:
        name = manifest_name(manifest_id)
        try:
            data = (await self._store.get(name)).data
            manifest = await self._store.runtime.workers.run(decode_manifest, name, data)
        except (CorruptObject, StoreError):
            return None  # `shalekv fsck` reports what is wrong with it
        return LiveObjects.of(manifest)


class SnapshotSeqs:
    """Finds out the sequence number that each snapshot reads at.

    That is the sequence number of the last commit in the WAL objects that the snapshot keeps, or in
    its levels if those objects contain none. No manifest contains it, so it is read from the
    objects, once for each manifest, and remembered while the manifest is active.
    """

    def __init__(self, store: CasStore) -> None:
        self._store = store
        self._known: dict[int, int] = {}  # by manifest id

    async def of(self, current: Manifest, snapshots: Sequence[Snapshot]) -> Mapping[bytes, int]:
        """The sequence numbers of these snapshots of the current manifest, by snapshot id.

        It is 0 for snapshots that cannot be read, because they keep no WAL. Raises `CorruptObject`,
        `StoreUnavailable`, and `IllegalState` when an object is missing: the snapshot has expired
        meanwhile, or the object was deleted by hand.
        """
        active = {each.manifest_id for each in current.snapshots}
        for manifest_id in self._known.keys() - active:
            del self._known[manifest_id]
        readable = [each for each in snapshots if not each.ssts_only]
        unread = sorted({each.manifest_id for each in readable} - self._known.keys())
        found = {each: self._known[each] for each in active & self._known.keys()}

        async def work() -> None:
            while unread:
                manifest_id = unread.pop()
                found[manifest_id] = await self._read(current, manifest_id)

        await in_parallel(work, min(READS_MAX, len(unread)))
        self._known |= found
        unreadable = dict.fromkeys([each.id for each in snapshots], 0)
        return unreadable | {each.id: found[each.manifest_id] for each in readable}

    async def _read(self, current: Manifest, manifest_id: int) -> int:
        manifest = current
        if manifest_id != current.manifest_id:
            manifest, _ = await read_pinned(self._store, current, manifest_id)
        last = manifest.wal_id_last_seen
        slots = range(manifest.first_uncompacted_wal_id, 0 if last is None else last + 1)
        for wal_id in reversed(slots):
            footer = await self._footer(names.wal_name(wal_id), manifest.database_id)
            if footer.contents.entry_count:  # else it is a fence
                return footer.contents.max_seq
        return manifest.last_compacted_seq

    async def _footer(self, name: str, database_id: bytes) -> Footer:
        store = self._store
        try:
            size_bytes = (await store.head(name)).size_bytes
            tail = await store.get_range(name, -TAIL_BYTES, TAIL_BYTES)
            needed = needed_tail(name, tail, size_bytes)
            if needed > len(tail):
                tail = await store.get_range(name, -needed, needed)
        except ObjectNotFound:
            message = (
                f"{name} is missing although a snapshot needs it: it must have been deleted by "
                "hand. Put it back, or delete the snapshot"
            )
            raise IllegalState(message) from None
        return read_footer(name, tail, size_bytes, database_id=database_id)
