"""A database whose log is in safekeepers: its machines, its writers, and the way between them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from random import Random
from typing import Any

from shalekv.errors import DatabaseMismatch, NotAMember, QuorumUnavailable, ShaleError
from shalekv.format.names import MANIFEST_FOLDER, wal_name
from shalekv.jobs.switch_wal import switch_to_object_store, switch_to_quorum
from shalekv.protocol.entry import Entry
from shalekv.protocol.manifest import WalMode
from shalekv.protocol.membership import Configuration
from shalekv.protocol.quorum_records import Record
from shalekv.rpc.safekeeper_links import GrpcLinks
from shalekv.server.database import Quorum, create_database
from shalekv.settings import (
    ArchiveUrlSettings,
    ArchivingSettings,
    QuorumSettings,
    SafekeeperConfig,
    SafekeeperSettings,
    SafekeeperTransport,
    StoreSettings,
    WriterConfig,
)
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from tests.sim.cluster import ENDS, Cluster
from tests.sim.errors import NodeCrashed, Violation
from tests.sim.history import Outcome
from tests.sim.invariants.catalogue import checks
from tests.sim.network import Match
from tests.sim.nodes import Node
from tests.sim.options import Trouble
from tests.sim.safekeepers.hosts import DATA, URL, Machine, links_of, store_of
from tests.sim.safekeepers.wires import Wires
from tests.sim.safekeepers.witness import Named, Witness, named
from tests.sim.serial import SerialOrder
from tests.sim.simulation import Simulation
from tests.sim.stored import Stored, WalObject, current_manifest, wal_object
from tests.sim.tiny import draw_writer, drawn_among

LATE_US = 60_000_000  # in peace the archive is not further behind


def committed_log(witness: Witness) -> list[Record]:
    """All records that are committed, and before them what is committed by them.

    Of all records of one log that a majority has held, the last one of the newest writer is the
    end. There is one log for each time that the database was switched to safekeepers.
    """
    ends: dict[Named, tuple[tuple[int, int], Named]] = {}  # by the first record
    for each in witness.majority_us:
        first, end = witness.first_of(each), (witness.records[each].mark.rank, each)
        ends[first] = max(ends.get(first, end), end)
    return [record for _, last in sorted(ends.values()) for record in witness.chain_to(last)]


def committed_pieces(witness: Witness, archived: Stored) -> Stored:
    """The archive, with its log in the pieces in which that became durable.

    Objects that are in no log were put there by a writer without safekeepers.
    """
    database_id = archived.manifests[0].database_id
    pieces: list[WalObject] = []
    for record in committed_log(witness):
        if record.payload:
            durable_us = witness.majority_us.get(named(record))
            if durable_us is None:
                raise Violation(f"I11: no majority has ever had record {record.mark}")
            name, levels = wal_name(record.wal_id), archived.levels
            piece = wal_object(record.wal_id, name, record.payload, database_id, levels, durable_us)
            pieces.append(piece)
    in_log = {each.wal_id for each in pieces}
    alone = [each for each in archived.wal if each.wal_id not in in_log]
    ordered = sorted([*alone, *pieces], key=attrgetter("wal_id"))  # stable
    return replace(archived, pieces=tuple(ordered))


@checks(11, "quorum")
def check_i11_archived_is_committed(stored: Stored, now_us: int) -> None:
    """Check that the archive is the log as it was committed, and was committed before."""
    archived = {each.wal_id: each for each in stored.wal}
    last_wal_id = max(archived)
    for wal_id, group in groupby(stored.pieces, key=attrgetter("wal_id")):
        pieces = list(group)
        found = archived.get(wal_id)
        if found is None:
            age_us = now_us - max(each.landed_us or 0 for each in pieces)
            if age_us > LATE_US or wal_id < last_wal_id:
                raise Violation(f"I11: {wal_name(wal_id)} is committed, and not archived")
            continue
        if _entries(*pieces) != _entries(found):
            raise Violation(f"I11: {found} is in the archive, and the log has {pieces}")
        last = pieces[-1]
        if (found.epoch, found.logical_time_ms) != (last.epoch, last.logical_time_ms):
            raise Violation(f"I11: {found} is in the archive, and the log ends it with {last}")
        committed_us = max(each.landed_us or 0 for each in pieces)
        if (found.landed_us or 0) < committed_us:
            raise Violation(
                f"I11: {wal_name(wal_id)} was archived at {found.landed_us} us, and no majority "
                f"had all of it before {committed_us} us"
            )


@checks(11, "quorum")
def check_i11_acknowledged_was_on_a_majority(order: SerialOrder) -> None:
    """Check that each acknowledged write was on the disks of a majority, and is in the log."""
    for operation, attempt in order.history.attempts(Outcome.ACKNOWLEDGED):
        placed = order.placed.get(operation.number)
        if placed is None or placed.commit.seq != attempt.seq:
            continue  # another attempt was acknowledged, or it has changed nothing
        durable_us = order.landed_us(placed.commit.wal)
        if attempt.replied_us is not None and durable_us > attempt.replied_us:
            raise Violation(f"I11: {operation} got {attempt}, durable at {durable_us} us")


def _entries(*objects: WalObject) -> list[Entry]:
    return sorted(entry for each in objects for entry in each.all_entries)


MUCH_BYTES = 1 << 30
RETIRE_MS = (2_000, 20_000)
NODE, QUORUM = "shalekv.server.safekeeper", "shalekv.write.quorum"


def draw_safekeeper(random: Random, pace: float) -> SafekeeperConfig:
    """Draw settings of a node with small files that polls the archive often."""
    safekeeper = SafekeeperSettings().model_copy(
        update=drawn_among(
            {
                "data": str(DATA),
                "disk_free_bytes_min": random.choice([0, 1]),
                "segment_bytes": random.choice([1_500, 4_000, 16_000]),
                "recent_bytes_max": random.choice([0, 2_000, MUCH_BYTES]),
                "unarchived_bytes_max": random.choice([MUCH_BYTES, MUCH_BYTES, MUCH_BYTES, 30_000]),
                f"{NODE}.propose:APPEND_QUEUE_BYTES_MAX": random.choice([1, 2_000, MUCH_BYTES]),
                f"{NODE}.node:RELAY_QUEUE_BYTES_MAX": random.choice([2_000, MUCH_BYTES]),
                f"{NODE}.propose:TAIL_MESSAGE_BYTES_MAX": random.choice([500, MUCH_BYTES]),
                f"{NODE}.propose:TAIL_HEARTBEAT_MS": random.choice([1_000, 5_000]),
                f"{NODE}.node:LOG_RETIRE_INTERVAL_MS": random.choice(RETIRE_MS),
            }
        )
    )
    archiving = ArchivingSettings().model_copy(
        update=drawn_among(
            {
                f"{NODE}.archiver:PARALLEL_UPLOADS": random.choice([1, 4]),
                f"{NODE}.archiver:UPLOAD_TIMEOUT_MS": int(random.choice([1_000, 20_000]) * pace),
                "archive_list_interval_ms": int(random.choice([500, 3_000]) * pace),
                f"{NODE}.archiver:MANIFEST_INTERVAL_MS": int(random.choice([2_000, 20_000]) * pace),
                "archive_unappointed_ms": int(random.choice([1_000, 10_000]) * pace),
                f"{NODE}.archiver:PAUSE_MS": random.choice([0, 20]),
                f"{NODE}.archiver:READ_BYTES": random.choice([500, MUCH_BYTES]),
            }
        )
    )
    return SafekeeperConfig(
        database=ArchiveUrlSettings(url=URL), safekeeper=safekeeper, archiving=archiving
    )


def draw_quorum_writer(random: Random) -> WriterConfig:
    drawn = draw_writer(random)
    quorum = QuorumSettings().model_copy(
        update=drawn_among(
            {
                f"{QUORUM}.links:CONNECT_TIMEOUT_MS": random.choice([300, 3_000]),
                "vote_timeout_ms": random.choice([3_000, 15_000]),
                "quorum_timeout_ms": random.choice([500, 5_000]),
                f"{QUORUM}.peer:REPLY_TIMEOUT_MS": random.choice([1_000, 10_000]),
                f"{QUORUM}.opening:PARALLEL_APPENDS": random.choice([1, 8]),
                f"{QUORUM}.peer:SEND_QUEUE_BYTES_MAX": random.choice([500, MUCH_BYTES]),
                "safekeeper_transport": random.choice([*SafekeeperTransport]),
                f"{QUORUM}.peer:CHAIN_TIMEOUT_MS": random.choice([20, 300]),
                "commit_broadcast": random.choice([False, True]),
                "unarchived_log_bytes_max": random.choice([20_000, MUCH_BYTES]),
                "archive_interval_ms": random.choice([0, 50, 300, 2_000]),
                f"{QUORUM}.wal:ARCHIVE_OBJECT_BYTES": random.choice([1_000, MUCH_BYTES]),
                f"{QUORUM}.log:ARCHIVE_TAKEOVER_MS": random.choice([500, 5_000]),
            }
        )
    )
    writer = drawn.writer.model_copy(update={"flush_interval_ms": random.choice([0, 0, 10])})
    return drawn.model_copy(update={"quorum": quorum, "writer": writer})


POLL_MS = 20.0
COUNTS = (3, 3, 3, 5)
QUORUM_SHARE = 0.7  # share of the databases with safekeepers from the beginning
SWITCH_SHARE = 0.3  # share of the takeovers that also switch the WAL mode
SWITCH_MS = (100.0, 1_000.0, 5_000.0)  # until the switching process is disturbed, at pace 1
SWITCH_MS_MAX = 90_000.0
ATTEMPTS = (0, 0, 1, 3)  # to create the database, before it is created
FOUNDING_MS = (0.0, 0.0, 1_000.0, 11.0 * max(RETIRE_MS))  # until its manifest is there


class QuorumCluster(Cluster):
    """Writers that commit to a majority of safekeepers."""

    # Members known to a writer may be retired while it opens, and the mode switched.
    ends = (*ENDS, QuorumUnavailable, NotAMember, DatabaseMismatch)

    def __init__(self, sim: Simulation) -> None:
        super().__init__(sim, draw_quorum_writer)
        self.wires = Wires(sim, sim.random_for("wires"))
        self.witness = Witness(sim)
        self._random = sim.random_for("safekeepers")
        self.is_switching = False
        self.member_count = self._random.choice(COUNTS)
        names = [f"sk{number}" for number in range(1, self.member_count + 2)]  # one is spare
        self.machines = {name: self._machine(name) for name in names}

    def _machine(self, name: str) -> Machine:
        witness = self.witness
        return Machine(
            self.sim, self.wires, name, on_synced=witness.inspect, on_sent=witness.reply_sent
        )

    async def found(self) -> None:
        """Create the database, at times after attempts that came to nothing, or late."""
        await self._all_started()
        random = Random(f"{self.sim.seed}/founding")
        for number in range(random.choice(ATTEMPTS)):
            await self._attempt(f"founder{number}", dies=random.random() < 0.7)
        admin = self.sim.node("admin")
        held_ms = random.choice(FOUNDING_MS)
        match = Match("create", f"{MANIFEST_FOLDER}*", node=admin.name)
        gate = self.sim.store.hold(match, times=None)
        self.sim.loop.call_later(held_ms / 1_000, gate.release)
        may_switch = self.sim.options.has(Trouble.TAKEOVERS)
        is_quorum = random.random() < QUORUM_SHARE or not may_switch
        await admin.run(self._creation(admin, is_quorum=is_quorum))

    async def _all_started(self) -> None:
        for machine in self.machines.values():
            if not machine.is_running:
                self.start_machine(machine)
        while any(machine.methods is None for machine in self.machines.values()):
            await self.sim.sleep_ms(POLL_MS)

    def _creation(self, node: Node, *, is_quorum: bool = True) -> Coroutine[Any, Any, None]:
        members = [*self.machines.values()][: self.member_count]
        addresses = [machine.address for machine in members]
        quorum = Quorum(self.links_for(node), addresses) if is_quorum else None
        runtime = self.sim.runtime_for(node)
        return create_database(self.store_for(node), runtime, StoreSettings(), quorum)

    async def _attempt(self, name: str, *, dies: bool) -> None:
        """Try to create the database while a safekeeper is down: be refused, or die before."""
        down = [*self.machines.values()][self.member_count - 1]
        down.kill()
        founder = self.sim.node(name)
        creation = self.sim.loop.create_task(founder.run(self._creation(founder)))
        first = next(iter(self.machines.values()))
        if dies:
            before = len(first.members)
            while len(first.members) == before and not creation.done():
                await self.sim.sleep_ms(1.0)
            founder.crash()
        with suppress(QuorumUnavailable, NodeCrashed):
            await creation
            raise Violation("a database was created although a safekeeper is down")
        await self._all_started()

    async def change_amid_takeover(self, random: Random) -> None:
        """Switch the WAL mode, now and then; the switching process may pause or die in between."""
        if random.random() >= SWITCH_SHARE or self.is_switching:
            return
        self.is_switching = True
        node = self.sim.node("switcher")
        befalls = random.choice([node.pause, node.crash, node.resume, node.resume])
        befalls_ms = random.choice(SWITCH_MS) * random.random() * self.pace
        self.sim.loop.call_later(befalls_ms / 1_000, befalls, context=self.sim.loop.root.context)
        try:
            async with asyncio.timeout(SWITCH_MS_MAX / 1_000):
                mode = await node.run(self._switch(node, random))
        except (ShaleError, TimeoutError, NodeCrashed) as error:
            self.sim.note(f"the WAL mode is not switched: {error!r}")
        else:
            self.sim.note(f"the WAL mode is {mode.name} from now on")
        finally:
            node.resume()
            self.is_switching = False

    async def _switch(self, node: Node, random: Random) -> WalMode:
        store = CasStore(self.store_for(node), self.sim.runtime_for(node), StoreSettings())
        links = self.links_for(node)
        if current_manifest(self.sim.store).wal_mode is WalMode.QUORUM:
            return (await switch_to_object_store(store, links)).wal_mode
        machines = random.sample([*self.machines.values()], self.member_count)
        addresses = [machine.address for machine in machines]
        return (await switch_to_quorum(store, links, addresses)).wal_mode

    def start_machine(self, machine: Machine) -> None:
        machine.start(draw_safekeeper(self._random, self.pace))

    def store_for(self, node: Node) -> ObjectStore:
        """Return a new client of the store, under the URL that safekeepers know."""
        return store_of(self.sim, node)

    def links_for(self, node: Node) -> GrpcLinks:
        return links_of(self.wires, node)

    def configuration(self) -> Configuration:
        """Return the members that hold the log, or held it last. REQUIRES: it was in safekeepers
        once.
        """
        return self.witness.configurations()[-1]

    def stored(self) -> Stored:
        """Return everything written by now: the archive, and the records that it is made of."""
        return committed_pieces(self.witness, super().stored())
