"""The collection of garbage: list, publish, judge, delete, in this order (rule F3).

1. List all objects.
2. Publish a manifest without the snapshots and leases that have expired, and with a raised
   `gc_cutoff_ms`. This edit is left out if the current manifest allows the same deletions already
   (`is_edit_needed`).
3. Judge the listed objects by that manifest (`protocol.retention`). An object is kept if the
   manifest, the manifest of a snapshot in it, or a lease in it needs it. Also kept are fences (F1),
   objects younger than the cutoff, and the compacted WAL that is retained for watches.
4. Delete the others.

No other process deletes objects of these three kinds (manifests, WAL objects, SSTs). A new SST is
protected until an edit of the manifest references it. That edit requires, in the manifest that it
edits, that a lease covers the SST or that it is younger than the cutoff. The SSTs of a large batch
are in the manifest, as a pending load, before they are written.

A crash after any step leaves a correct database: nothing is deleted that the published manifest
needs, and the next collection finds the rest of the garbage. Two collectors that run at once delete
the same objects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice

import structlog

from shalekv.concurrency import in_parallel
from shalekv.errors import CorruptObject, ObjectNotFound, ShaleError
from shalekv.format import names
from shalekv.format.footer import MIN_FOOTER_BYTES, read_footer
from shalekv.format.index import encode_index
from shalekv.format.names import parse_election_name
from shalekv.protocol.manifest import CasMode, Manifest
from shalekv.protocol.origins import drop_pins, unneeded_pins
from shalekv.protocol.retention import (
    Cutoffs,
    Folder,
    Listed,
    LiveObjects,
    Reason,
    Retention,
    RetentionVerdict,
    expire,
    first_kept_wal_id,
    is_edit_needed,
    is_expiry_published,
    retained_from,
)
from shalekv.read.origins import origin_pins
from shalekv.settings import CollectorSettings
from shalekv.store.active_manifests import ActiveManifests, retry_if_manifest_changed
from shalekv.store.api import IsCollected, ObjectInfo, RequestCounts
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest, edit_deadline

DELETES_PER_S_COUNT = 1_000  # a third of what a prefix of S3 takes: others use it as well
BATCH_MAX = 1_000  # the most that object stores delete with one request
# An index without blocks, and a footer without keys: an object with any entry is larger.
FENCE_BYTES = len(encode_index(())) + MIN_FOOTER_BYTES
READS_MAX = 16
_FOLDERS = {
    names.MANIFEST_FOLDER: Folder.MANIFEST,
    names.WAL_FOLDER: Folder.WAL,
    names.LEVELS_FOLDER: Folder.LEVELS,
    names.ACCESS_FOLDER: Folder.ACCESS,
}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class JudgedObject:
    """A listed object, and whether it may be deleted."""

    listed: Listed
    verdict: RetentionVerdict


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """The listed objects with their verdicts, in the order of deletion."""

    manifest: Manifest  # the one that the verdicts are based on
    is_edit_needed: bool  # it has to be published first
    dropped_snapshots: int  # by that edit, since they have expired
    dropped_leases: int
    objects: Sequence[JudgedObject]

    @property
    def garbage(self) -> Iterable[Listed]:
        """The objects to delete."""
        return (each.listed for each in self.objects if each.verdict.may_delete)


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of objects and their total size."""

    objects: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CollectReport:
    """The outcome of a collection, done or planned."""

    manifest_id: int  # of the manifest that the verdicts are based on
    is_edited: bool  # whether the collector has published it
    dropped_snapshots: int
    dropped_leases: int
    deleted: Mapping[Folder, Amount]  # only folders in which objects are deleted
    kept: Mapping[tuple[Folder, Reason], Amount]

    @classmethod
    def of(cls, plan: CollectionPlan) -> CollectReport:
        """Return the report of a plan, as if all its garbage is deleted."""
        deleted: dict[Folder, list[int]] = {}  # sizes
        kept: dict[tuple[Folder, Reason], list[int]] = {}
        for judged in plan.objects:
            listed, verdict = judged.listed, judged.verdict
            if verdict.may_delete:
                deleted.setdefault(listed.folder, []).append(listed.size_bytes)
            else:
                kept.setdefault((listed.folder, verdict.reason), []).append(listed.size_bytes)
        return cls(
            manifest_id=plan.manifest.manifest_id,
            is_edited=plan.is_edit_needed,
            dropped_snapshots=plan.dropped_snapshots,
            dropped_leases=plan.dropped_leases,
            deleted={folder: Amount(len(sizes), sum(sizes)) for folder, sizes in deleted.items()},
            kept={why: Amount(len(sizes), sum(sizes)) for why, sizes in kept.items()},
        )

    @property
    def deleted_objects(self) -> int:
        """The number of deleted objects in all folders."""
        return sum(amount.objects for amount in self.deleted.values())

    @property
    def deleted_bytes(self) -> int:
        """The size of the deleted objects in all folders."""
        return sum(amount.size_bytes for amount in self.deleted.values())

    @property
    def kept_objects(self) -> Mapping[str, int]:
        """The number of objects that each reason keeps, in all folders."""
        found: dict[str, int] = {}
        for (_, reason), amount in self.kept.items():
            found[reason.value] = found.get(reason.value, 0) + amount.objects
        return found


async def list_objects(store: CasStore) -> list[Listed]:
    """List every object, in the order in which garbage is deleted: by folder, then by name.

    Access policies are never deleted: there is garbage beside them only where creates take two
    phases.
    """
    folders = [*_FOLDERS]
    if store.cas_mode is CasMode.NATIVE:
        folders.remove(names.ACCESS_FOLDER)
    return [as_listed(info) for prefix in folders async for info in store.list(prefix)]


def is_own_name(name: str) -> bool:
    """Return whether this is the name of a manifest, a WAL object or an SST."""
    parsers = (names.parse_manifest_name, names.parse_wal_name, names.parse_level_name)
    return any(parse(name) is not None for parse in parsers)


def as_listed(info: ObjectInfo) -> Listed:
    """Convert an object in one of these folders to the form that the rules judge."""
    name = info.name
    folder = _FOLDERS[f"{name.partition('/')[0]}/"]
    number: int | None = None
    sst_id: bytes | None = None
    if folder is Folder.MANIFEST:
        number = names.parse_manifest_name(name)
    elif folder is Folder.WAL:
        number = names.parse_wal_name(name)
    elif folder is Folder.ACCESS:
        number = names.parse_policy_name(name)
    else:
        sst_id = names.parse_level_name(name)
    return Listed(folder, name, info.size_bytes, info.modified_ms, number, sst_id)


class Fences:
    """Finds the fences in the WAL of one database, which are never collected (rule F1).

    The size in the listing tells which objects can be fences; the footer of each is read once.
    """

    def __init__(self, store: CasStore) -> None:
        """Know no fence yet."""
        self._store = store
        self._known: dict[Listed, bool] = {}

    async def among(self, listed: Iterable[Listed]) -> frozenset[str]:
        """Return the names of the fences among these WAL objects.

        An object that cannot be read counts as a fence: it may be one, and it is small.
        """
        candidates = [each for each in listed if each.size_bytes <= FENCE_BYTES]
        self._known = {each: self._known[each] for each in candidates if each in self._known}
        unread = [each for each in candidates if each not in self._known]

        async def read() -> None:
            while unread:
                each = unread.pop()
                self._known[each] = await self._is_fence(each)

        await in_parallel(read, min(READS_MAX, len(unread)))
        return frozenset(each.name for each in candidates if self._known[each])

    async def _is_fence(self, listed: Listed) -> bool:
        name, size_bytes = listed.name, listed.size_bytes
        try:
            data = await self._store.get_range(name, 0, size_bytes)
            footer = read_footer(name, data, size_bytes, database_id=None)
        except (CorruptObject, ObjectNotFound):
            return True
        return footer.contents.entry_count == 0


class Deleter:
    """Deletes objects of one database in batches, at a bounded rate across all calls."""

    def __init__(self, store: CasStore, *, per_s_count: int) -> None:
        """Delete at most `per_s_count` objects a second."""
        self._store = store
        self._clock = store.runtime.clock
        self._per_s_count = per_s_count
        self._free_at_ms = self._clock.monotonic_ms()

    async def delete(
        self, names: Iterable[str], *, check: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Delete these objects in their order, batch by batch.

        `check` is awaited before each batch but the first, and ends it by an error.
        """
        remaining = iter(names)
        size = min(BATCH_MAX, self._per_s_count)
        for number, batch in enumerate(iter(lambda: [*islice(remaining, size)], [])):
            wait_ms = self._free_at_ms - self._clock.monotonic_ms()
            if wait_ms > 0:
                await self._clock.sleep_ms(wait_ms)
            if number and check is not None:
                await check()
            began_ms = self._clock.monotonic_ms()
            await self._store.delete(batch)
            self._free_at_ms = began_ms + 1_000 * len(batch) / self._per_s_count


async def release_origins(
    store: CasStore, stored: StoredManifest, manifest: Manifest, live: Iterable[LiveObjects]
) -> None:
    """Remove the snapshots in the origins of a clone that no active manifest needs any more.

    An origin is a database whose SSTs the clone reads; a snapshot there keeps them. `live` are the
    objects of all active manifests of the clone. The snapshot is removed first, and the entry in
    the manifest of the clone that names it last, so that a crash leads to another attempt. What
    cannot be removed now is left to the next collection. Raises what an edit of the clone's
    manifest raises.
    """
    readable = {each.manifest_id for each in manifest.snapshots if not each.ssts_only}
    readable.add(manifest.manifest_id)
    needed = {pin for each in live if each.manifest_id in readable for pin in each.origin_pins}
    spent = unneeded_pins(manifest, needed)
    if not spent:
        return
    released = set()
    async with origin_pins(store, manifest) as pins:
        for snapshot_id, url in sorted(spent.items()):
            bound_log = log.bind(origin=url, snapshot_id=snapshot_id.hex())
            try:
                await pins.release(url, snapshot_id)
            except ShaleError as error:  # even damage there must not stop this collection
                bound_log.warning("snapshot of an origin not removed", problem=str(error))
                continue
            bound_log.info("snapshot of an origin removed")
            released.add(snapshot_id)
    if released:
        async with edit_deadline(store):
            await stored.edit(
                lambda current: drop_pins(current, released),
                lambda current: not any(o.snapshot_id in released for o in current.origins),
            )


@dataclass(frozen=True, slots=True)
class _Survey:
    """The state of the database that a collection has found, before it changes anything."""

    now_ms: int  # by the store's clock
    cutoffs: Cutoffs
    listing: Sequence[Listed]
    plan: CollectionPlan
    retained: int | None  # the first WAL object that is retained; None: there is no retention


class CollectJob:
    """Collects the garbage of one database, as often as `collect` is called.

    Fences and the manifests of snapshots, which never change, are read once for all runs.
    """

    def __init__(self, store: CasStore, settings: CollectorSettings) -> None:
        """Read nothing yet."""
        self._store = store
        self._settings = settings
        self._active = ActiveManifests(store)
        self._fences = Fences(store)
        self._deleter = Deleter(store, per_s_count=DELETES_PER_S_COUNT)

    @property
    def url(self) -> str:
        """The URL of the database, without credentials."""
        return self._store.url

    @property
    def sent(self) -> RequestCounts:
        """The requests sent to its store so far."""
        return self._store.sent

    async def plan(self) -> CollectionPlan:
        """Return what `collect` would do now; change nothing. Raises as `collect`."""

        async def survey(stored: StoredManifest) -> CollectionPlan:
            return (await self._survey(stored)).plan

        return await retry_if_manifest_changed(self._store, survey)

    async def collect(self) -> CollectReport:
        """Delete the objects that nothing needs and that are old enough.

        Raises `DatabaseNotFound`; `CorruptObject` or `IllegalState` when an active manifest cannot
        be read, in which case nothing was deleted; `ManifestConflict`; `StoreError`.
        """
        return await retry_if_manifest_changed(self._store, self._collect)

    async def _collect(self, stored: StoredManifest) -> CollectReport:
        # Complete interrupted creates before the listing, so that their parts are not garbage.
        await self._store.repair()
        survey = await self._survey(stored)
        plan = survey.plan
        stored.check_cas_mode(plan.manifest)
        if plan.is_edit_needed:
            published = await self._publish(stored, survey)
            judged = await self._judge(published, survey.listing, survey.cutoffs)
            plan = replace(plan, manifest=published, objects=judged)
        # Once the database is dropped, the names may be those of another database at this URL.
        await self._deleter.delete((each.name for each in plan.garbage), check=stored.refresh)
        await self._store.repair(await self._is_collected(plan.manifest, survey))
        if plan.manifest.origins:
            live = await self._active.live_objects(plan.manifest, survey.listing)
            await release_origins(self._store, stored, plan.manifest, live)
        return CollectReport.of(plan)

    async def _survey(self, stored: StoredManifest) -> _Survey:
        now_ms = await self._store.now_ms()
        cutoffs = Cutoffs.at(
            now_ms,
            collect_age_s=self._settings.collect_age_s,
            foreign_file_age_s=self._settings.foreign_file_age_s,
            wal_retention_s=self._settings.wal_retention_s,
            wal_retention_bytes=self._settings.wal_retention_bytes,
        )
        listing = await list_objects(self._store)
        current = await stored.refresh()
        retained = await self._retained(current, listing, cutoffs)
        expired = expire(current, now_ms / 1_000, cutoffs.cutoff_ms, retained=retained)
        judged = await self._judge(expired, listing, cutoffs)
        garbage = (each.listed for each in judged if each.verdict.may_delete)
        is_needed = is_edit_needed(current, expired, garbage)
        judging = replace(expired, manifest_id=current.manifest_id + 1) if is_needed else current
        plan = CollectionPlan(
            manifest=judging,
            is_edit_needed=is_needed,
            dropped_snapshots=len(current.snapshots) - len(expired.snapshots),
            dropped_leases=_dropped_leases(current, expired),
            objects=await self._judge(judging, listing, cutoffs),
        )
        return _Survey(now_ms, cutoffs, listing, plan, retained)

    async def _publish(self, stored: StoredManifest, survey: _Survey) -> Manifest:
        now_s, cutoff_ms, retained = (
            survey.now_ms / 1_000,
            survey.cutoffs.cutoff_ms,
            survey.retained,
        )
        async with edit_deadline(self._store):
            return await stored.edit(
                partial(expire, now_s=now_s, cutoff_ms=cutoff_ms, retained=retained),
                partial(is_expiry_published, now_s=now_s, cutoff_ms=cutoff_ms, retained=retained),
            )

    async def _retained(
        self, manifest: Manifest, listing: Sequence[Listed], cutoffs: Cutoffs
    ) -> int | None:
        if cutoffs.wal is None:
            return None
        run = self._store.runtime.workers.run
        return await run(retained_from, manifest, listing, cutoffs.wal)

    async def _is_collected(self, manifest: Manifest, survey: _Survey) -> IsCollected:
        """Return a function that tells whether a missing object may have been collected.

        `ObjectStore.repair` then removes the records of its creation, and does not complete that.
        """
        live = await self._active.live_objects(manifest, survey.listing)
        retention = cache(lambda: Retention(manifest, live, survey.cutoffs))  # few stores call this

        def is_collected(name: str) -> bool:
            # The holder of an election deletes its object, and reads it before creating it again.
            if parse_election_name(name) is not None:
                return True
            gone = ObjectInfo(name, size_bytes=0, modified_ms=0)
            return is_own_name(name) and retention().judge(as_listed(gone)).may_delete

        return is_collected

    async def _judge(
        self, manifest: Manifest, listing: Sequence[Listed], cutoffs: Cutoffs
    ) -> Sequence[JudgedObject]:
        """Judge each object by `manifest`. REQUIRES: the manifest is newer than the listing."""
        live = await self._active.live_objects(manifest, listing)
        first_kept = first_kept_wal_id(manifest, live)
        fences = await self._fences.among(
            each
            for each in listing
            if each.folder is Folder.WAL and each.number is not None and each.number < first_kept
        )
        retained = await self._retained(manifest, listing, cutoffs)
        run = self._store.runtime.workers.run
        return await run(_judged, manifest, live, cutoffs, fences, retained, listing)


def _judged(
    manifest: Manifest,
    live: Sequence[LiveObjects],
    cutoffs: Cutoffs,
    fences: frozenset[str],
    retained: int | None,
    listing: Sequence[Listed],
) -> Sequence[JudgedObject]:
    retention = Retention(manifest, live, cutoffs, fences=fences, retained=retained)
    return [JudgedObject(each, retention.judge(each)) for each in listing]


def _dropped_leases(current: Manifest, expired: Manifest) -> int:
    """Return the number of leases that were removed; the retention may have added its own."""
    kept = {lease.id for lease in expired.leases}
    return sum(lease.id not in kept for lease in current.leases)
