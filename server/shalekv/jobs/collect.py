"""One collection: list, judge, publish, delete, in this order (rule F3).

Each step may be the last one of this process: nothing is deleted that the manifest still needs
which was published before, so whatever a crash leaves is a correct database, and the next
collection finds the rest of the garbage. Two collectors at once delete the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice

import structlog

from shalekv.clock import Clock
from shalekv.concurrency import in_parallel
from shalekv.errors import CorruptObject, ObjectNotFound, ShaleError
from shalekv.format import names
from shalekv.format.footer import MIN_FOOTER_BYTES, read_footer
from shalekv.format.index import encode_index
from shalekv.format.names import parse_election_name
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.origins import drop_pins, spent_pins
from shalekv.protocol.retention import (
    Cutoffs,
    Folder,
    Listed,
    Pins,
    Reason,
    Retention,
    RetentionVerdict,
    expire,
    first_kept_wal_id,
    has_expired,
    is_edit_needed,
    retained_from,
)
from shalekv.read.origins import origin_pins
from shalekv.settings import CollectorSettings
from shalekv.store.active_manifests import ActiveManifests, unless_overtaken
from shalekv.store.api import IsCollected, ObjectInfo, ObjectStore, RequestCounts
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest, edit_deadline

# --- plan
# What a collection is going to do, and what it has done.


@dataclass(frozen=True, slots=True)
class Judged:
    """One object, and what becomes of it."""

    listed: Listed
    verdict: RetentionVerdict


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """All objects that were listed, and what becomes of each, in the order of deletion."""

    manifest: Manifest  # the one that judges
    is_edit_needed: bool  # the collector has to publish it first
    dropped_snapshots: int  # by that edit: they have expired
    dropped_leases: int
    objects: Sequence[Judged]

    @property
    def doomed(self) -> Iterable[Listed]:
        """What goes."""
        return (each.listed for each in self.objects if each.verdict.goes)


@dataclass(frozen=True, slots=True)
class Amount:
    """How much there is of something."""

    objects: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a collection has done, or would do."""

    manifest_id: int  # of the manifest that judged
    is_edited: bool  # whether the collector has made it
    dropped_snapshots: int
    dropped_leases: int
    deleted: Mapping[Folder, Amount]  # a folder in which nothing is deleted is not there
    kept: Mapping[tuple[Folder, Reason], Amount]

    @classmethod
    def on(cls, plan: CollectionPlan) -> Report:
        """The report when all is done that `plan` says."""
        deleted: dict[Folder, list[int]] = {}  # sizes
        kept: dict[tuple[Folder, Reason], list[int]] = {}
        for judged in plan.objects:
            listed, verdict = judged.listed, judged.verdict
            if verdict.goes:
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
        """In all folders."""
        return sum(amount.objects for amount in self.deleted.values())

    @property
    def deleted_bytes(self) -> int:
        """In all folders."""
        return sum(amount.size_bytes for amount in self.deleted.values())

    @property
    def kept_objects(self) -> Mapping[str, int]:
        """How many objects each reason keeps, in all folders."""
        found: dict[str, int] = {}
        for (_, reason), amount in self.kept.items():
            found[reason.value] = found.get(reason.value, 0) + amount.objects
        return found


# --- listing
# Lists all objects of a database, as the rules of retention judge them.


_FOLDERS = {
    names.MANIFEST_FOLDER: Folder.MANIFEST,
    names.WAL_FOLDER: Folder.WAL,
    names.LEVELS_FOLDER: Folder.LEVELS,
}


async def list_objects(store: CasStore) -> list[Listed]:
    """Every object, in the order in which garbage is deleted: by folder, then by name."""
    return [as_listed(info) for prefix in _FOLDERS async for info in store.reads.list(prefix)]


def is_ours(name: str) -> bool:
    """Whether this is a name that we give."""
    parsers = (names.parse_manifest_name, names.parse_wal_name, names.parse_level_name)
    return any(parse(name) is not None for parse in parsers)


def as_listed(info: ObjectInfo) -> Listed:
    """An object below one of the three folders, as the rules judge it."""
    name = info.name
    folder = _FOLDERS[f"{name.partition('/')[0]}/"]
    number: int | None = None
    sst_id: bytes | None = None
    if folder is Folder.MANIFEST:
        number = names.parse_manifest_name(name)
    elif folder is Folder.WAL:
        number = names.parse_wal_name(name)
    else:
        sst_id = names.parse_level_name(name)
    return Listed(folder, name, info.size_bytes, info.modified_ms, number, sst_id)


# --- fences
# Finds the fences in the WAL, which are never collected (rule F1), without reading the rest.
#
# The size in the listing tells which objects can be fences; the footer of each is read once.


# An index of no blocks, and a footer without keys: whatever has an entry is larger.
FENCE_BYTES = len(encode_index(())) + MIN_FOOTER_BYTES
READS_MAX = 16


class Fences:
    """Knows which WAL objects of one database are fences."""

    def __init__(self, store: CasStore) -> None:
        """Nothing is known yet."""
        self._store = store
        self._known: dict[Listed, bool] = {}

    async def among(self, listed: Iterable[Listed]) -> frozenset[str]:
        """The names of those of these WAL objects that are fences.

        What cannot be read counts as one: it may be, and it is small.
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
            data = await self._store.reads.get_range(name, 0, size_bytes)
            footer = read_footer(name, data, size_bytes, database_id=None)
        except (CorruptObject, ObjectNotFound):
            return True
        return footer.contents.entry_count == 0


# --- deleting
# Deletes many objects in batches, no faster than is allowed.


BATCH_MAX = 1_000  # as many as object stores delete at once


class Deleter:
    """Deletes objects of one database. What was deleted lately counts for the next call, too."""

    def __init__(self, store: ObjectStore, clock: Clock, *, per_s_count: int) -> None:
        """At most `per_s_count` objects a second."""
        self._store = store
        self._clock = clock
        self._per_s_count = per_s_count
        self._free_at_ms = clock.monotonic_ms()

    async def delete(self, names: Iterable[str]) -> None:
        """Delete these objects in their order, batch by batch."""
        remaining = iter(names)
        while batch := [*islice(remaining, min(BATCH_MAX, self._per_s_count))]:
            wait_ms = self._free_at_ms - self._clock.monotonic_ms()
            if wait_ms > 0:
                await self._clock.sleep_ms(wait_ms)
            began_ms = self._clock.monotonic_ms()
            await self._store.delete(batch)
            self._free_at_ms = began_ms + 1_000 * len(batch) / self._per_s_count


# --- origins
# Lets go of what other databases keep for this one, a clone, when it reads none of it any more.
#
# The pin there goes first, and the origin that tells of it last: after a crash it is tried again.


log = structlog.get_logger()


async def release_origins(
    store: CasStore, stored: StoredManifest, manifest: Manifest, pins: Iterable[Pins]
) -> None:
    """Remove the pins that no active manifest needs; `pins` are those of all of them.

    What cannot be removed now is left to the next collection. Raises what an edit of the own
    manifest does.
    """
    readable = {each.manifest_id for each in manifest.snapshots if not each.ssts_only}
    readable.add(manifest.manifest_id)
    needed = {pin for each in pins if each.manifest_id in readable for pin in each.origin_pins}
    spent = spent_pins(manifest, needed)
    if not spent:
        return
    released = set()
    async with origin_pins(store, manifest) as held:
        for snapshot_id, url in sorted(spent.items()):
            told = log.bind(origin=url, snapshot_id=snapshot_id.hex())
            try:
                await held.release(url, snapshot_id)
            except ShaleError as error:  # also of damage there: it is no business of this database
                told.warning("snapshot of an origin not removed", problem=str(error))
                continue
            told.info("snapshot of an origin removed")
            released.add(snapshot_id)
    if released:
        async with edit_deadline(store):
            await stored.edit(
                lambda current: drop_pins(current, released),
                lambda current: not any(o.snapshot_id in released for o in current.origins),
            )


# --- collect


@dataclass(frozen=True, slots=True)
class _Look:
    """What a collection knows before it changes anything."""

    now_ms: int  # by the store's clock
    cutoffs: Cutoffs
    listing: Sequence[Listed]
    plan: CollectionPlan
    retained: int | None  # the first WAL object that is retained; None: there is no retention


class Collecting:
    """Collects one database, again and again; what never changes is read once."""

    def __init__(self, store: CasStore, settings: CollectorSettings) -> None:
        """Nothing is read yet."""
        self._store = store
        self._settings = settings
        self._active = ActiveManifests(store)
        self._fences = Fences(store)
        self._deleter = Deleter(
            store.reads, store.runtime.clock, per_s_count=settings.deletes_per_s_count
        )

    @property
    def url(self) -> str:
        """Of the database, without credentials."""
        return self._store.url

    @property
    def sent(self) -> RequestCounts:
        """What was sent to its store so far."""
        return self._store.sent

    async def plan(self) -> CollectionPlan:
        """What `collect` would do now. Raises as it does, and changes nothing."""

        async def look(stored: StoredManifest) -> CollectionPlan:
            return (await self._look(stored)).plan

        return await unless_overtaken(self._store, look)

    async def collect(self) -> Report:
        """Delete what nothing needs and what is old enough.

        Raises `DatabaseNotFound`; `CorruptObject` or `IllegalState` when an active manifest cannot
        be read, and then nothing was deleted; `ManifestConflict`; `StoreError`.
        """
        return await unless_overtaken(self._store, self._collect)

    async def _collect(self, stored: StoredManifest) -> Report:
        # What a create has half done is whole before the listing: its parts are no garbage then.
        await self._store.recover()
        look = await self._look(stored)
        plan = look.plan
        stored.check_cas_mode(plan.manifest)
        if plan.is_edit_needed:
            published = await self._publish(stored, look)
            judged = await self._judge(published, look.listing, look.cutoffs)
            plan = replace(plan, manifest=published, objects=judged)
        await self._deleter.delete(each.name for each in plan.doomed)
        await self._store.recover(await self._is_collected(plan.manifest, look))
        if plan.manifest.origins:
            pins = await self._active.pins(plan.manifest, look.listing)
            await release_origins(self._store, stored, plan.manifest, pins)
        return Report.on(plan)

    async def _look(self, stored: StoredManifest) -> _Look:
        now_ms = await self._store.reads.now_ms()
        cutoffs = Cutoffs.at(
            now_ms,
            collect_age_s=self._settings.collect_age_s,
            foreign_age_s=self._settings.foreign_age_s,
            wal_retention_s=self._settings.wal_retention_s,
            wal_retention_bytes=self._settings.wal_retention_bytes,
        )
        listing = await list_objects(self._store)
        current = await stored.refresh()
        retained = await self._retained(current, listing, cutoffs)
        expired = expire(current, now_ms / 1_000, cutoffs.cutoff_ms, retained=retained)
        judged = await self._judge(expired, listing, cutoffs)
        doomed = (each.listed for each in judged if each.verdict.goes)
        is_needed = is_edit_needed(current, expired, doomed)
        judge = replace(expired, manifest_id=current.manifest_id + 1) if is_needed else current
        plan = CollectionPlan(
            manifest=judge,
            is_edit_needed=is_needed,
            dropped_snapshots=len(current.snapshots) - len(expired.snapshots),
            dropped_leases=_dropped_leases(current, expired),
            objects=await self._judge(judge, listing, cutoffs),
        )
        return _Look(now_ms, cutoffs, listing, plan, retained)

    async def _publish(self, stored: StoredManifest, look: _Look) -> Manifest:
        now_s, cutoff_ms, retained = look.now_ms / 1_000, look.cutoffs.cutoff_ms, look.retained
        async with edit_deadline(self._store):
            return await stored.edit(
                partial(expire, now_s=now_s, cutoff_ms=cutoff_ms, retained=retained),
                partial(has_expired, now_s=now_s, cutoff_ms=cutoff_ms, retained=retained),
            )

    async def _retained(
        self, manifest: Manifest, listing: Sequence[Listed], cutoffs: Cutoffs
    ) -> int | None:
        if cutoffs.wal is None:
            return None
        run = self._store.runtime.workers.run
        return await run(retained_from, manifest, listing, cutoffs.wal)

    async def _is_collected(self, manifest: Manifest, look: _Look) -> IsCollected:
        """Tells of the name of an object that is not there whether the rules let it go."""
        pins = await self._active.pins(manifest, look.listing)
        retention = cache(lambda: Retention(manifest, pins, look.cutoffs))  # few stores ask

        def is_collected(name: str) -> bool:
            if parse_election_name(name) is not None:
                return True  # its holder deletes it, and looks behind what it creates again
            gone = ObjectInfo(name, size_bytes=0, modified_ms=0)
            return is_ours(name) and retention().judge(as_listed(gone)).goes

        return is_collected

    async def _judge(
        self, manifest: Manifest, listing: Sequence[Listed], cutoffs: Cutoffs
    ) -> Sequence[Judged]:
        """What becomes of each object if `manifest` judges, which is newer than the listing."""
        pins = await self._active.pins(manifest, listing)
        first_kept = first_kept_wal_id(manifest, pins)
        fences = await self._fences.among(
            each
            for each in listing
            if each.folder is Folder.WAL and each.number is not None and each.number < first_kept
        )
        retained = await self._retained(manifest, listing, cutoffs)
        run = self._store.runtime.workers.run
        return await run(_judged, manifest, pins, cutoffs, fences, retained, listing)


def _judged(
    manifest: Manifest,
    pins: Sequence[Pins],
    cutoffs: Cutoffs,
    fences: frozenset[str],
    retained: int | None,
    listing: Sequence[Listed],
) -> Sequence[Judged]:
    retention = Retention(manifest, pins, cutoffs, fences=fences, retained=retained)
    return [Judged(each, retention.judge(each)) for each in listing]


def _dropped_leases(current: Manifest, expired: Manifest) -> int:
    """How many leases are gone; that of the retention may have come."""
    kept = {lease.id for lease in expired.leases}
    return sum(lease.id not in kept for lease in current.leases)
