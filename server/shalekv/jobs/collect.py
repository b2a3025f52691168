"""One collection: list, judge, publish, delete, in this order (rule F3).

Each step may be the last one of this process: nothing is deleted that the manifest still needs
which was published before, so whatever a crash leaves is a correct database, and the next
collection finds the rest of the garbage. Two collectors at once delete the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from shalekv.core.collectable import Folder, Listed
from shalekv.core.expiry import expire, has_expired, is_edit_needed
from shalekv.core.wal_retention import retained_from
from shalekv.engine.collection.deleting import Deleter
from shalekv.engine.collection.fences import Fences
from shalekv.engine.collection.listing import as_listed, is_ours, list_objects
from shalekv.engine.collection.origins import release_origins
from shalekv.engine.collection.plan import Judged, Plan, Report
from shalekv.engine.editing import edit_deadline
from shalekv.format.names import parse_election_name
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.retention import Cutoffs, Pins, Retention, first_kept_wal_id
from shalekv.settings import CollectorSettings
from shalekv.store.active_manifests import ActiveManifests, unless_overtaken
from shalekv.store.api import IsCollected, ObjectInfo
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.requests import RequestCounts


@dataclass(frozen=True, slots=True)
class _Look:
    """What a collection knows before it changes anything."""

    now_ms: int  # by the store's clock
    cutoffs: Cutoffs
    listing: Sequence[Listed]
    plan: Plan
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

    async def plan(self) -> Plan:
        """What `collect` would do now. Raises as it does, and changes nothing."""

        async def look(stored: StoredManifest) -> Plan:
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
        plan = Plan(
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
