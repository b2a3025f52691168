"""The network between nodes: connections that are slow, cut one way or both, reset, or forgotten.

Bytes of one stream arrive in order or not at all. A connection breaks for each of its ends by
itself: at once where a process has ended or a reset arrives, and only after a keepalive where the
power is gone or nothing comes through.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tests.sim.errors import NodeCrashed
from tests.sim.faults import Span
from tests.sim.nodes import Node
from tests.sim.tasks import to_us

if TYPE_CHECKING:
    from shalekv.rpc.calls import Method
    from tests.sim.loop import SimLoop
    from tests.sim.simulation import Simulation

ItemT = TypeVar("ItemT")

WINDOW_ITEMS = 12  # unread items of one stream at which its writer waits
KEEPALIVE_MS = (400.0, 3_000.0, 30_000.0)
RETRY_MS = Span(1.0, 1_000.0)  # until a peer that was cut off is called again


class Listener(Protocol):
    """A machine that others call."""

    name: str
    is_powered: bool
    node: Node | None  # the process that runs there
    methods: Mapping[str, Method] | None  # by path; None: there is no server yet


class Wires:
    """All connections of one simulation."""

    def __init__(self, sim: Simulation, random: Random) -> None:
        self.loop: SimLoop = sim.loop
        self.random = random
        self.listeners: dict[str, Listener] = {}  # by address
        self.latency_ms = Span(0.05, random.choice([0.2, 2.0, 20.0]))
        self.keepalive_ms = random.choice(KEEPALIVE_MS)
        self._sim = sim
        self._cut: dict[tuple[str, str], None] = {}  # names of nodes, one way each
        self._lines: list[Line] = []
        self._on_heal: list[Callable[[], None]] = []
        self._watched: set[Node] = set()

    # Faults of the network.

    def cut(self, one: str, other: str) -> None:
        if (one, other) in self._cut:
            return
        self._cut[one, other] = None
        self.loop.note(f"nothing goes from {one} to {other}")
        for line in self._open_lines():
            if {one, other} == {line.client.name, line.server.name}:
                line.suspect()

    def heal(self) -> None:
        """Everything goes through again, what was held up as well."""
        if self._cut:
            self.loop.note("everybody reaches everybody")
        self._cut.clear()
        waiting, self._on_heal = self._on_heal, []
        for go_on in waiting:
            go_on()

    def reset_one(self) -> None:
        lines = self._open_lines()
        if lines:
            line = self.random.choice(lines)
            self.loop.note(f"the connection of {line.client.label} to {line.server.label} breaks")
            line.break_off()

    def is_cut(self, source: Node, target: Node) -> bool:
        return (source.name, target.name) in self._cut

    def is_parted(self, one: Node, other: Node) -> bool:
        return self.is_cut(one, other) or self.is_cut(other, one)

    def when_healed(self, go_on: Callable[[], None]) -> None:
        self._on_heal.append(go_on)

    def power_is_back(self, listener: Listener) -> None:
        for line in self._open_lines():
            if line.server.name == listener.name and not line.server.alive:
                self.later(line.lose_client)

    # Its parts.

    def connect(self, client: Node, server: Node, on_lost: Callable[[], None]) -> Line:
        line = Line(self, client, server, on_lost)
        self._lines = [*self._open_lines(), line]
        self.watch(client)
        self.watch(server)
        return line

    def watch(self, node: Node) -> None:
        if node not in self._watched:
            self._watched.add(node)
            self.loop.root.start(self._watch(node))

    def later(self, act: Callable[[], None], delay_ms: float | None = None) -> None:
        delay_ms = self.draw_ms() if delay_ms is None else delay_ms
        self.loop.call_later(delay_ms / 1_000, act, context=self.loop.root.context)

    def draw_ms(self) -> float:
        return self.latency_ms.draw(self.random)

    def _open_lines(self) -> list[Line]:
        return [line for line in self._lines if line.is_open]

    async def _watch(self, node: Node) -> None:
        try:
            await node.run(_for_ever())
        except NodeCrashed:
            for line in self._open_lines():
                line.ended(node)


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


class Pipe(Generic[ItemT]):
    """One way of a stream. What was put in arrives in this order, or the rest does not."""

    def __init__(
        self, wires: Wires, source: Node, target: Node, deliver: Callable[[ItemT], None]
    ) -> None:
        self._wires = wires
        self._source = source
        self._target = target
        self._deliver = deliver
        self._flying: deque[ItemT] = deque()
        self._unread = 0
        self._last_due_us = 0
        self._is_shut = False
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def is_full(self) -> bool:
        return len(self._flying) + self._unread >= WINDOW_ITEMS

    def put(self, item: ItemT) -> None:
        if self._is_shut:
            return
        self._flying.append(item)
        self._schedule()

    async def until_writable(self) -> None:
        """Wait until items can be sent, or it is shut."""
        while self.is_full and not self._is_shut:
            waiter = self._wires.loop.create_future()
            self._waiting.append(waiter)
            await waiter

    def was_read(self) -> None:
        self._unread -= 1
        self._wake()

    def lose_some(self) -> None:
        for _ in range(self._wires.random.randint(0, len(self._flying))):
            self._flying.pop()

    def shut(self) -> None:
        """Nothing is put in any more, and what is on its way does not arrive."""
        self._is_shut = True
        self._flying.clear()
        self._wake()

    def _schedule(self) -> None:
        loop = self._wires.loop
        due_us = loop.now_us + to_us(self._wires.draw_ms() / 1_000)
        self._last_due_us = max(self._last_due_us, due_us)
        delay_s = (self._last_due_us - loop.now_us) / 1e6
        loop.call_later(delay_s, self._arrive, context=self._target.context)

    def _arrive(self) -> None:
        if not self._flying:
            return
        if self._wires.is_cut(self._source, self._target):
            self._wires.when_healed(self._schedule)
            return
        self._unread += 1
        self._deliver(self._flying.popleft())

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


class Stream(Protocol):
    """Items that go over a connection, and its end, at each side."""

    def lost_at_client(self) -> None:
        """Nothing comes any more."""

    def lost_at_server(self) -> None:
        """Close the server's side: its process is gone."""

    def sender_is_gone(self, node: Node) -> None:
        """The end of what this process has sent may not arrive."""


class Line:
    """One connection."""

    def __init__(
        self, wires: Wires, client: Node, server: Node, on_lost: Callable[[], None]
    ) -> None:
        """Both sides have it. `on_lost` is called when the client's side has ended."""
        self.wires = wires
        self.client = client
        self.server = server
        self.streams: dict[Stream, None] = {}
        self._on_lost = on_lost
        self._has_client = self._has_server = True

    @property
    def is_open(self) -> bool:
        has_client = self._has_client and self.client.alive
        return has_client or (self._has_server and self.server.alive)

    @property
    def is_usable(self) -> bool:
        return self._has_client

    def break_off(self) -> None:
        self.wires.later(self.lose_client)
        self.wires.later(self.lose_server)

    def suspect(self) -> None:
        """Let nothing through for now, at least one way: a waiting peer gives up."""
        wires = self.wires
        for lose in (self._lose_client_if_cut, self._lose_server_if_cut):
            wires.later(lose, wires.keepalive_ms * (0.5 + wires.random.random()))

    def ended(self, node: Node) -> None:
        """The process at one of the ends is gone; the machine may be, too."""
        wires = self.wires
        for stream in self.streams:
            stream.sender_is_gone(node)
        is_reported = wires.random.random() < 0.5
        delay_ms = None if is_reported else wires.keepalive_ms * (0.5 + wires.random.random())
        wires.later(self.lose_server if node is self.client else self.lose_client, delay_ms)

    def lose_client(self) -> None:
        if not self._has_client:
            return
        self._has_client = False
        for stream in list(self.streams):
            stream.lost_at_client()
        self._on_lost()
        self._when_reached(self.lose_server)

    def lose_server(self) -> None:
        if not self._has_server:
            return
        self._has_server = False
        for stream in list(self.streams):
            stream.lost_at_server()
        self._when_reached(self.lose_client)

    def _when_reached(self, act: Callable[[], None]) -> None:
        """Have one side notify the other, as soon as that can be reached."""
        if self._is_cut:
            self.wires.when_healed(lambda: self.wires.later(act))
        else:
            self.wires.later(act)

    @property
    def _is_cut(self) -> bool:
        return self.wires.is_parted(self.client, self.server)

    def _lose_client_if_cut(self) -> None:
        if self._is_cut:
            self.lose_client()

    def _lose_server_if_cut(self) -> None:
        if self._is_cut:
            self.lose_server()
