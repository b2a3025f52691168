"""The states that snapshots show in any process, and the errors for snapshots that are gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import IllegalState, ObjectNotFound, SnapshotNotFound, StoreUnavailable
from shalekv.format import names
from shalekv.format.manifest import decode_manifest, encode_manifest
from shalekv.protocol.entry import Entry, Kind
from shalekv.protocol.origins import make_pin_permanent
from shalekv.protocol.snapshot import find_snapshot
from shalekv.read.scan import scan_slices
from shalekv.read.snapshot_views import CLOCK_POLL_MS, POLL_MS, SnapshotViews
from shalekv.read.sst_reader import LevelSsts
from shalekv.read.version import OpenView
from shalekv.runtime import Runtime
from shalekv.settings import CacheSettings, LimitSettings, StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.snapshots import Snapshots
from tests.kit.constants import set_constants
from tests.kit.engine.collection import CollectedDatabase
from tests.kit.inline_runtime import InlineWorkers, gathered
from tests.kit.store import FaultyStore, Gate, Request, nothing

HOUR_MS = 3_600_000
Shown = list[tuple[bytes, bytes]]


class StoreClock(LoopClock):
    """A local clock that runs as the store's does; waits take no time."""

    def __init__(self, database: CollectedDatabase) -> None:
        self._database = database
        self.jumped_ms = 0.0

    def monotonic_ms(self) -> float:
        return self._database.now_ms - 1_000_000 + self.jumped_ms

    async def sleep_ms(self, duration_ms: float) -> None:
        self._database.now_ms += round(duration_ms)
        await asyncio.sleep(0)


def cas_of(database: CollectedDatabase, store: ObjectStore | None = None) -> CasStore:
    runtime = Runtime(StoreClock(database), Random(database.random.random()), InlineWorkers())
    return CasStore(store or database.store, runtime, StoreSettings())


async def views_of(
    database: CollectedDatabase, store: ObjectStore | None = None, **limits: int
) -> SnapshotViews:
    cas = cas_of(database, store)
    database_id = (await database.manifest()).database_id
    ssts = LevelSsts(cas, database_id=database_id, settings=CacheSettings())
    return SnapshotViews(cas, StoredManifest(cas), ssts, LimitSettings.model_validate(limits))


async def shown(opened: OpenView) -> Shown:
    slices = scan_slices(opened.view, start=b"", end=b"", reverse=False, now_ms=opened.now_ms)
    return [(entry.key, entry.value) for part in await gathered(slices) for entry in part]


async def filled(count: int = 3) -> CollectedDatabase:
    """Return a database with so many commits in the WAL."""
    database = await CollectedDatabase.created()
    await database.wal(count)
    return database


def keys(count: int) -> Shown:
    return [(b"k%d" % number, b"v") for number in range(1, count + 1)]


async def test_deletion_is_noticed_soon() -> None:
    """A deletion is noticed within seconds, or at once where it was done, without more polls."""
    database = await filled()
    first = await database.snapshots().create(ttl_ms=None)
    second = await database.snapshots().create(ttl_ms=None)
    store = FaultyStore(database.store)
    views = await views_of(database, store)
    for each in (first, second):
        await views.open(each.id)
    await database.snapshots().delete(first.id.hex())
    asked = len(store.requests)
    database.pass_time((POLL_MS - 1) / 1_000)
    for _ in range(10):
        await views.open(first.id)
    assert len(store.requests) == asked
    database.pass_time(0.001)
    with pytest.raises(SnapshotNotFound):
        await views.open(first.id)
    await views.open(second.id)
    await database.snapshots().delete(second.id.hex())
    views.live.forget_poll()
    with pytest.raises(SnapshotNotFound):
        await views.open(second.id)


async def test_store_that_is_away_ends_no_reads() -> None:
    """While the store does not answer, the snapshot that was seen last is used."""
    database = await filled()
    created = await database.snapshots().create(ttl_ms=600_000)
    store = FaultyStore(database.store)
    views = await views_of(database, store)
    await views.open(created.id)

    async def away(request: Request) -> None:
        raise StoreUnavailable(store.url, request.operation, "", "away")

    store.before = away
    for _ in range(3):
        database.pass_time(5)
        await views.open(created.id)
    database.pass_time(600)
    with pytest.raises(StoreUnavailable):
        await views.open(created.id)
    store.before = nothing
    with pytest.raises(SnapshotNotFound):
        await views.open(created.id)


async def test_replaced_manifest_is_noticed() -> None:
    """A snapshot that has the checksum of its manifest does not read another one."""
    database = await filled()
    first = await database.snapshots().create(ttl_ms=None)
    shared = await database.snapshots().share(first.id.hex(), ttl_ms=None)
    await database.snapshots().delete(first.id.hex())
    name = names.manifest_name(shared.manifest_id)
    stored = database.objects.find(name)
    assert stored is not None
    other = replace(decode_manifest(name, stored.data), wal_id_last_seen=0)
    await database.store.delete([name])
    await database.store.create(name, encode_manifest(other))
    views = await views_of(database)
    with pytest.raises(IllegalState, match=name):
        await views.open(shared.id)


async def test_states_are_bounded_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the least recently used state is evicted."""
    database = await filled()
    ids = [(await database.snapshots().create(ttl_ms=None)).id for _ in range(3)]
    store = FaultyStore(database.store)
    set_constants(monkeypatch, {"shalekv.read.snapshot_views:KEPT_STATES_MAX": 2})
    views = await views_of(database, store)
    for snapshot_id in ids:
        await views.open(snapshot_id)
    read = len(store.asked("get"))
    for snapshot_id in ids[1:]:
        await views.open(snapshot_id)
    assert len(store.asked("get")) == read
    assert await shown(await views.open(ids[0])) == keys(3)
    assert len(store.asked("get")) > read


async def test_large_state_is_read_and_not_kept() -> None:
    """A state too large for the cache is shared while reads use it, and not kept."""
    database = await filled(4_000)
    created = await database.snapshots().create(ttl_ms=None)
    store = FaultyStore(database.store)
    views = await views_of(database, store, snapshot_view_bytes_max=1 << 20)
    opened = await views.open(created.id)
    assert views.held_bytes == 0
    read = len(store.asked("get"))
    assert await views.open(created.id) is opened
    assert len(store.asked("get")) == read
    del opened
    assert len(await shown(await views.open(created.id))) == 4_000
    assert len(store.asked("get")) > read


async def test_collected_meanwhile_is_never_a_short_answer() -> None:
    """A snapshot lost during its load gives its whole state, or the error that it is gone.

    A stalled writer may fill collected slots again, with other contents (F1).
    """
    at = 0
    seen: set[str] = set()
    while True:
        database = await filled(4)
        created = await database.snapshots().create(ttl_ms=5_000)
        await database.compact(1)
        last_seq = database.last_seq

        async def lose(
            request: Request, database: CollectedDatabase = database, at: int = at
        ) -> None:
            if request.number == at:
                await database.wal()
                await database.compact(4)
                await database.merge()
                database.pass_time()
                await database.collecting().collect()
                database.last_wal_id = 0
                await database.wal(3)

        store = FaultyStore(database.store, before=lose)
        views = await views_of(database, store)
        try:
            opened = await views.open(created.id)
        except SnapshotNotFound:
            seen.add("gone")
        else:
            seen.add("whole")
            assert await shown(opened) == keys(4)
            assert opened.view.seq == last_seq
        if len(store.requests) <= at:
            break
        at += 1
    assert at > 8
    assert seen == {"gone", "whole"}


async def test_snapshot_that_releases_its_log_meanwhile_is_gone() -> None:
    """A snapshot that becomes a pin, which keeps only SSTs, is not read from then on."""
    database = await filled(4)
    created = await database.snapshots().create(ttl_ms=5_000)
    store = FaultyStore(database.store)
    views = await views_of(database, store)
    await views.check(created.id)
    store.before = gate = Gate("get", names.WAL_FOLDER, is_open=False)
    opening = asyncio.create_task(views.open(created.id))
    await gate.arrived.wait()
    await database.edit(lambda m: make_pin_permanent(m, created.id, now_s=0))
    gate.open()
    with pytest.raises(SnapshotNotFound):
        await opening


async def test_what_had_expired_is_not_shown_again() -> None:
    """A snapshot is read as of its creation, even if nothing was written for long before (I2)."""
    database = await CollectedDatabase.created()
    await _put_until(database, b"dead", database.now_ms + 1_000)
    await _put_until(database, b"alive", database.now_ms + HOUR_MS)
    database.pass_time(10)
    created = await database.snapshots().create(ttl_ms=None)
    shared = await database.snapshots().share(created.id.hex(), ttl_ms=None)
    database.pass_time(7_200)
    views = await views_of(database)
    for each in (created, shared):
        assert await shown(await views.open(each.id)) == [(b"alive", b"v")]


async def _put_until(database: CollectedDatabase, key: bytes, expire_at_ms: int) -> None:
    database.last_seq += 1
    await database._fill([Entry(key, database.last_seq, Kind.PUT, b"v", expire_at_ms)])  # noqa: SLF001


async def test_gap_is_waited_for() -> None:
    """A snapshot has the commits behind a gap, unless the gap is not filled in time."""
    database = await filled(2)
    database.last_wal_id += 1
    await database.wal()
    hole = names.wal_name(2)
    late = database._encoded(hole, [])  # noqa: SLF001

    class Waiting(StoreClock):
        async def sleep_ms(self, duration_ms: float) -> None:
            await super().sleep_ms(duration_ms)
            await database.store.create(hole, late)

    cas = CasStore(
        database.store, Runtime(Waiting(database), Random(1), InlineWorkers()), StoreSettings()
    )
    created = await Snapshots(cas).create(ttl_ms=None, gap_wait_ms=1_000)
    assert database.objects.find(hole) is not None
    manifest = await database.manifest()
    assert find_snapshot(manifest, created.id) is not None
    assert manifest.wal_id_last_seen == 3
    database.last_wal_id += 1
    await database.wal()
    began_ms = database.now_ms
    await Snapshots(cas_of(database)).create(ttl_ms=None, gap_wait_ms=1_000)
    assert (await database.manifest()).wal_id_last_seen == 3
    assert 1_000 <= database.now_ms - began_ms < 2_000


async def test_clock_that_jumps_ends_no_snapshot() -> None:
    """The store's clock is read before a snapshot counts as expired."""
    database = await filled()
    created = await database.snapshots().create(ttl_ms=10_000)
    views = await views_of(database)
    await views.open(created.id)
    clock = views.store.runtime.clock
    assert isinstance(clock, StoreClock)
    clock.jumped_ms += CLOCK_POLL_MS / 2
    assert (await views.check(created.id)).id == created.id
    missed = ObjectNotFound(database.store.url, "get", "wal/1", "it is not there")
    clock.jumped_ms += CLOCK_POLL_MS / 2
    assert await views.explain(missed, created.id) is missed
