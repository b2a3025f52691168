"""What befalls safekeepers: crashes, torn writes, lost disks, cut wires, and changes of members."""

from __future__ import annotations

import asyncio
from random import Random

from shalekv.engine.quorum.changing import Changing
from shalekv.errors import ShaleError
from shalekv.settings import StoreSettings
from shalekv.store.cas import CasStore
from tests.sim.cluster import Cluster
from tests.sim.errors import NodeCrashed
from tests.sim.levels import whole_database
from tests.sim.options import Trouble
from tests.sim.requests import KEYS
from tests.sim.safekeepers.cluster import (
    QuorumCluster,
    check_i11_acknowledged_was_on_a_majority,
    check_i11_archived_is_committed,
)
from tests.sim.safekeepers.hosts import Machine
from tests.sim.serial import SerialOrder
from tests.sim.world import World

STEPS_MS = (10.0, 300.0, 2_000.0)
PAUSES_MS = (10.0, 1_000.0, 20_000.0)
FUSE_CALLS = 40  # a process that is to die dies at one of so many changes of its disk,
FUSE_SYNCS = 3  # or of so many syncs of its log
CHANGE_MS = 30_000.0
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
    "replace": 2,
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
        self._world = cluster.world
        self._random = self._world.random_for("chaos of safekeepers")
        self._change: asyncio.Task[None] | None = None
        self._refilling: dict[str, bytes] = {}  # machines with new disks, and who they were

    async def run(self, cluster: Cluster) -> None:
        """Go on until cancelled; then there are no faults, and all machines run."""
        random = self._random
        names, weights = list(EVENTS), list(EVENTS.values())
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._world.sleep_ms(
                        random.choice(STEPS_MS) * random.random() * cluster.pace
                    )
                    machine = random.choice([*self._cluster.machines.values()])
                    event = random.choices(names, weights)[0]
                    drawn = Random(random.getrandbits(64))
                    if event in _WHAT_IT_TAKES and not self._has(_WHAT_IT_TAKES[event]):
                        continue
                    self._befall(event, machine, drawn, tasks)
        finally:
            self.set_right()

    def set_right(self) -> None:
        self._cluster.wires.heal()
        for machine in self._cluster.machines.values():
            machine.spare_it()
            if machine.is_stopping:  # it would be down when it has come to its end
                machine.kill()
            self._start(machine)

    def _befall(
        self, event: str, machine: Machine, random: Random, tasks: asyncio.TaskGroup
    ) -> None:
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
                self._change = tasks.create_task(self._replace(random))

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
        self._refilling[machine.name] = held.control.identity.member_id
        self._world.note(f"{machine.name} has lost its disk")

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
        return machine.name in witness.held

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
        node = self._world.node("operator")
        store = CasStore(
            self._cluster.store_for(node), self._world.runtime_for(node), StoreSettings()
        )
        changing = Changing(store, self._cluster.links_for(node))
        try:
            async with asyncio.timeout(CHANGE_MS / 1_000):
                await node.run(changing.replace(old, new))
        except (ShaleError, TimeoutError, NodeCrashed) as error:
            self._world.note(f"{new} does not replace {old}: {error}")
            return
        self._world.note(f"{new} replaces {old}")

    def _has(self, trouble: Trouble) -> bool:
        return self._world.options.has(trouble)


async def quorum_database(world: World) -> None:
    """Run everything at once, then check everything. Raises `Violation`."""
    cluster = QuorumCluster(world)
    chaos = SafekeeperChaos(cluster)
    try:
        whole = await whole_database(world, cluster, [chaos.run])
    finally:
        cluster.witness.check_i11_told_is_on_disk()  # the cause of what may have gone wrong above
    check_i11_archived_is_committed(whole.stored, world.loop.now_us)
    check_i11_acknowledged_was_on_a_majority(SerialOrder(cluster.history, whole.stored, KEYS))
