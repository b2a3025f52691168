"""A database in memory whose jobs of compaction a test picks at will."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from shalekv.format import names
from shalekv.format.footer import SstProperties
from shalekv.format.names import wal_name
from shalekv.format.records import (
    IdempotencyRecord,
    ReplyKind,
    encode_idempotency_record,
    record_key,
)
from shalekv.format.sst_writer import encode_sst
from shalekv.jobs.compact.claim import CompactorLeases
from shalekv.jobs.compact.outputs import OutputOwner
from shalekv.jobs.compact.parts import MergePart, OwnProcessParts, PartResult
from shalekv.jobs.compact.run import Compactions
from shalekv.protocol.compaction.jobs import Job, MergeJob, OlderKeys, Result, WalJob
from shalekv.protocol.compaction.publish import CompactorId, claim_compactor_epoch
from shalekv.protocol.entry import Entry, KeyRange, Kind
from shalekv.protocol.lease import RANDOM_BYTES, new_lease_id
from shalekv.protocol.manifest import L0, SYSTEM_LEVEL, Manifest, SortedRun, Version
from shalekv.protocol.sst_table import SstInfo
from shalekv.server.database import create_database
from shalekv.settings import (
    CompactorConfig,
    CompactorSettings,
    LevelCodec,
    LevelSettings,
    StoreSettings,
)
from shalekv.store.cas import CasStore
from shalekv.store.manifests import CompactorManifest, StoredManifest
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.engine.hand_clock import HandClock, hand_runtime
from tests.kit.engine.naive_merge import NaiveLevels

STORE_NOW_MS = 1_700_000_000_000
NONCE = b"compactor-nonce!"
# A compactor of the database of zeros.
OWNER = OutputOwner(
    bytes(16), CompactorId(1, bytes(16)), new_lease_id(1, bytes(RANDOM_BYTES)), logical_time_ms=1
)


def small_settings(
    *,
    sst_bytes: int = 400,
    block_bytes: int = 60,
    subcompactions: int = 1,
    idempotency_record_kept_s: int = 1,
    expired_value_kept_s: int = 0,
    **compactor_settings: int,
) -> CompactorConfig:
    """Settings far below what is allowed: few entries fill many blocks and SSTs."""
    levels = LevelSettings.model_construct(
        sst_bytes=sst_bytes, block_bytes=block_bytes, codec=LevelCodec.LZ4, filter_bits=10
    )
    default = CompactorSettings().model_dump()
    compactor = CompactorSettings.model_construct(
        **default
        | {
            "subcompaction_count_max": subcompactions,
            "subcompaction_memory_bytes": 4 * sst_bytes,
            "idempotency_record_kept_s": idempotency_record_kept_s,
            "expired_value_kept_s": expired_value_kept_s,
            **compactor_settings,
        }
    )
    return CompactorConfig.model_construct(
        levels=levels,
        compactor=compactor,
        store=StoreSettings(),
    )


class SplitParts(OwnProcessParts):
    """Runs parts in this process, but claims to run them in parallel: so jobs are split."""

    is_parallel = True

    def __init__(self, store: CasStore) -> None:
        super().__init__(store)
        self.counts: list[int] = []

    async def run(
        self, parts: Sequence[MergePart], is_lifted: Callable[[], bool]
    ) -> Sequence[PartResult]:
        self.counts.append(len(parts))
        return await super().run(parts, is_lifted)


@dataclass(slots=True)
class CompactedDatabase:
    """One database, its compactor, and all that was ever written to it."""

    store: MemoryStore
    clock: HandClock
    cas: CasStore
    stored: StoredManifest
    settings: CompactorConfig
    compactions: Compactions
    parts: SplitParts
    written: list[list[Entry]] = field(default_factory=list)  # by slot
    logical_time_ms: int = STORE_NOW_MS
    last_seq: int = 0

    @classmethod
    async def begun(
        cls, settings: CompactorConfig | None = None, seed: int = 1
    ) -> CompactedDatabase:
        """A new database, whose compactor has claimed its epoch."""
        settings = settings or small_settings()
        clock = HandClock()
        runtime = hand_runtime(clock, seed)
        start_ms = clock.monotonic_ms()
        store = MemoryStore(
            lambda: STORE_NOW_MS + int(clock.monotonic_ms() - start_ms), objects=MemoryObjects()
        )
        await create_database(store, runtime, settings.store)
        cas = CasStore(store, runtime, settings.store)
        stored = StoredManifest(cas)
        await stored.edit(
            lambda current: claim_compactor_epoch(current, NONCE),
            lambda current: current.compactor_nonce == NONCE,
        )
        manifest = CompactorManifest(stored, CompactorId(1, NONCE))
        leases = CompactorLeases(cas, ttl_s=600, holder="test")
        parts = SplitParts(cas)
        compactions = Compactions(cas, manifest, leases, settings, parts)
        return cls(store, clock, cas, stored, settings, compactions, parts)

    async def write(
        self, *commits: Sequence[Entry], records: Sequence[Entry] = (), time_ms: int = 0
    ) -> None:
        """Fill the next slot: each commit has the next sequence number; none make a fence."""
        manifest = await self.stored.refresh()
        self.logical_time_ms += time_ms
        entries = []
        for commit in commits:
            self.last_seq += 1
            entries += [entry._replace(seq=self.last_seq) for entry in commit]
        own = [record._replace(seq=self.last_seq) for record in records]
        slot = len(self.written)
        points = [entry for entry in entries if entry.kind is not Kind.RANGE_TOMBSTONE]
        ranges = [entry for entry in entries if entry.kind is Kind.RANGE_TOMBSTONE]
        properties = SstProperties(
            name=wal_name(slot),
            database_id=manifest.database_id,
            writer_epoch=1,
            writer_nonce=bytes(16),
            write_id=slot.to_bytes(16, "big"),
            logical_time_ms=self.logical_time_ms,
        )
        data = encode_sst(
            properties,
            sorted(points, key=lambda e: (e.key, -e.seq)),
            sorted(ranges, key=lambda e: (e.key, -e.seq)),
            sorted(own, key=lambda e: e.key),
            block_bytes=50,
        )
        await self.store.create(wal_name(slot), data)
        self.written.append([*entries, *own])

    async def run(self, job: Job) -> Result:
        """Run a job, picked by the test, and publish its result."""
        manifest = await self.stored.refresh()
        return await self.compactions.run(job, manifest, Version.of(manifest), lambda: False)

    async def compact_wal(self, slots: range | None = None) -> Result:
        """Merge these slots of the WAL into L0; by default all that are not compacted."""
        if slots is None:
            first = (await self.stored.refresh()).first_uncompacted_wal_id
            slots = range(first, len(self.written))
        return await self.run(WalJob(slots, "by hand"))

    async def merge(self, source_level: int, target_level: int, count: int = 99) -> Result:
        """Merge up to `count` SSTs of a level, which are there, into another one."""
        job = merge_job(await self.version(), source_level, target_level, count)
        assert job is not None
        return await self.run(job)

    async def version(self) -> Version:
        return Version.of(await self.stored.refresh())

    async def read(self) -> NaiveLevels:
        """The current levels, read without any of the engine."""
        return await NaiveLevels.read(self.store, await self.stored.refresh())

    async def save(self, path: Path) -> None:
        """Copy the database into a folder that a local store opens."""
        for folder in (names.MANIFEST_FOLDER, names.WAL_FOLDER, names.LEVELS_FOLDER):
            async for info in self.store.list(folder):
                target = path / info.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((await self.store.get(info.name)).data)

    def store_now_ms(self) -> float:
        """The store's clock, which the test moves with the local one."""
        return STORE_NOW_MS + self.clock.monotonic_ms() - HandClock().monotonic_ms()

    def compacted(self, manifest: Manifest) -> list[Entry]:
        """All that was ever written to the slots up to c."""
        slots = self.written[: manifest.first_uncompacted_wal_id]
        return [entry for slot in slots for entry in slot]

    async def levels(self) -> list[str]:
        """The names of all SSTs of the levels that are stored."""
        return [info.name async for info in self.store.list("levels/")]


def whole_part(
    sources: Sequence[Sequence[SstInfo]],
    *,
    owner: OutputOwner = OWNER,
    levels: LevelSettings | None = None,
    memory_bytes: int = 1 << 20,
) -> MergePart:
    """The part of a merge into level 1 that has all keys, at any pace."""
    return MergePart(
        owner=owner,
        target_level=1,
        sources=sources,
        keys=KeyRange(b"", b""),
        older=OlderKeys(),
        expiry_horizon_ms=0,
        cuts=(),
        levels=levels or LevelSettings(),
        memory_bytes=memory_bytes,
        bytes_per_s=0,
    )


def put(key: bytes, value: bytes = b"v", expire_at_ms: int = 0) -> Entry:
    return Entry(key, 0, Kind.PUT, value, expire_at_ms)


def delete(key: bytes) -> Entry:
    return Entry(key, 0, Kind.TOMBSTONE)


def delete_range(start: bytes, end: bytes) -> Entry:
    return Entry(start, 0, Kind.RANGE_TOMBSTONE, end)


def record(client_key: bytes, expire_at_ms: int, reply: bytes = b"") -> Entry:
    value = encode_idempotency_record(IdempotencyRecord(bytes(16), 0, ReplyKind.PUT, reply))
    return Entry(record_key(client_key), 0, Kind.PUT, value, expire_at_ms)


def merge_job(
    version: Version, source_level: int, target_level: int, count: int
) -> MergeJob | None:
    """A job as the policy may pick it: `count` SSTs of a level, in a row; None: there are none."""
    if source_level == SYSTEM_LEVEL:
        sources = version.system[:count]
    elif source_level == L0:
        sources = version.l0[::-1][:count]
    else:
        run = next((run for run in version.runs if run.level == source_level), None)
        sources = run.ssts[:count] if run is not None else ()
    if not sources:
        return None
    overlapped: Sequence[SstInfo] = ()
    if source_level != SYSTEM_LEVEL:
        target = next((run for run in version.runs if run.level == target_level), None)
        overlapped = _overlapped(target, sources)
    return MergeJob(source_level, target_level, sources, overlapped, is_move=False, reason="test")


def _overlapped(target: SortedRun | None, sources: Sequence[SstInfo]) -> Sequence[SstInfo]:
    if target is None:
        return ()
    start = min(info.first_key for info in sources)
    if any(not info.last_key for info in sources):
        return target.overlapping(KeyRange(start, b""))
    end = max(info.last_key for info in sources) + b"\x00"
    return target.overlapping(KeyRange(start, end))


def random_entry(random: Random, keys: Sequence[bytes], now_ms: int) -> Entry:
    """A put, with or without expiry, a delete, or a range delete."""
    key, kind = random.choice(keys), random.random()
    if kind < 0.6:
        return put(key, random.randbytes(random.randrange(30)))
    if kind < 0.7:
        return put(key, b"expires", now_ms + random.randrange(-5, 40))
    if kind < 0.85:
        return delete(key)
    start, end = sorted((key, random.choice(keys)))
    return delete_range(start, end if end > start else b"")
