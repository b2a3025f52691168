"""Named snapshots: created, renewed, shared and removed by edits of the manifest.

An edit that finds its snapshot gone fails: what it protected may be deleted (rule F3). All times
are by the store's clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shalekv.core.pins import Holdings, Pinned, pinned_by_snapshots
from shalekv.engine.editing import EDIT_TIMEOUT_MS, edit_deadline
from shalekv.engine.wal import list_wal
from shalekv.errors import (
    InvalidRequest,
    ManifestVersionExists,
    Overloaded,
    SnapshotNotFound,
)
from shalekv.format import names
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.protocol.origins import is_pin
from shalekv.protocol.snapshot import (
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
from shalekv.store.active_manifests import read_pinned, unless_overtaken
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.logical_time import NEAR_MS

ID_BYTES = 16
NAME_CHARS_MAX = 128
# What stands behind a gap in the WAL may be acknowledged: its writer is about to fill it. Of one
# that has crashed only the next writer fills it, so there is an end to waiting.
GAP_WAIT_MS, GAP_LOOK_MS = 3_000, 20
TOO_MANY_RETRY_MS = 1_000

_ID = re.compile(r"[0-9a-fA-F]{32}")


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """A snapshot, the manifest that it reads, and what it keeps; None: it has expired."""

    snapshot: Snapshot
    manifest: Manifest | None
    pinned: Pinned | None


class _MovedOn(Exception):
    """The manifest is not the one any more that was current when the WAL was listed."""


class Snapshots:
    """The snapshots of one database, for whoever may edit its manifest."""

    def __init__(self, store: CasStore, stored: StoredManifest | None = None) -> None:
        """`stored` is the manifest, if it is followed here already."""
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
        """A snapshot of the current state, the last contiguous WAL object included.

        What is acknowledged before the call is in it, if `gap_wait_ms` are enough for a writer to
        fill a gap before it. `ttl_ms` None: it never expires. `logical_ms` is the logical time of
        the server that asks, 0 if none does: values that had expired by then are not in the
        snapshot. It counts as no more than `NEAR_MS` behind the store's clock.

        Raises `SnapshotExists` when another has the name, `InvalidRequest` when it cannot be one,
        `Overloaded` when `count_max` are there, and as `StoredManifest.edit` does.
        """
        check_snapshot_name(name)
        snapshot_id = self._new_id()
        now_ms = await self._store.reads.now_ms()
        landed = partial(has_snapshot, snapshot_id=snapshot_id)
        conflicts = 0
        async with edit_deadline(self._store, timeout_ms):
            while True:
                # The WAL is listed after the manifest was read, and again after a conflict: else
                # what was seen might have been compacted and collected (seed 000, "Readers").
                current = await self._stored.refresh()
                last_seen = await self._last_wanted(current, gap_wait_ms)
                edit = partial(
                    _create,
                    seen=current,
                    last_seen=last_seen,
                    snapshot_id=snapshot_id,
                    expire_time_s=_expire_time_s(now_ms, ttl_ms),
                    name=name,
                    created_ms=max(now_ms - NEAR_MS, logical_ms) if logical_ms else now_ms,
                    count_max=count_max,
                )
                try:
                    return _found(await self._stored.edit(edit, landed, retry=False), snapshot_id)
                except (ManifestVersionExists, _MovedOn):
                    conflicts += 1
                    await self._store.pause(conflicts)

    async def share(self, shared: str, *, name: str = "", ttl_ms: int | None) -> Snapshot:
        """A second snapshot of what the snapshot called `shared` shows.

        Raises as `create`, and `SnapshotNotFound`.
        """
        check_snapshot_name(name)
        snapshot_id = self._new_id()
        now_s = await self._store.reads.now_ms() / 1_000

        async def look(stored: StoredManifest) -> tuple[Snapshot, int]:
            current = await stored.refresh()
            found = _called(current, shared)
            if is_expired(found, now_s):
                raise not_found(found.id, current)
            return found, (await read_pinned(self._store, current, found.manifest_id))[1]

        found, checksum = await unless_overtaken(self._store, look)
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

    async def renew(self, called: str, *, ttl_ms: int | None) -> Snapshot:
        """The snapshot with this id or name, living on.

        Raises `SnapshotNotFound`, and `InvalidRequest` for one that keeps a clone alive if that
        would expire some time.
        """
        found = await self.find(called)
        if ttl_ms is not None:
            _check_no_pin(found)
        snapshot_id = found.id
        now_s = await self._store.reads.now_ms() / 1_000
        expire_time_s = await self._expire_time_s(ttl_ms)
        edit = partial(
            renew_snapshot, snapshot_id=snapshot_id, expire_time_s=expire_time_s, now_s=now_s
        )

        def landed(manifest: Manifest) -> bool:
            found = find_snapshot(manifest, snapshot_id)
            return found is not None and found.snapshot_expire_time_s == expire_time_s

        return await self._edit(edit, landed, snapshot_id)

    async def delete(self, called: str, *, is_forced: bool = False) -> Snapshot:
        """Remove the snapshot with this id or name; what it was. Raises `SnapshotNotFound`.

        One that keeps a clone alive has to be forced; else it raises `InvalidRequest`.
        """
        found = await self.find(called)
        if not is_forced:
            _check_no_pin(found)

        def edit(manifest: Manifest) -> Manifest:
            return remove_snapshots(manifest, {found.id})

        async with edit_deadline(self._store):
            await self._stored.edit(edit, lambda manifest: not has_snapshot(manifest, found.id))
        return found

    async def find(self, called: str) -> Snapshot:
        """The snapshot with this name or else id, expired or not; raises `SnapshotNotFound`."""
        return _called(await self._stored.refresh(), called)

    async def list(self) -> Sequence[SnapshotView]:
        """All snapshots, in the order of their creation.

        Raises `CorruptObject` and `IllegalState` when the manifest of one cannot be read.
        """
        return await unless_overtaken(self._store, self._list)

    async def _list(self, stored: StoredManifest) -> Sequence[SnapshotView]:
        now_s = await self._store.reads.now_ms() / 1_000
        current = await stored.refresh()
        manifests = {current.manifest_id: current}
        for snapshot in current.snapshots:
            manifest_id = snapshot.manifest_id
            if manifest_id not in manifests and not is_expired(snapshot, now_s):
                manifests[manifest_id], _ = await read_pinned(self._store, current, manifest_id)
        wal_bytes = {
            wal_id: info.size_bytes
            async for info in self._store.reads.list(names.WAL_FOLDER)
            if (wal_id := names.parse_wal_name(info.name)) is not None
        }
        known = {manifest_id: Holdings.of(each) for manifest_id, each in manifests.items()}
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
        return await self._last_wanted(current, 0)

    async def _last_wanted(self, current: Manifest, gap_wait_ms: int) -> int | None:
        """The same, when all is before the gap that stood behind it at first, or time is over."""
        clock = self._store.runtime.clock
        end_ms = clock.monotonic_ms() + gap_wait_ms
        folder = await list_wal(self._store, current.first_uncompacted_wal_id)
        wanted = max(folder.filled, default=-1)
        while folder.first_gap <= wanted and clock.monotonic_ms() < end_ms:
            await clock.sleep_ms(GAP_LOOK_MS)
            if (await self._stored.refresh()).manifest_id != current.manifest_id:
                break  # the edit will find that out, too
            folder = await list_wal(self._store, current.first_uncompacted_wal_id)
        last = folder.first_gap - 1
        if current.wal_id_last_seen is not None:
            last = max(last, current.wal_id_last_seen)
        return None if last < 0 else last

    async def _expire_time_s(self, ttl_ms: int | None) -> int:
        return _expire_time_s(await self._store.reads.now_ms(), ttl_ms)

    def _new_id(self) -> bytes:
        return self._store.runtime.random.randbytes(ID_BYTES)


def check_snapshot_name(name: str) -> None:
    """Raise `InvalidRequest` unless `name` is empty, or can be told from an id and be printed."""
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
            "clone is lost. The clone's collector removes it when it needs none of them any more. "
            "If there is no such database any more, `shalekv snapshot delete --force` removes it",
        )


def _called(manifest: Manifest, called: str) -> Snapshot:
    for snapshot in manifest.snapshots:
        if called and snapshot.name == called:
            return snapshot
    plain = called.replace("-", "")
    found = find_snapshot(manifest, bytes.fromhex(plain)) if _ID.fullmatch(plain) else None
    if found is None:
        raise SnapshotNotFound(
            f"there is no snapshot called {called!r} in manifest {manifest.manifest_id}: it has "
            "expired, was deleted, or never was"
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
    count_max: int | None,
) -> Manifest:
    if manifest.manifest_id != seen.manifest_id:
        raise _MovedOn
    if count_max is not None:
        _check_count(manifest, created_ms / 1_000, count_max)
    created = create_snapshot(
        manifest,
        snapshot_id,
        expire_time_s=expire_time_s,
        name=name,
        created_ms=max(created_ms, manifest.logical_time_ms),
    )
    return replace(created, wal_id_last_seen=last_seen)


def _check_count(manifest: Manifest, now_s: float, count_max: int) -> None:
    """Each snapshot makes every manifest larger, and keeps objects."""
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
