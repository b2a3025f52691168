"""The whole database in the simulation: writers, compactors, collectors, readers, and chaos."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from random import Random

from shalekv.errors import OutcomeUnknown, Overloaded, SnapshotNotFound, Stopping, StoreUnavailable
from shalekv.format import names
from shalekv.format.manifest import decode_manifest
from shalekv.format.names import MANIFEST_FOLDER, manifest_name, parse_manifest_name
from shalekv.protocol.manifest import Manifest, Version
from shalekv.protocol.snapshot import NEVER, find_snapshot
from shalekv.read.version import PinnedVersion
from shalekv.server.service import Call
from shalekv.server.writer import Writer
from shalekv.v1 import kv_pb2
from tests.kit.model import keys_of
from tests.kit.serving.answers import scan_of
from tests.sim.cluster import Cluster
from tests.sim.copies import Copies, is_copied
from tests.sim.errors import NodeCrashed, Violation
from tests.sim.history import Got, History, ScanOp, Seen
from tests.sim.invariants import answers, log
from tests.sim.invariants.answers import (
    check_i2_nothing_comes_back,
    check_i6_replicas_show_prefixes,
)
from tests.sim.invariants.asked import check_i14_linearizable, is_judged
from tests.sim.invariants.bounds import (
    Bounds,
    check_i13_l0,
    check_i13_memory_of_writers,
    check_i13_refusals_are_freed,
)
from tests.sim.invariants.catalogue import checks
from tests.sim.invariants.damage import check_i12_damage_is_detected
from tests.sim.level_states import (
    DeleteGuard,
    check_i8_levels_are_what_is_named,
    check_i9_levels_are_the_log,
    check_i9_published_once,
)
from tests.sim.options import Trouble
from tests.sim.replicas import Replicas
from tests.sim.requests import COUNTED, KEYS
from tests.sim.serial import SerialOrder
from tests.sim.simulation import Simulation
from tests.sim.snapshot_readers import (
    SnapshotReaders,
    check_i7_over_is_over,
    check_i7_what_was_promised_is_in_a_manifest,
)
from tests.sim.stalls import BackgroundJobs, Stalls
from tests.sim.store import Applied
from tests.sim.stored import Stored, current_manifest
from tests.sim.tiny import draw_writer
from tests.sim.workload import NOTHING_BESIDE, Beside, rival_writers

STEPS_IN_EARNEST = 200_000  # of a search; such histories are rare


def check_all(
    history: History,
    stored: Stored,
    *,
    keys: Sequence[bytes] = KEYS,
    counters: Collection[bytes] = (COUNTED,),
) -> SerialOrder:
    """Check the replies and the stored objects of a run of writers; return the order of its
    commits.

    Raises `Violation`.
    """
    log.check_i3_nothing_behind_a_fence_run(stored)
    log.check_i4_slots_without_gaps(stored)
    log.check_i4_slot_order_is_sequence_order(stored)
    log.check_i5_manifests(stored)
    log.check_i5_logical_time_in_the_log(stored)
    log.check_i5_logical_time_is_that_of_the_store(stored, history.epoch_ms)
    log.check_i5_a_writer_issues_numbers_of_its_own(stored)
    order = SerialOrder(history, stored, keys)  # I1, I14 and I15 from here on
    log.check_i5_numbers_are_issued_once(order)
    answers.check_i1_acknowledged_writes_are_in_the_log(order)
    answers.check_i14_commits_are_in_the_order_of_time(order)
    answers.check_i14_answers(order)
    answers.check_i15_one_answer(order)
    answers.check_i14_reads(order)
    answers.check_i14_scans(order)
    answers.check_i15_counters(order, counters)
    return order


def check_history(
    history: History,
    stored: Stored,
    *,
    counters: Collection[bytes] = (),
    seen: Iterable[Seen] = (),
    steps_max: int = STEPS_IN_EARNEST,
) -> SerialOrder:
    """Check a history of real processes and what was gathered; the order of its commits.

    As `check_all`, and I2 and I6 of what replicas have shown (`seen`), I9, and I14 by a search.
    Landing times may be unknown (`gather`); but all must be there that was ever written. Keys are
    those of the history. Raises `Violation`.
    """
    order = check_all(history, stored, keys=keys_in_history(history, stored), counters=counters)
    found = list(seen)
    check_i6_replicas_show_prefixes(order, found)
    check_i2_nothing_comes_back(order, found, tick_ms=2_000)  # servers renew theirs each second
    check_i9_levels_are_the_log(order, stored)
    check_i14_linearizable(history, order.timeline.keys, steps_max=steps_max)
    return order


async def check_run(
    sim: Simulation, cluster: Cluster, bounds: Bounds, seen: Sequence[Seen] = ()
) -> tuple[SerialOrder, Stored]:
    """Check a whole run of the simulation, whichever processes took part. Raises `Violation`."""
    check_i13_memory_of_writers(bounds)
    stored = cluster.stored()
    created = (names.parse_manifest_name(e.name) for e in sim.store.log if e.operation == "create")
    log.check_i5_manifest_ids_in_time(each for each in created if each is not None)
    order = check_all(cluster.history, stored)
    check_i2_nothing_comes_back(order, seen, tick_ms=sim.store.tick_ms)
    if is_judged(sim.seed):
        check_i13_refusals_are_freed()
        check_i14_linearizable(cluster.history, order.timeline.keys)
    await check_i12_damage_is_detected(sim)
    return order, stored


def keys_in_history(history: History, stored: Stored) -> list[bytes]:
    """Every key that was named, one by one, or is in the log."""
    found = {key for each in history.operations for key in keys_of(each.request, ())}
    found |= {read.key for read in history.reads}
    found |= {entry.key for each in stored.wal for entry in each.entries}
    return sorted(found - {b""})


POLL_MS = 500.0  # at pace 1


class PinnedVersions:
    """Inspects the versions that serving writers read."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._store = cluster.sim.store
        self._known: set[bytes] = set()  # snapshots of versions that were inspected
        self.problems: list[str] = []

    async def watch(self, cluster: Cluster) -> None:
        while True:
            await cluster.sim.sleep_ms(POLL_MS * cluster.pace)
            for name, writer in cluster.writers.items():
                held = writer.engine.levels.current.without_loads
                if held.snapshot_id not in self._known:
                    self._inspect(name, held)

    @checks(8, "database")
    def check_i8_versions_are_those_of_their_snapshots(self) -> None:
        """Every SST of a version that is read is one that its snapshot keeps."""
        if self.problems:
            raise Violation(self.problems[0])

    def _inspect(self, name: str, held: PinnedVersion) -> None:
        snapshot = find_snapshot(current_manifest(self._store), held.snapshot_id)
        data = snapshot and self._store.data(manifest_name(snapshot.manifest_id))
        if snapshot is None or not data:
            return  # it was lost, and the writer will find that out
        named = decode_manifest(manifest_name(snapshot.manifest_id), data)
        kept = {info.id for info in named.leveled_ssts}
        beyond = _ids(held.version) - kept
        self._known.add(held.snapshot_id)
        if beyond:
            ids = ", ".join(sorted(each.hex() for each in beyond))
            self.problems.append(
                f"I8: {name} reads {ids}, and its snapshot of manifest {named.manifest_id} does "
                "not keep that"
            )


def _ids(version: Version) -> set[bytes]:
    infos = chain(version.l0, version.system, chain.from_iterable(run.ssts for run in version.runs))
    return {info.id for info in infos}


_COLLECTOR = "collector"  # the names of their nodes begin so


@checks(8, "database")
def check_i8_nothing_is_dropped_before_its_time(stored: Stored, log: Iterable[Applied]) -> None:
    """Check that what a collector drops from a manifest had expired when that manifest landed.

    An entry that lives until a second is valid while the clock of the store shows that second.
    """
    by_id = {each.manifest_id: each for each in stored.manifests}
    seen: set[int] = set()
    for applied in log:
        if applied.operation != "create" or not applied.name.startswith(MANIFEST_FOLDER):
            continue
        manifest_id = parse_manifest_name(applied.name) or 0
        before, after = by_id.get(manifest_id - 1), by_id.get(manifest_id)
        is_first = manifest_id not in seen  # one that is created again has no effect (F2)
        seen.add(manifest_id)
        if not is_first or before is None or after is None:
            continue
        if not applied.node.startswith(_COLLECTOR):
            continue
        for what, end_s in _dropped(before, after):
            if end_s == NEVER or 1_000 * end_s >= applied.clock_ms:
                raise Violation(
                    f"I8: {applied.node} drops {what} in manifest {manifest_id} at "
                    f"{applied.clock_ms}, which lives until {end_s}"
                )


def _dropped(before: Manifest, after: Manifest) -> Iterator[tuple[str, int]]:
    """Yield what is in `before` and not in `after`, and until when it lives."""
    snapshots = {each.id for each in after.snapshots}
    leases = {each.id for each in after.leases}
    for snapshot in before.snapshots:
        if snapshot.id not in snapshots:
            yield f"the snapshot {snapshot.id.hex()}", snapshot.snapshot_expire_time_s
    for lease in before.leases:
        if lease.id not in leases:
            yield f"the lease {lease.id.hex()} of {lease.holder}", lease.expire_time_s


SCANS = 2
BETWEEN_MS = (0.0, 500.0, 5_000.0)  # two messages of one scan, at pace 1
ENDS = (
    NodeCrashed,
    Stopping,
    OutcomeUnknown,
    Overloaded,
    SnapshotNotFound,
    StoreUnavailable,
)


class OpenScans:
    """Slow clients. What they get to the end is checked as any scan is."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sim = cluster.sim

    async def keep_some_open(self, cluster: Cluster) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(SCANS):
                random = cluster.sim.random_for(f"slow client {number}")
                tasks.create_task(self._client(random))

    async def _client(self, random: Random) -> None:
        while True:
            await self._sim.sleep_ms(500.0 * self._cluster.pace)
            names = [each for each in self._cluster.writers if each not in self._cluster.avoided]
            if not names or not self._sim.options.has(Trouble.SCANS):
                continue
            name = random.choice(names)
            writer = self._cluster.writers[name]
            invoked_us = self._sim.loop.now_us
            try:
                node = self._sim.node(name)
                seq, replied_us, entries = await node.run(self._scan(writer, random))
            except ENDS:
                continue
            self._cluster.history.scans.append(
                ScanOp(writer.epoch, invoked_us, replied_us, seq, entries)
            )

    async def _scan(
        self, writer: Writer, random: Random
    ) -> tuple[int, int, tuple[tuple[bytes, Got], ...]]:
        """The number of the view, when its first message came, and all that is in it."""
        entries: list[tuple[bytes, Got]] = []
        seq = 0
        first_us: int | None = None
        request = kv_pb2.ScanRequest(reverse=random.random() < 0.3)
        async with aclosing(scan_of(writer.kv, request, Call())) as replies:
            async for reply in replies:
                seq = reply.header.seq
                first_us = self._sim.loop.now_us if first_us is None else first_us
                entries += [(e.key, Got(e.value, e.seq, e.expire_at_ms)) for e in reply.entries]
                await self._sim.sleep_ms(random.choice(BETWEEN_MS) * self._cluster.pace)
        return seq, first_us or 0, tuple(entries)


@dataclass(frozen=True, slots=True)
class WholeRun:
    """The writers of one run, and what is there at its end."""

    cluster: Cluster
    stored: Stored


async def whole_database(
    sim: Simulation, cluster: Cluster | None = None, more: Beside = NOTHING_BESIDE
) -> WholeRun:
    """Run everything at once, and `more`, then check everything. Raises `Violation`."""
    cluster = cluster or Cluster(sim, draw_writer)
    guard = DeleteGuard(sim.store)
    background_jobs, readers, scans = (
        BackgroundJobs(cluster),
        SnapshotReaders(cluster),
        OpenScans(cluster),
    )
    replicas = Replicas(cluster)
    beside: Beside = [
        background_jobs.chaos,
        Stalls(cluster, background_jobs).chaos,
        scans.keep_some_open,
        replicas.chaos,
        *readers.lives(),
        *more,
    ]
    copies = Copies(cluster)
    if is_copied(sim.seed):
        cluster.has_loads = True
        beside = [*beside, copies.chaos]
    bounds, held = Bounds(cluster), PinnedVersions(cluster)
    try:
        await rival_writers(sim, cluster, [*beside, bounds.watch, held.watch])
        await background_jobs.finish()
        await copies.check(sim.node("copier"))
        background_jobs.check_i7_writers_are_protected(cluster)
    finally:
        guard.check_i8_nothing_needed_is_deleted()  # the cause of what may have gone wrong above
        background_jobs.check()
        held.check_i8_versions_are_those_of_their_snapshots()
    order, stored = await check_run(sim, cluster, bounds, replicas.seen)
    check_i8_levels_are_what_is_named(sim.store)
    readers.check(order)
    copies.judge(order)
    check_i7_what_was_promised_is_in_a_manifest(stored, readers.snapped)
    await check_i7_over_is_over(sim, stored, readers.snapped)
    replicas.check(order)
    check_i9_published_once(stored)
    check_i13_l0(stored)
    check_i8_nothing_is_dropped_before_its_time(stored, sim.store.log)
    check_i9_levels_are_the_log(order, stored)
    return WholeRun(cluster, stored)


async def only_writers(sim: Simulation) -> None:
    """Rival writers, and all that can be checked of them. Raises `Violation`."""
    bounds = Bounds(Cluster(sim))
    cluster = await rival_writers(sim, bounds.cluster, [bounds.watch])
    await check_run(sim, cluster, bounds)
