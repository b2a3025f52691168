"""Chaos for safekeepers: crashes, torn writes, lost disks, cut wires, and changes of members."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from random import Random

from shalekv.errors import ShaleError
from shalekv.protocol.manifest import WalMode
from shalekv.protocol.membership import Configuration, Member
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from shalekv.write.quorum.membership import Reconfiguration
from tests.sim.cluster import Cluster
from tests.sim.errors import NodeCrashed, Violation
from tests.sim.invariants.catalogue import checks
from tests.sim.levels import whole_database
from tests.sim.nodes import Node
from tests.sim.options import Trouble
from tests.sim.requests import KEYS
from tests.sim.safekeepers.cluster import (
    RETIRE_MS,
    QuorumCluster,
    check_i11_acknowledged_was_on_a_majority,
    check_i11_archived_is_committed,
)
from tests.sim.safekeepers.hosts import Machine
from tests.sim.safekeepers.witness import Witness
from tests.sim.serial import SerialOrder
from tests.sim.simulation import Simulation
from tests.sim.stored import current_manifest

POLLS = 14  # more than a safekeeper needs to find out that no manifest will name a member
POLL_MS = 1_000.0


async def members_are_those_named(cluster: QuorumCluster) -> None:
    """Wait until nothing is left over, within bounds. REQUIRES: peace, and all machines run."""
    sim = cluster.sim
    end_ms = sim.now_ms + POLLS * max(RETIRE_MS)
    while sim.now_ms < end_ms and any(_unnamed(cluster)):
        await sim.sleep_ms(POLL_MS)
    check_i13_no_member_is_left_over(cluster)
    check_i13_who_is_named_is_there(cluster.witness)


@checks(13, "quorum")
def check_i13_no_member_is_left_over(cluster: QuorumCluster) -> None:
    """Check that safekeepers soon delete members that no manifest names. Raises `Violation`."""
    left = [*_unnamed(cluster)]
    if left:
        raise Violation(f"I13: no manifest names {left}, and they are kept for ever")


@checks(13, "quorum")
def check_i13_who_is_named_is_there(witness: Witness) -> None:
    """Check that no safekeeper deletes a member that is named afterwards. Raises `Violation`."""
    if witness.named_late:
        raise Violation(f"I13: a manifest names {witness.named_late[0]}, which was let go of")


def _unnamed(cluster: QuorumCluster) -> Iterator[Member]:
    manifest = current_manifest(cluster.sim.store)
    is_quorum = manifest.wal_mode is WalMode.QUORUM
    named = Configuration.of(manifest).everyone if is_quorum else ()
    return (each for each in _held(cluster) if each not in named)


def _held(cluster: QuorumCluster) -> Iterator[Member]:
    for machine in cluster.machines.values():
        assert machine.safekeeper is not None
        yield from machine.members


STEPS_MS = (10.0, 300.0, 2_000.0)
PAUSES_MS = (10.0, 1_000.0, 20_000.0)
FUSE_CALLS = 40  # a process that is to die does so at one of this many changes of its disk,
FUSE_SYNCS = 3  # or of this many syncs of its log
CHANGE_MS = 100_000.0
STALLS_MS = (1_000.0, 20_000.0, 60_000.0)  # of an operator, at pace 1
SOON_MS = 3_000.0  # in which an operator's change is disturbed, at pace 1
REPLY_MS = (0.0, 3.0, 10.0)  # delay of a safekeeper's reply to an admission
EVENTS = {
    "crash": 2,
    "crash amid a change": 7,
    "pause": 2,
    "stop": 1,
    "start": 20,
    "cut": 3,
    "heal": 14,
    "reset": 4,
    "exchange a disk": 2,
    "replace": 5,
    "nothing": 20,
}
_WHAT_IT_TAKES = {
    "crash": Trouble.CRASHES,
    "crash amid a change": Trouble.CRASHES,
    "pause": Trouble.PAUSES,
    "cut": Trouble.PARTITIONS,
    "reset": Trouble.PARTITIONS,
    "exchange a disk": Trouble.DISKS,
    "replace": Trouble.TAKEOVERS,
}


class SafekeeperChaos:
    """Disturbs the machines of one database, and sets everything right in the end."""

    def __init__(self, cluster: QuorumCluster) -> None:
        self._cluster = cluster
        self._sim = cluster.sim
        self._random = self._sim.random_for("chaos of safekeepers")
        self._change: asyncio.Task[None] | None = None
        # machines with new disks, and their former member ids
        self._refilling: dict[str, bytes] = {}

    async def run(self, cluster: Cluster) -> None:
        """Run until cancelled; then faults end, and all machines run."""
        random = self._random
        names, weights = list(EVENTS), list(EVENTS.values())
        try:
            while True:
                await self._sim.sleep_ms(random.choice(STEPS_MS) * random.random() * cluster.pace)
                machine = random.choice([*self._cluster.machines.values()])
                event = random.choices(names, weights)[0]
                drawn = Random(random.getrandbits(64))
                if event in _WHAT_IT_TAKES and not self._has(_WHAT_IT_TAKES[event]):
                    continue
                self._befall(event, machine, drawn)
        finally:
            self.set_right()

    async def changed(self) -> None:
        """Wait until no change of members is in progress; a paused operator resumes in peace."""
        if self._change is not None:
            await self._change

    def set_right(self) -> None:
        self._cluster.wires.heal()
        for machine in self._cluster.machines.values():
            machine.spare_it()
            if machine.is_stopping:  # it would be down when it has come to its end
                machine.kill()
            self._start(machine)

    def _befall(self, event: str, machine: Machine, random: Random) -> None:
        wires = self._cluster.wires
        match event:
            case "crash" | "crash amid a change" | "pause" if machine.is_running:
                self._disturb(event, machine, random)
            case "stop":
                machine.stop()
            case "start":
                for each in self._cluster.machines.values():
                    self._start(each)
            case "cut":
                self._cut(machine, random)
            case "heal":
                wires.heal()
            case "reset":
                wires.reset_one()
            case "exchange a disk":
                self._exchange_disk(machine)
            case "replace" if self._change is None or self._change.done():
                self._change = asyncio.create_task(self._replace(random))

    def _disturb(self, event: str, machine: Machine, random: Random) -> None:
        is_kill = random.random() < 0.4 or not self._has(Trouble.DISKS)
        if event == "crash":
            (machine.kill if is_kill else machine.cut_power)()
        elif event == "pause" and machine.node is not None:
            machine.node.pause(random.choice(PAUSES_MS) * self._cluster.pace)
        else:
            only_syncs = random.random() < 0.7
            calls = random.randrange(FUSE_SYNCS if only_syncs else FUSE_CALLS)
            machine.crash_in(calls, only_syncs=only_syncs, is_kill=is_kill)

    def _start(self, machine: Machine) -> None:
        if machine.is_running:
            if machine.node is not None:
                machine.node.resume()
            return
        self._cluster.start_machine(machine)

    def _cut(self, machine: Machine, random: Random) -> None:
        """Between a safekeeper and some of the others, one way or both."""
        others = [name for name in self._cluster.machines if name != machine.name]
        others += [*self._cluster.running, "replica1", "replica2"]
        count = random.choice([1, 1, 2, len(others)])
        for other in random.sample(others, min(count, len(others))):
            ways = [(machine.name, other), (other, machine.name)]
            for way in random.choice([ways, ways, ways[:1], ways[1:]]):
                self._cluster.wires.cut(*way)

    def _exchange_disk(self, machine: Machine) -> None:
        """Lose what a member has, if others have all of it: of a majority it is never lost."""
        if self._cluster.is_switching or not self._may_lose(machine):
            return
        held = self._cluster.witness.held[machine.name]
        machine.cut_power()
        machine.wipe()
        self._cluster.witness.retired_us.pop(held.member_id)  # it did not go by its own decision
        self._refilling[machine.name] = held.member_id
        self._sim.note(f"{machine.name} has lost its disk")

    def _may_lose(self, machine: Machine) -> bool:
        witness = self._cluster.witness
        if not witness.configurations():
            return False
        configuration = self._cluster.configuration()
        if configuration.is_joint:
            return False
        held = {each.control.identity.member_id: each for each in witness.held.values()}
        end = witness.committed_end
        for member in configuration.members:
            if member.id not in held or held[member.id].last.rank < end:
                return False  # one that has not got everything is as good as lost
        lost = witness.held.get(machine.name)
        if lost is None:
            return False
        # A paused operator may be about to name the member that it has had admitted. Its loss and
        # that of another one would be the loss of a majority, until the change is cancelled.
        is_member = any(
            member.id == lost.control.identity.member_id for member in configuration.members
        )
        return is_member or self._change is None or self._change.done()

    async def _replace(self, random: Random) -> None:
        """Put a machine in the place of a member: one that has lost its disk, or the spare."""
        if not self._cluster.witness.configurations():
            return
        configuration = self._cluster.configuration()
        addresses = [member.address for member in configuration.members]
        by_address = {each.address: each for each in self._cluster.machines.values()}
        lost = [
            each.address
            for each in configuration.members
            if self._refilling.get(by_address[each.address].name) == each.id
        ]
        spare = [address for address in by_address if address not in addresses]
        old = random.choice(lost or addresses)
        new = random.choice([old, *spare]) if lost else random.choice(spare)
        node, changing = self._operator("operator")
        is_cancelled = random.random() < 0.2
        disturbing = asyncio.create_task(self._disturb_operator(node, by_address[new], random))
        try:
            async with asyncio.timeout(CHANGE_MS * self._cluster.pace / 1_000):
                await node.run(changing.replace(old, new))
            disturbing.cancel()
        except (ShaleError, TimeoutError, NodeCrashed) as error:
            self._sim.note(f"{new} does not replace {old}: {error}")
        else:
            self._sim.note(f"{new} replaces {old}")
        if is_cancelled:
            other, changing = self._operator("another operator")
            with suppress(ShaleError, TimeoutError):
                async with asyncio.timeout(CHANGE_MS / 1_000):
                    await other.run(changing.cancel())
                self._sim.note("the change was cancelled")

    def _operator(self, name: str) -> tuple[Node, Reconfiguration]:
        node = self._sim.node(name)
        runtime = self._sim.runtime_for(node)
        store = CasStore(self._cluster.store_for(node), runtime, StoreSettings())
        return node, Reconfiguration(store, self._cluster.links_for(node))

    async def _disturb_operator(self, node: Node, machine: Machine, random: Random) -> None:
        """Pause or kill the operator during its change, mostly after the safekeeper admitted the
        member.
        """
        how, duration_ms = random.random(), random.choice(STALLS_MS) * self._cluster.pace
        delay_ms = random.choice(REPLY_MS)
        before, end_ms = machine.members, self._sim.now_ms + SOON_MS * self._cluster.pace
        while machine.members in ([], before) and self._sim.now_ms < end_ms:
            await self._sim.sleep_ms(1.0)
        await self._sim.sleep_ms(delay_ms)
        if how < 0.2 and self._has(Trouble.CRASHES):
            node.crash()
        elif how < 0.7 and self._has(Trouble.PAUSES):
            node.pause(duration_ms)

    def _has(self, trouble: Trouble) -> bool:
        return self._sim.options.has(trouble)


async def quorum_database(sim: Simulation) -> None:
    """Run everything at once, then check everything. Raises `Violation`."""
    cluster = QuorumCluster(sim)
    chaos = SafekeeperChaos(cluster)
    try:
        whole = await whole_database(sim, cluster, [chaos.run])
    finally:
        cluster.witness.check_i11_acknowledged_is_on_disk()  # may be the cause of the failure above
    await chaos.changed()
    await members_are_those_named(cluster)
    check_i11_archived_is_committed(whole.stored, sim.loop.now_us)
    check_i11_acknowledged_was_on_a_majority(SerialOrder(cluster.history, whole.stored, KEYS))
