"""Machines that run the shipped safekeeper: processes come and go, the disk stays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from shalekv.format.quorum.messages import to_proposer
from shalekv.protocol.membership import Member
from shalekv.protocol.quorum_records import ToProposer
from shalekv.rpc.adapter import Adapter
from shalekv.rpc.calls import Method
from shalekv.rpc.methods import safekeeper_methods
from shalekv.rpc.safekeeper_links import GrpcLinks
from shalekv.runtime import Runtime
from shalekv.server.safekeeper.node import Node as Safekeeper
from shalekv.server.safekeeper.propose import ProposeStream
from shalekv.server.safekeeper.service import SafekeeperService
from shalekv.settings import SafekeeperConfig, StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.v1 import safekeeper_pb2 as wire
from tests.sim.nodes import Node
from tests.sim.safekeepers.calls import SimChannel
from tests.sim.safekeepers.disk import DiskWorkers, Fuse, MachineDisk, PowerCut
from tests.sim.safekeepers.wires import Listener, Wires
from tests.sim.simulation import Simulation

URL = "memory://sim"  # of the database: safekeepers refuse a URL with an unknown scheme
DATA = Path("/data")
CALLS_MAX = 10_000


def links_of(wires: Wires, node: Node) -> GrpcLinks:
    """Return the shipped links of one process, over the simulated network."""
    return GrpcLinks(lambda address: SimChannel(wires, node, wires.listeners[address]))


class _WatchedProposing(ProposeStream):
    """Calls an observer with each reply before the writer gets it."""

    on_reply: Callable[[ToProposer], None]

    async def replies(self) -> AsyncIterator[wire.ProposeReply]:
        """The replies in the order of the messages; raises what ends the stream."""
        async for reply in super().replies():
            self.on_reply(to_proposer(reply))
            yield reply


class _WatchedService(SafekeeperService):
    """The shipped service, whose streams of writers are watched."""

    def __init__(self, node: Safekeeper, on_reply: Callable[[ToProposer], None]) -> None:
        super().__init__(node)
        self._on_reply = on_reply

    def propose(self) -> ProposeStream:
        proposing = _WatchedProposing(self._node)
        proposing.on_reply = self._on_reply
        return proposing


class Machine(Listener):
    """One machine: a name, an address, a disk, and at times a process."""

    def __init__(
        self,
        sim: Simulation,
        wires: Wires,
        name: str,
        *,
        on_synced: Callable[[Machine], None],
        on_sent: Callable[[Machine, ToProposer], None],
    ) -> None:
        """No process runs. `on_synced` is called after each sync, `on_sent` before each reply."""
        self.name = name
        self.address = f"{name}:1"
        self.disk = MachineDisk()
        self.is_powered = True
        self.node: Node | None = None
        self.methods: Mapping[str, Method] | None = None
        self.safekeeper: Safekeeper | None = None
        self._on_synced = on_synced
        self._on_sent = on_sent
        self._sim = sim
        self._wires = wires
        self._random = sim.random_for(f"machine {name}")
        self._fuse = Fuse()
        self._is_kill = False
        self.is_stopping = False  # its process was asked to end
        wires.listeners[self.address] = self

    @property
    def is_running(self) -> bool:
        return self.node is not None

    @property
    def members(self) -> list[Member]:
        """The members that its process has, of any database."""
        if self.safekeeper is None:
            return []
        ids = (status.member_id for status in self.safekeeper.status().members)
        return [Member(member_id, self.address) for member_id in ids]

    def start(self, settings: SafekeeperConfig) -> None:
        """Begin a process. REQUIRES: none runs."""
        self.is_powered = True
        self._wires.power_is_back(self)
        self._fuse = Fuse()
        self.disk.before_call = self._fuse.before_call
        self.disk.on_synced = lambda: self._on_synced(self)
        self.node = self._sim.node(self.name)
        self.node.start(self._run(self.node, settings))

    def cut_power(self) -> None:
        """The machine stops now; what was not synced is lost or torn."""
        if self.node is not None:
            self.node.crash()
            self._gone(is_kill=False)

    def kill(self) -> None:
        """The process ends now; what it has written stays."""
        if self.node is not None:
            self.node.crash()
            self._gone(is_kill=True)

    def crash_in(self, calls: int, *, only_syncs: bool, is_kill: bool) -> None:
        """The same, in the middle of what is done to the disk soon."""
        self._is_kill = is_kill
        self._fuse.light(calls, only_syncs=only_syncs)

    def spare_it(self) -> None:
        self._fuse.put_out()

    def wipe(self) -> None:
        """The disk is exchanged for an empty one. REQUIRES: no process runs."""
        self.disk = MachineDisk()
        self._on_synced(self)

    def stop(self) -> None:
        if self.node is not None and self.safekeeper is not None:
            self.is_stopping = True
            self._sim.loop.call_soon(self.safekeeper.close, context=self.node.context.copy())

    def _gone(self, *, is_kill: bool) -> None:
        self._forget()
        if not is_kill:
            self.is_powered = False
            after = self.disk.after_cut(self._random)
            assert isinstance(after, MachineDisk)
            self.disk = after
            self._sim.note(f"the power of {self.name} is cut")

    def _forget(self) -> None:
        self.node = self.methods = self.safekeeper = None
        self.is_stopping = False

    def _cut_short(self, node: Node) -> None:
        """The process has come to the call at which it dies."""
        if not node.alive:
            return
        node.exit()
        self._sim.loop.befallen["crashes"] += 1
        self._gone(is_kill=self._is_kill)

    async def _run(self, node: Node, settings: SafekeeperConfig) -> None:
        workers, sync_workers = self._workers(node, 2), self._workers(node, 1)
        random = self._sim.random_for(f"{node.label}/runtime")
        runtime = Runtime(self._sim.clock_of(node), random, workers)
        links = links_of(self._wires, node)

        def open_store(url: str, _runtime: Runtime, _settings: StoreSettings) -> ObjectStore:
            return store_of(self._sim, node, url)

        safekeeper = self.safekeeper = await Safekeeper.open(
            settings,
            runtime,
            sync_workers=sync_workers,
            filesystem=self.disk,
            links=links,
            open_store=open_store,
        )
        adapter = Adapter(runtime, calls_max=CALLS_MAX)
        self.methods = safekeeper_methods(_WatchedService(safekeeper, self._sent), adapter)
        await safekeeper.run()
        self.methods = None
        await sync_workers.run(_nothing)
        try:
            await safekeeper.release()
        except PowerCut:
            self._cut_short(node)
        self._sim.loop.call_soon(self._mark_ended, node, context=self._sim.loop.root.context)

    def _sent(self, reply: ToProposer) -> None:
        self._on_sent(self, reply)

    def _workers(self, node: Node, threads: int) -> DiskWorkers:
        random = self._sim.random_for(f"{node.label}/{threads} workers")
        return DiskWorkers(
            self._sim.loop, node, random, threads=threads, on_cut=lambda: self._cut_short(node)
        )

    def _mark_ended(self, node: Node) -> None:
        if self.node is node:
            node.mark_ended()
            self._forget()


def store_of(sim: Simulation, node: Node, url: str = URL) -> ObjectStore:
    """Return the store of the database for a process, under a URL that safekeepers know."""
    store = sim.store_for(node)
    store.url = url
    return store


def _nothing() -> None:
    """Runs when all that came before it has ended."""
