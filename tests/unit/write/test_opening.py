"""Opening: which slots are fenced, which numbers are issued, what is refused, who wins a race."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from shalekv.errors import DatabaseMismatch, Fenced, ManifestConflict, ManifestVersionExists
from shalekv.format import names
from shalekv.protocol.manifest import CasMode, Manifest, WalMode
from shalekv.protocol.opening import (
    SEQ_GAP,
)
from shalekv.protocol.snapshot import find_snapshot
from shalekv.server.database import create_database
from shalekv.settings import StoreSettings, WriterSettings
from shalekv.store.api import ObjectInfo, ObjectStore, RequestKind
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.commit import WalContents
from shalekv.write.opening import open_log
from shalekv.write.recovery import OPEN_SNAPSHOT_TTL_S, RecoveredLog
from tests.kit.constants import draw
from tests.kit.engine.commits import commit_of, group_of, put
from tests.kit.engine.databases import Database, contents
from tests.kit.engine.running_log import quiesce
from tests.kit.inline_runtime import gathered
from tests.kit.store import FaultyStore, HeldStore
from tests.kit.virtual_time import with_simulation
from tests.sim.faults import Faults
from tests.sim.network import Match
from tests.sim.simulation import Simulation
from tests.sim.stored import current_manifest


async def test_numbers_begin_far_above_all_published_ones() -> None:
    """Each writer begins 2**32 above what is durable and above where the last one began (I5)."""
    database = await Database.created()
    first = await database.open()
    await database.fill(1, first.manifest.own, 5, put(b"a"))
    second = await database.open()
    third = await database.open()
    assert (first.first_seq, second.first_seq) == (1, 5 + SEQ_GAP)
    assert third.first_seq == second.first_seq + SEQ_GAP


async def test_logical_time_does_not_go_back() -> None:
    """A new writer's clock begins where the WAL and the manifest have ended (I5)."""
    database = await Database.created()
    first = await database.open()
    await database.fill(1, first.manifest.own, 1, put(b"a"))
    second = await database.open()
    ahead_ms = second.time.now_ms() + 10**9
    await database.edit(lambda m: replace(m, logical_time_ms=ahead_ms))
    third = await database.open()
    assert third.time.now_ms() >= ahead_ms


@pytest.mark.parametrize("mode", [{"cas_mode": CasMode.TWO_PHASE}, {"wal_mode": WalMode.QUORUM}])
async def test_database_of_another_mode_is_refused(mode: dict[str, Any]) -> None:
    """A database of another mode is not opened, and nothing is written."""
    database = await Database.created()
    before = await database.edit(lambda m: replace(m, **mode))
    with pytest.raises(DatabaseMismatch):
        await database.open()
    assert await database.manifest() == before


async def test_concurrent_open_once_does_not_fence_the_winner() -> None:
    """With `open_once`, only one claims an epoch; the other changes neither manifest nor log."""
    database = await Database.created()
    before = await database.open()
    store = HeldStore(database.objects, folder=names.MANIFEST_FOLDER)
    losing = asyncio.create_task(database.open(store, open_once=True))
    await store.arrived(1)
    winner = await database.open(open_once=True)
    store.release_all()
    with pytest.raises(ManifestVersionExists, match="at here:1 has opened the database in epoch 2"):
        await losing
    assert await is_owner(winner)
    assert not await is_owner(before)  # the one that had opened it before
    assert await winner.wal.create(winner.last_wal_id + 1, WalContents(), position=0) is None


async def test_open_once_ignores_edits_of_a_compactor() -> None:
    """With `open_once`, edits of the manifest by processes that are not writers do not matter."""
    database = await Database.created()
    store = HeldStore(database.objects, folder=names.MANIFEST_FOLDER)
    opening = asyncio.create_task(database.open(store, open_once=True))
    late = await store.arrived(1)
    await database.edit(lambda m: replace(m, compactor_epoch=m.compactor_epoch + 1))
    late.release()
    await store.arrived(2)
    store.release_all()
    assert await is_owner(await opening)


@with_simulation(3)
async def test_a_paused_opener_does_not_displace_a_later_one(sim: Simulation) -> None:
    """An opener that paused for longer than an opening may take does not claim again (F2)."""
    await create_database(sim.store_for("a"), sim.runtime_for("a"), StoreSettings())

    def open_on(name: str) -> Coroutine[Any, Any, RecoveredLog]:
        opening = open_log(cas_of(sim, name), WriterSettings(), address=name)
        return sim.node(name).run(opening)

    gate = sim.store.hold_reply(Match("create", f"{names.MANIFEST_FOLDER}*", node="a"))
    opening = asyncio.create_task(open_on("a"))
    await gate.reached()
    sim.node("a").pause()
    gate.release()
    later = await open_on("b")
    await sim.sleep_ms(3_600_000)
    sim.node("a").resume()
    with pytest.raises(ManifestConflict):
        await opening
    assert await is_owner(later)


@with_simulation()
async def test_conflicts_for_too_long_end_an_opening(sim: Simulation) -> None:
    """An opening that never wins ends after its time with an error of its own."""
    database = await Database.created()
    store = HeldStore(database.objects, folder=names.MANIFEST_FOLDER)
    began_ms = sim.now_ms
    with pytest.raises(ManifestConflict, match="within 500 ms"):
        await database.open(store, open_timeout_ms=500, fence_poll_ms=500)
    assert sim.now_ms - began_ms == pytest.approx(500, abs=1)


async def test_fences_in_recycled_slots_do_not_count() -> None:
    """Fences at slots that were compacted and collected meanwhile are made again behind c (I3)."""
    database = await Database.created()
    first = await database.open()
    store = HeldStore(database.objects)
    opening = asyncio.create_task(database.open(store))
    stalled = await store.arrived(1)
    await database.fill(1, first.manifest.own, 1, put(b"a", b"1"))
    await database.fill(2, first.manifest.own, 2, put(b"b", b"2"))
    await database.edit(lambda m: replace(m, wal_id_last_compacted=1, last_compacted_seq=1))
    await database.remove(names.wal_name(1))
    stalled.release()  # creates slot 1 a second time
    again = await store.arrived(2)
    assert again.name == names.wal_name(3)
    store.release_all()
    opened = await opening
    assert (opened.last_wal_id, contents(opened)) == (3, [(b"b", b"2")])


async def test_wal_is_protected_while_it_is_replayed() -> None:
    """From the claim to the end of the replay, the manifest has a snapshot under our nonce."""
    database = await Database.created()
    store = HeldStore(database.objects)
    opening = asyncio.create_task(database.open(store))
    await store.arrived(1)
    (snapshot,) = (await database.manifest()).snapshots
    assert snapshot.manifest_id == (await database.manifest()).manifest_id
    now_s = await database.store.now_ms() // 1_000
    assert snapshot.snapshot_expire_time_s == now_s + OPEN_SNAPSHOT_TTL_S
    store.release_all()
    opened = await opening
    assert snapshot.id == opened.manifest.own.nonce
    (snapshot,) = (await database.manifest()).snapshots
    assert snapshot.id == opened.version.snapshot_id


@with_simulation(faults=Faults(timeout_ms=1e6))
async def test_wal_stays_protected_however_long_it_is_replayed(sim: Simulation) -> None:
    """The snapshot of the opening is renewed while a replay lasts longer than its lifetime."""
    recovery = "shalekv.write.recovery"
    draw({f"{recovery}:OPEN_SNAPSHOT_TTL_S": 300, f"{recovery}:REPLAY_PARALLEL_READS": 1})
    await create_database(sim.store_for("a"), sim.runtime_for("a"), StoreSettings())

    async def open_on(name: str) -> RecoveredLog:
        cas = CasStore(sim.store_for(name), sim.runtime_for(name), StoreSettings())
        return await open_log(cas, WriterSettings(), address="")

    for _ in range(4):
        await open_on("a")
    matches = [Match("get", names.wal_name(wal_id), node="b") for wal_id in range(4)]
    gates = [sim.store.hold(match, times=None) for match in matches]
    opening = asyncio.create_task(sim.node("b").run(open_on("b")))
    for gate in gates:
        await gate.reached()
        await sim.sleep_ms(250_000)
        manifest = current_manifest(sim.store)
        snapshot = find_snapshot(manifest, manifest.writer_nonce)
        assert snapshot is not None
        assert snapshot.snapshot_expire_time_s * 1_000 > sim.store.clock_ms()
        gate.release()
    assert (await opening).objects_replayed == 4


async def test_cancelled_opening_leaves_nothing_behind() -> None:
    """An opening that is cancelled anywhere ends at once, and the next one succeeds."""
    for turns in range(40):
        database = await Database.created()
        opening = asyncio.create_task(database.open())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        await quiesce()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert contents(await database.open()) == []


def cas_of(sim: Simulation, node: str) -> CasStore:
    """The store as `node` reaches it; it does not give up reading."""
    settings = StoreSettings(read_attempts=1_000)
    return CasStore(sim.store_for(node), sim.runtime_for(node), settings)


async def is_owner(opened: RecoveredLog) -> bool:
    try:
        await opened.manifest.refresh()
    except Fenced:
        return False
    return True


async def merge_all_but_the_last(sim: Simulation, stored: StoredManifest) -> None:
    """Mark all WAL objects but the last one as compacted, again and again."""
    while True:
        await sim.sleep_ms(1.0)
        c = len(sim.store.names(names.WAL_FOLDER)) - 2
        if c < (await stored.refresh()).first_uncompacted_wal_id:
            continue

        def merge(manifest: Manifest, c: int = c) -> Manifest:
            return replace(manifest, wal_id_last_compacted=c)

        await stored.edit(merge, lambda m, c=c: m.wal_id_last_compacted == c)  # type: ignore[misc]


@with_simulation()
async def test_an_opening_ends_although_its_fences_are_merged_at_once(sim: Simulation) -> None:
    """A writer that needs many fences opens beside a compactor that merges each of them (I13)."""
    runtime = sim.runtime_for("creator")
    await create_database(sim.store_for("creator"), runtime, StoreSettings())
    compactor = sim.node("compactor")
    stored = StoredManifest(cas_of(sim, "compactor"))
    compactor.start(merge_all_but_the_last(sim, stored))
    settings = WriterSettings(max_parallel_writes=16, open_timeout_ms=3_600_000)
    async with asyncio.timeout(60):
        opened = await sim.node("a").run(open_log(cas_of(sim, "a"), settings, address="a"))
    assert await is_owner(opened)
    assert opened.manifest.current.fence_width == settings.max_parallel_writes


async def commit_on(opened: RecoveredLog, acknowledged: list[int]) -> None:
    """Fill slots until another writer has one; returns what was acknowledged."""
    for number in count():
        wal_id, seq = opened.last_wal_id + 1 + number, opened.first_seq + number
        group = group_of(wal_id, commit_of(seq, put(b"a", b"%d" % seq)))
        if await opened.wal.create(wal_id, group.contents(), position=0) is not None:
            return
        acknowledged.append(seq)


def opened_at(sim: Simulation, name: str, **settings: int) -> Coroutine[Any, Any, RecoveredLog]:
    return open_log(cas_of(sim, name), WriterSettings.model_validate(settings), address=name)


async def unless_fenced(opening: Coroutine[Any, Any, RecoveredLog]) -> None:
    with suppress(Fenced):
        await opening


async def busy_writer(sim: Simulation, k: int, list_factor: float) -> list[int]:
    """A writer near the store fills slots; yields what it acknowledges."""
    runtime = sim.runtime_for("creator")
    await create_database(sim.store_for("creator"), runtime, StoreSettings())
    sim.store.faults = replace(Faults.none(), list_factor=list_factor)
    sim.store.place_near("old", 5)
    old = await sim.node("old").run(opened_at(sim, "old", max_parallel_writes=k))
    acknowledged: list[int] = []
    sim.node("old").start(commit_on(old, acknowledged))
    return acknowledged


def slots_of(sim: Simulation) -> list[int | None]:
    return [names.parse_wal_name(name) for name in sim.store.names(names.WAL_FOLDER)]


class LaggingLists(FaultyStore):
    """A store whose lists of the log show what was there when the first one was sent."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self._shown: list[ObjectInfo] | None = None

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        infos = await gathered(super().list(prefix, start_after=start_after))
        if prefix == names.WAL_FOLDER:
            infos = self._shown = infos if self._shown is None else self._shown
        for info in infos:
            if info.name > start_after:
                yield info


@pytest.mark.parametrize(
    ("lists", "k", "list_factor", "lists_max"),
    [(FaultyStore, 1, 1.0, 20), (FaultyStore, 4, 20.0, 20), (LaggingLists, 1, 1.0, 30)],
)
@with_simulation()
async def test_a_writer_that_is_faster_than_lists_is_taken_over(
    sim: Simulation, lists: type[FaultyStore], k: int, list_factor: float, lists_max: int
) -> None:
    """A fast writer that never reads the manifest is overtaken, without a gap or a lost write.

    It fills two slots while we create one and forty while we list. The number of lists of the log
    and the manifest is bounded, also where lists lag.
    """
    acknowledged = await busy_writer(sim, k, list_factor)
    store = lists(sim.store_for("new"))
    cas = CasStore(store, sim.runtime_for("new"), StoreSettings())
    async with asyncio.timeout(20):
        new = await sim.node("new").run(open_log(cas, WriterSettings(), address="new"))
    assert store.inner.sent.by_kind[RequestKind.LIST] <= lists_max
    assert contents(new) == [(b"a", b"%d" % acknowledged[-1])]
    assert slots_of(sim) == [*range(new.last_wal_id + 1)]
    assert new.manifest.current.fence_width == 1


@pytest.mark.parametrize("creates", [1, 2, 3, 5])
@pytest.mark.parametrize("then", ["crash", "stall"])
@with_simulation()
async def test_an_opener_that_stops_in_pursuit_of_another_writer_does_no_harm(
    sim: Simulation, then: str, creates: int
) -> None:
    """A database opens without a gap or a lost write after an opener stopped in pursuit.

    The writer ends when a fence is ahead of it. This holds whichever fence the opener sends last,
    or sends late.
    """
    acknowledged = await busy_writer(sim, 1, list_factor=2.0)
    ahead = Match("create", "wal/*", node="slow", nth=min(creates, 2))
    aimed = sim.store.hold(ahead)
    gate = sim.store.hold(replace(ahead, nth=max(creates, 3)), times=None)
    slow = sim.node("slow")
    slow.start(unless_fenced(opened_at(sim, "slow")))
    await aimed.reached()
    sim.crash("old")
    if creates > 2:
        aimed.release()
        await gate.reached()
    if then == "crash":
        slow.crash()
        aimed.release()
        gate.release()
    new = await sim.node("new").run(opened_at(sim, "new"))
    sim.node("new").start(commit_on(new, acknowledged))
    aimed.release()
    gate.release()
    await sim.sleep_ms(50.0)
    sim.crash("new")
    last = await sim.node("last").run(opened_at(sim, "last"))
    (found,) = contents(last)
    assert int(found[1]) >= acknowledged[-1]
    assert slots_of(sim) == [*range(last.last_wal_id + 1)]
