"""The writers of one database: started, crashed, and overtaken while they open."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TypeAlias

from shalekv.errors import (
    Fenced,
    ImplausibleTime,
    ManifestConflict,
    ObjectNotFound,
    OutcomeUnknown,
    ShaleError,
    SnapshotNotFound,
    StoreUnavailable,
)
from shalekv.format.names import WAL_FOLDER
from shalekv.server.database import create_database
from shalekv.server.writer import Writer
from shalekv.settings import StoreSettings, WriterConfig, WriterSettings
from shalekv.store.api import ObjectStore
from shalekv.write.quorum.links import Links
from tests.kit.constants import draw
from tests.sim.history import History
from tests.sim.network import Gate, Match
from tests.sim.nodes import Node
from tests.sim.options import Trouble
from tests.sim.simulation import Simulation, some_days_ms
from tests.sim.stored import Stored
from tests.sim.tiny import LOADING, NARROW, draw_settings, with_writer

# Errors by which a writer may end; others fail the run. `OutcomeUnknown`: its slot was compacted
# and collected before it learned of its object, and a slow opener has put a fence there.
ENDS = (Fenced, StoreUnavailable, ManifestConflict, OutcomeUnknown, ImplausibleTime)
LET_SERVE_ATTEMPTS = 3
WRITER_TIMEOUT_MS = 4_000.0  # timeout for what a writer is to do, at pace 1
NARROW_SHARE = 0.25  # share of the seeds in which writers have little memory
WRONG_SHARE = 0.1  # share of the openings to which the store's clock is days off
ROOMY = ("last", "recovered")  # in peace they get all requests at once, and must answer


def is_narrow(seed: int) -> bool:
    """Return whether writers have little memory in the run with this seed."""
    return Random(f"{seed}/narrow").random() < NARROW_SHARE


Draw: TypeAlias = Callable[[Random], WriterConfig]


class Cluster:
    """The writers of one database, and the history of their clients.

    Subclasses override `found`, `links_for` and `stored` if the log is elsewhere; here it is in the
    object store.
    """

    ends: tuple[type[ShaleError], ...] = ENDS

    def __init__(self, sim: Simulation, draw: Draw = draw_settings) -> None:
        """No writer runs yet; `draw` draws the settings of each opening."""
        self.sim = sim
        self.draw = draw
        self.history = History()
        self.running: dict[str, Node] = {}  # processes that open or serve
        self.writers: dict[str, Writer] = {}  # serving ones
        self.settings: dict[str, WriterSettings] = {}  # of running ones
        self.serving = asyncio.Event()  # whether there is one of these
        self.slow_openers: dict[str, Gate] = {}  # that have won an epoch and not begun to fence
        self.avoided: set[str] = set()  # writers that clients leave alone for now
        self.has_loads = False  # batches become files of the levels
        self.is_undisturbed = False  # no takeovers, whatever chaos draws
        self.beside: list[Callable[[], None]] = []  # each ends a concurrent activity
        self._slow_count = 0
        self._wrong_times = sim.random_for("wrong times")

    @property
    def pace(self) -> float:
        """Factor for durations: openings and writes take as long as the store makes them wait."""
        return max(0.25, math.sqrt(self.sim.store.faults.request_ms.high_ms) / 7)

    async def found(self) -> None:
        admin = self.sim.node("admin")
        runtime = self.sim.runtime_for(admin)
        await admin.run(create_database(self.store_for(admin), runtime, StoreSettings()))

    def store_for(self, node: Node) -> ObjectStore:
        """A new client of the store for a writer or a replica."""
        return self.sim.store_for(node)

    def links_for(self, node: Node) -> Links | None:  # noqa: ARG002
        """The way of a process to the safekeepers; None: there are none."""
        return None

    def stored(self) -> Stored:
        return Stored.read(self.sim.store)

    def start_writer(self, name: str, settings: WriterConfig) -> None:
        """Open the database on node `name`, which must not run a writer."""
        self.avoided.discard(name)
        if is_narrow(self.sim.seed) and name not in ROOMY:
            settings = with_writer(settings, NARROW)
        if self.has_loads:
            settings = with_writer(settings, LOADING)
            # In peace no compactor runs.
            draw({"shalekv.write.admission:UNCOMPACTED_LOADS_MAX": 10_000})
        self._draw_time(name)
        self.settings[name] = settings.writer
        node = self.running[name] = self.sim.node(name)
        node.start(self._serve(node, settings))

    def _draw_time(self, name: str) -> None:
        """Draw the clock error of the store, as this opening sees it, and of its machine."""
        off_ms, which = some_days_ms(self._wrong_times), self._wrong_times.random()
        if name in ROOMY or not self.sim.options.has(Trouble.CLOCKS):
            return
        store_off_ms = off_ms if which < WRONG_SHARE else 0
        self.sim.store.mislead(name, store_off_ms)
        self.sim.clock_of(name).wall_ahead_ms = off_ms if which > 1 - WRONG_SHARE else 0
        if store_off_ms:
            self.sim.note(f"{name} gets a time that is {store_off_ms} ms ahead")

    async def start_slow_opener(self, settings: WriterConfig, one_way_ms: float) -> str:
        """Start a writer that wins an epoch and then does not list the WAL until it is released.

        If a newer writer serves by then, it finds the first free slot there, `one_way_ms` from the
        store, and puts fences into it and the following ones. Returns its name.
        """
        self._slow_count += 1
        name = f"slow{self._slow_count}"
        self.sim.store.place_near(name, one_way_ms)
        gate = self.sim.store.hold(Match("list", f"{WAL_FOLDER}*", node=name), times=None)
        self.start_writer(name, settings)
        self.slow_openers[name] = gate
        await self.reached(gate)
        return name

    def release_opener(self, name: str) -> None:
        self.sim.note(f"{name} goes on to fence")
        self.slow_openers.pop(name).release()

    async def reached(self, gate: Gate) -> None:
        """Wait until something is at the gate, which may never come."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WRITER_TIMEOUT_MS * self.pace / 1000):
                await gate.reached()

    async def change_amid_takeover(self, random: Random) -> None:
        """Change the database while openers are held; here nothing."""

    def hold_objects(self, writer: str, *, times: int | None = None) -> Gate:
        """Hold WAL objects of a writer when they arrive at the store: `times` of them, or all."""
        return self.sim.store.hold(Match("create", f"{WAL_FOLDER}*", node=writer), times=times)

    async def let_serve(self, name: str, settings: WriterConfig) -> None:
        """See to it that the writer of that name serves, unless chaos is stronger."""
        for _ in range(LET_SERVE_ATTEMPTS):
            if name not in self.running:
                self.start_writer(name, settings)
            self.running[name].resume()
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITER_TIMEOUT_MS * self.pace / 1000):
                    while name in self.running:
                        if name in self.writers:
                            return
                        await self.sim.sleep_ms(40.0 * self.pace)

    def crash(self, name: str) -> None:
        self.running[name].crash()
        self._forget(name)

    def _forget(self, name: str) -> None:
        del self.running[name], self.settings[name]
        self.writers.pop(name, None)
        self.avoided.discard(name)
        if not self.writers:
            self.serving.clear()

    async def _serve(self, node: Node, settings: WriterConfig) -> None:
        try:
            ending = await self._open_and_run(node, settings)
        except self.ends as error:
            ending = error.reason
        self.history.endings.append(ending)
        self.sim.note(f"{node.label} ends: {ending}")
        # A process that has ended is gone; a node cannot do that to itself.
        self.sim.loop.call_soon(self._mark_ended, node, context=self.sim.loop.root.context)

    async def _open_and_run(self, node: Node, settings: WriterConfig) -> str:
        runtime, store = self.sim.runtime_for(node), self.store_for(node)
        links = self.links_for(node)
        try:
            writer = await Writer.open(store, settings=settings, runtime=runtime, links=links)
        except (ObjectNotFound, SnapshotNotFound):  # it stood still for longer than that lives
            return "TOO_SLOW"
        self.writers[node.name] = writer
        self.serving.set()
        await writer.run()
        return "CLOSED"

    def _mark_ended(self, node: Node) -> None:
        if self.running.get(node.name) is node:
            node.mark_ended()
            self._forget(node.name)
