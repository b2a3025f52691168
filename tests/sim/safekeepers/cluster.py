"""A database whose log is in safekeepers: its machines, its writers, and the way between them."""

from __future__ import annotations

from shalekv.core.quorum.membership import Configuration
from shalekv.errors import NotAMember, QuorumUnavailable
from shalekv.roles.database import Quorum, create_database
from shalekv.settings import ServeSettings, StoreSettings
from shalekv.store.api import ObjectStore
from tests.sim.cluster import ENDS, Cluster
from tests.sim.nodes import Node
from tests.sim.safekeepers.hosts import Machine, SimLinks, store_of
from tests.sim.safekeepers.log import committed_pieces
from tests.sim.safekeepers.tiny import draw_quorum_writer, draw_safekeeper
from tests.sim.safekeepers.wires import Wires
from tests.sim.safekeepers.witness import Witness
from tests.sim.stored import Stored
from tests.sim.world import World

CONNECT_MS = 1_000
LOOK_MS = 20.0
COUNTS = (3, 3, 3, 5)


class QuorumCluster(Cluster):
    """Writers that commit to a majority of safekeepers."""

    # The members that a writer knows of may be retired while it opens.
    ends = (*ENDS, QuorumUnavailable, NotAMember)

    def __init__(self, world: World) -> None:
        """No machine is switched on yet."""
        super().__init__(world, draw_quorum_writer)
        self.wires = Wires(world, world.random_for("wires"))
        self.witness = Witness(world)
        self._random = world.random_for("safekeepers")
        self.member_count = self._random.choice(COUNTS)
        names = [f"sk{number}" for number in range(1, self.member_count + 2)]  # one is spare
        self.machines = {name: Machine(world, self.wires, name) for name in names}
        for machine in self.machines.values():
            machine.on_synced = self.witness.look
            machine.on_told = self.witness.told
            machine.on_cut = self.witness.cut

    async def found(self) -> None:
        """Switch on all machines, and create the database."""
        for machine in self.machines.values():
            self.start_machine(machine)
        while any(machine.methods is None for machine in self.machines.values()):
            await self.world.sleep_ms(LOOK_MS)
        admin = self.world.node("admin")
        members = [*self.machines.values()][: self.member_count]
        quorum = Quorum(self.links_for(admin), [machine.address for machine in members])
        runtime = self.world.runtime_for(admin)
        await admin.run(create_database(self.store_for(admin), runtime, StoreSettings(), quorum))

    def start_machine(self, machine: Machine) -> None:
        """Run a safekeeper there."""
        machine.start(draw_safekeeper(self._random, self.pace))

    def store_for(self, node: Node) -> ObjectStore:
        """A new client of the store, under the URL that safekeepers know."""
        return store_of(self.world, node)

    def links_for(self, node: Node, settings: ServeSettings | None = None) -> SimLinks:
        """The way to the safekeepers."""
        quorum = None if settings is None else settings.quorum
        timeout_ms = CONNECT_MS if quorum is None else quorum.safekeeper_connect_timeout_ms
        return SimLinks(self.wires, node, connect_timeout_ms=timeout_ms)

    def configuration(self) -> Configuration:
        """The members by the newest manifest."""
        return self.witness.configurations()[-1]

    def stored(self) -> Stored:
        """What was written by now: the archive, and the records that it is made of."""
        return committed_pieces(self.witness, super().stored())
