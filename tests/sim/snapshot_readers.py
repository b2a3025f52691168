"""I7: readers of named snapshots, which they create, renew, read again and again, and delete.

They read as any server does, from a node of their own that restarts from time to time. A reader
that comes too late gets the error that the snapshot is gone, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from shalekv.errors import (
    IllegalState,
    ManifestConflict,
    ObjectNotFound,
    SnapshotExists,
    SnapshotNotFound,
    StoreUnavailable,
)
from shalekv.protocol.entry import Entry
from shalekv.protocol.manifest import Snapshot
from shalekv.read.scan import scan_slices
from shalekv.read.snapshot_views import SnapshotViews
from shalekv.read.sst_reader import LevelSsts
from shalekv.settings import CacheSettings, LimitSettings, StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.snapshots import Snapshots
from tests.sim.cluster import Cluster
from tests.sim.errors import NodeCrashed, Violation
from tests.sim.history import Got
from tests.sim.invariants.catalogue import checks
from tests.sim.nodes import Node
from tests.sim.options import Trouble
from tests.sim.serial import SerialOrder
from tests.sim.simulation import Simulation
from tests.sim.stored import Stored

LATE_READS = 3  # of snapshots that have ended


@dataclass(slots=True)
class Snapped:
    """A snapshot and what was read of it."""

    snapshot: Snapshot
    ends_ms: int  # by the store's clock: promised until then
    reads: list[tuple[int, int, tuple[Entry, ...]]] = field(default_factory=list)  # seq, time, all
    ending: str = ""


@checks(7, "database")
def check_i7_snapshots_are_one_state(order: SerialOrder, snapped: Sequence[Snapped]) -> None:
    """Check that all reads of one snapshot are equal to the byte, and match the log.

    Compactions, collections and takeovers must not change them. Reads that come too early or too
    late are judged when they happen (`SnapshotReaders`).
    """
    for each in snapped:
        if len(set(each.reads)) > 1:
            raise Violation(f"I7: {each.snapshot} reads {set(each.reads)}")
        for seq, now_ms, entries in each.reads[:1]:
            shown = {e.key: Got(e.value, e.seq, e.expire_at_ms) for e in entries}
            state = {
                key: Got(version.value, version.seq, version.expire_at_ms)
                for key in order.timeline.keys
                if (version := order.timeline.at(key, seq)).value is not None
                and not 0 < version.expire_at_ms <= now_ms
            }
            if shown != state:
                raise Violation(f"I7: {each.snapshot} shows {shown}, the log {state} at {seq}")


@checks(7, "database")
def check_i7_what_was_promised_is_in_a_manifest(stored: Stored, snapped: Sequence[Snapped]) -> None:
    """Check that each snapshot a client got is in an effective manifest, with the state it names.

    A snapshot that is only in a manifest which was created again under an old id protects nothing
    (F2).
    """
    there = {each.id: each for manifest in stored.manifests for each in manifest.snapshots}
    for each in snapped:
        found = there.get(each.snapshot.id)
        if found is None or found.manifest_id != each.snapshot.manifest_id:
            raise Violation(f"I7: {each.snapshot} was promised, and manifests have {found}")


@checks(7, "database")
async def check_i7_over_is_over(
    sim: Simulation, stored: Stored, snapped: Sequence[Snapped]
) -> None:
    """Check that snapshots that the current manifest no longer has are refused with a typed error.

    REQUIRES: the manifest is not edited any more.
    """
    node = sim.node("late reader")
    store = CasStore(sim.store_for(node), sim.runtime_for(node), StoreSettings())
    living = {each.id for each in stored.manifests[-1].snapshots}
    over = [each for each in snapped if each.snapshot.id not in living]
    for each in over[-LATE_READS:]:
        try:
            views = await node.run(new_views(store))
            answer = await node.run(read_snapshot(views, each.snapshot))
        except SnapshotNotFound:
            continue
        raise Violation(f"I7: {each.snapshot} is over, and answers {answer}")


async def read_snapshot(
    views: SnapshotViews, snapshot: Snapshot
) -> tuple[int, int, tuple[Entry, ...]]:
    """The number of the last commit, the logical time, and all entries."""
    opened = await views.open(snapshot.id)
    slices = scan_slices(opened.view, start=b"", end=b"", reverse=False, now_ms=opened.now_ms)
    try:
        entries = [entry async for each in slices for entry in each]
    except ObjectNotFound as missing:
        raise await views.explain(missing, snapshot.id) from missing
    return opened.view.seq, opened.now_ms, tuple(entries)


async def new_views(store: CasStore) -> SnapshotViews:
    stored = StoredManifest(store)
    database_id = (await stored.refresh()).database_id
    ssts = LevelSsts(store, database_id=database_id, settings=CacheSettings())
    return SnapshotViews(store, stored, ssts, LimitSettings())


READERS = 2
LIVES_MS = (8_000, 30_000, 30_000)  # of a snapshot, at pace 1
NEW_PROCESS_BELOW = 0.5  # draws below it start a new process; those below 0.3 also skip the reads
PASSING = (StoreUnavailable, ManifestConflict)
CRASH_BELOW = 0.08  # draws below it crash the reader before a use
CRASHES_MS = (1.0, 30.0, 300.0)  # from then to the crash, at pace 1, at most


class SnapshotReaders:
    """The readers of one database."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sim = cluster.sim
        self.snapped: list[Snapped] = []
        self.problems: list[str] = []

    def lives(self) -> list[Reader]:
        return [Reader(self, number) for number in range(READERS)]

    def check(self, order: SerialOrder) -> None:
        """Check that all reads of one snapshot are equal, and match the log (I7)."""
        if self.problems:
            raise Violation(self.problems[0])
        check_i7_snapshots_are_one_state(order, self.snapped)


class Reader:
    """One of them."""

    def __init__(self, readers: SnapshotReaders, number: int) -> None:
        self._readers = readers
        self._name = f"reader{number}"
        self._views: SnapshotViews | None = None  # of a process that goes on
        self._process_now: tuple[Node, CasStore] | None = None

    async def __call__(self, cluster: Cluster) -> None:
        sim = cluster.sim
        random = sim.random_for(self._name)
        while True:
            await sim.sleep_ms(random.choice([10.0, 1_000.0]) * cluster.pace)
            ttl_ms = int(random.choice(LIVES_MS) * cluster.pace)
            name = f"s{random.getrandbits(60)}"
            if not sim.options.has(Trouble.READERS):
                continue
            node, store = self._process(sim)
            try:
                create = Snapshots(store).create(name=name, ttl_ms=ttl_ms)
                snapshot = await node.run(create)
            except (*PASSING, SnapshotExists, NodeCrashed):
                continue
            snapped = Snapped(snapshot, snapshot.snapshot_expire_time_s * 1_000)
            self._readers.snapped.append(snapped)
            while not snapped.ending:
                await sim.sleep_ms(random.choice([10.0, 300.0, 3_000.0]) * cluster.pace)
                node, store = self._process(sim)
                self._crash_soon(sim, node, random, cluster.pace)
                with suppress(NodeCrashed):
                    await node.run(self._use(store, cluster, snapped, random, ttl_ms))

    def _process(self, sim: Simulation) -> tuple[Node, CasStore]:
        """The process that reads; a new one if it has crashed."""
        node = sim.node(self._name)
        if self._process_now is None or self._process_now[0] is not node:
            store = CasStore(sim.store_for(node), sim.runtime_for(node), StoreSettings())
            self._process_now, self._views = (node, store), None
        return self._process_now

    def _crash_soon(self, sim: Simulation, node: Node, random: Random, pace: float) -> None:
        is_drawn = random.random() < CRASH_BELOW
        wait_s = random.choice(CRASHES_MS) * random.random() * pace / 1_000
        if is_drawn and sim.options.has(Trouble.CRASHES):
            sim.loop.call_later(wait_s, node.crash, context=sim.loop.root.context)

    async def _use(
        self, store: CasStore, cluster: Cluster, snapped: Snapped, random: Random, ttl_ms: int
    ) -> None:
        clock_ms = cluster.sim.store.clock_ms
        called = snapped.snapshot.id.hex()
        drawn = random.random()
        try:
            if drawn < 0.2:
                renewed = await Snapshots(store).renew(called, ttl_ms=ttl_ms)
                snapped.ends_ms = renewed.snapshot_expire_time_s * 1_000
            elif drawn < 0.3:
                snapped.ends_ms = 0
                snapped.ending = "deleted"
                await Snapshots(store).delete(called)
            else:
                if self._views is None or drawn < NEW_PROCESS_BELOW:
                    self._views = await new_views(store)
                snapped.reads.append(await read_snapshot(self._views, snapped.snapshot))
        except PASSING:
            return
        except (ObjectNotFound, IllegalState) as error:  # no valid error of a read of a snapshot
            self._readers.problems.append(f"I7: {snapped.snapshot} is read, and {error!r}")
            snapped.ending = snapped.ending or "damaged"
        except SnapshotNotFound as error:
            # A renewal without a reply may have been made: then the snapshot lives longer. If the
            # store's clock has whole seconds, a process may count on fractions of the last one by
            # its own clock.
            if clock_ms() <= snapped.ends_ms + 1 - cluster.sim.store.tick_ms:
                problem = f"I7: {snapped.snapshot} lives until {snapped.ends_ms}, and {error!r}"
                self._readers.problems.append(problem)
            snapped.ending = snapped.ending or "expired"
