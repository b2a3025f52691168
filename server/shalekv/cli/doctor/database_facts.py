"""Reads a database from its store, for `shalekv.cli.doctor.database`. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shalekv.cli.doctor.database import (
    DATABASE,
    judge_debt,
    judge_garbage,
    judge_leases,
    judge_manifest,
    judge_records,
    judge_safekeepers,
    judge_snapshots,
    judge_wal,
    judge_writer,
)
from shalekv.cli.doctor.diagnosis import Diagnosis
from shalekv.cli.process.peers import open_links
from shalekv.errors import CorruptObject, DatabaseNotFound
from shalekv.format.election import decode_lease
from shalekv.format.names import ELECTION_FOLDER, parse_election_name
from shalekv.jobs.collect import Amount, CollectJob
from shalekv.jobs.fsck.objects import ActiveManifestSet, Scope, read_active
from shalekv.jobs.fsck.wal_and_ssts import list_sizes
from shalekv.protocol.compaction.policy import LevelTargets, debt_bytes
from shalekv.protocol.manifest import CasMode, Manifest, Version
from shalekv.protocol.membership import Configuration
from shalekv.protocol.retention import LiveObjects, pinned_by_snapshots
from shalekv.settings import AnyConfig
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.two_phase.store import TwoPhaseStore
from shalekv.write.quorum.membership import probe_members


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """Facts that several checks of a database judge."""

    manifest: Manifest
    active: ActiveManifestSet
    wal_bytes: Mapping[int, int]  # by id


class DatabaseExamination:
    """The checks of one database. Each method makes one check, and may be cancelled."""

    def __init__(
        self,
        plain: ObjectStore,
        store: CasStore,
        config: AnyConfig,
        *,
        where: str,
        may_ask_time: bool,
    ) -> None:
        """`store` is over `plain`; `where` has the flags that name the database.

        Without `may_ask_time` nothing asks for the time, since the store tells it by a write.
        """
        self._plain = plain
        self._store = store
        self._config = config
        self._where = where
        self._may_ask_time = may_ask_time
        self.facts: DatabaseFacts | None = None  # once `manifest` has found them

    async def manifest(self) -> list[Diagnosis]:
        """Read the manifest, and list the WAL."""
        fsck = f"shalekv fsck {self._where}"
        try:
            manifest = await StoredManifest(self._store).refresh()
            active = await read_active(self._store, may_ask_time=self._may_ask_time)
        except DatabaseNotFound:
            fix = f"shalekv serve --create {self._where}"
            return [DATABASE.warning("manifest", "there is no database at the URL", fix)]
        except CorruptObject as error:
            return [DATABASE.problem("manifest", str(error), fsck)]
        sizes = await list_sizes(Scope(self._store, parallel=1), 0)
        self.facts = DatabaseFacts(manifest, active, sizes)
        is_two_phase = self._store.cas_mode is CasMode.TWO_PHASE
        damage = [
            DATABASE.problem("manifest", f"{each.name}: {each.problem}", fsck)
            for each in active.findings
        ]
        return [
            *judge_manifest(manifest, is_two_phase=is_two_phase, where=self._where),
            *damage,
        ]

    async def writer(self, facts: DatabaseFacts) -> list[Diagnosis]:
        """Read who claims to be the writer."""
        names = [info.name async for info in self._store.list(ELECTION_FOLDER)]
        ids = [lease_id for name in names if (lease_id := parse_election_name(name)) is not None]
        elected = ""
        if ids:
            newest = max(ids)
            name = next(each for each in names if parse_election_name(each) == newest)
            lease = decode_lease(newest, (await self._store.get(name)).data)
            elected = "the election has an unreadable lease"
            if lease is not None:
                state = "has given up" if lease.is_released else "holds"
                elected = f"{lease.holder} {state} lease {newest} of the election"
        return [judge_writer(facts.manifest, elected)]

    async def work(self, facts: DatabaseFacts) -> list[Diagnosis]:
        """Judge the WAL, and the work that waits for the compactor."""
        manifest, settings = facts.manifest, self._config.compactor
        version = Version.of(manifest)
        first = manifest.first_uncompacted_wal_id
        debt = debt_bytes(
            version,
            LevelTargets.of(version, settings),
            wal_bytes=sum(size for wal_id, size in facts.wal_bytes.items() if wal_id >= first),
            is_l0_due=len(version.l0) >= settings.l0_trigger_count,
        )
        return [
            judge_wal(manifest, facts.wal_bytes, settings, where=self._where),
            judge_debt(manifest, debt, settings, where=self._where),
        ]

    async def pins(self, facts: DatabaseFacts) -> list[Diagnosis]:
        """Judge what snapshots and leases keep."""
        active = facts.active
        current = active.current or facts.manifest
        known = {number: LiveObjects.of(each) for number, each in active.manifests.items()}
        pinned = pinned_by_snapshots(current, known, now_s=active.now_s, wal_bytes=facts.wal_bytes)
        expired = len(current.snapshots) - len(pinned)
        now_s = active.now_s or current.logical_time_ms / 1_000  # a lower bound
        return [
            *judge_snapshots(pinned, expired, where=self._where),
            *judge_leases(current, facts.wal_bytes, now_s, where=self._where),
        ]

    async def garbage(self, _facts: DatabaseFacts) -> list[Diagnosis]:
        """Plan a collection, and judge what it would delete."""
        if not self._may_ask_time:
            reason = "left out by --read-only: the store's time is asked by a write"
            return [DATABASE.unchecked("garbage", reason)]
        plan = await CollectJob(self._store, self._config.collector).plan()
        garbage = [listed.size_bytes for listed in plan.garbage]
        total = [each.listed.size_bytes for each in plan.objects]
        return [
            judge_garbage(
                Amount(len(garbage), sum(garbage)),
                Amount(len(total), sum(total)),
                where=self._where,
            )
        ]

    async def safekeepers(self, facts: DatabaseFacts) -> list[Diagnosis]:
        """Ask the safekeepers, if there are any."""
        configuration = Configuration.of(facts.manifest)
        if not configuration.members:
            return []
        async with open_links(self._config.tls) as links:
            probes = await probe_members(links, facts.manifest.database_id, configuration.everyone)
        return [*judge_safekeepers(configuration, probes, where=self._where)]

    async def records(self, facts: DatabaseFacts) -> list[Diagnosis]:
        """Count creates in two phases that are not complete."""
        store = self._plain
        if facts.manifest.cas_mode is not CasMode.TWO_PHASE or not isinstance(store, TwoPhaseStore):
            return []
        listed = store.records.list(store.plain.url, uncommitted_only=True)
        return [judge_records(len([1 async for _ in listed]), where=self._where)]
