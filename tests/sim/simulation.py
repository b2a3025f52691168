"""A simulation as its main task sees it: nodes, their clocks and workers, the store, randomness."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar, TypeVarTuple

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime
from shalekv.store.api import ObjectStore
from tests.sim.faults import Faults, Span
from tests.sim.loop import SimLoop
from tests.sim.nodes import Node
from tests.sim.options import ALL, Options
from tests.sim.store import EPOCH_MS, SimStore


class NodeClock(LoopClock):
    """The clock of one machine; it survives the processes that run there.

    Only what asks this clock sees its error: `asyncio.timeout` and its like follow the loop, and
    so the true time.
    """

    def __init__(self, loop: SimLoop, *, offset_ms: float = 0.0, drift_ppm: float = 0.0) -> None:
        """Ahead of true time by `offset_ms` and `drift_ppm` microseconds per second."""
        self.wall_ahead_ms = 0  # the error of the time of day
        self._loop = loop
        self._offset_ms = offset_ms
        self._rate = 1.0 + drift_ppm / 1e6

    def monotonic_ms(self) -> float:
        return self._loop.time() * 1000.0 * self._rate + self._offset_ms

    def wall_ms(self) -> int | None:
        return EPOCH_MS + self._loop.now_us // 1_000 + self.wall_ahead_ms

    async def sleep_ms(self, duration_ms: float) -> None:
        """Wait until this clock has moved by `duration_ms`; a jump does not shorten the wait."""
        await super().sleep_ms(duration_ms / self._rate)

    def jump_ms(self, ahead_ms: float) -> None:
        """Move the clock forward at once, as after a suspended machine."""
        if ahead_ms < 0:
            raise ValueError(f"a local clock only moves forward, not by {ahead_ms} ms")
        self._offset_ms += ahead_ms


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_DELAY_MS = Span(0.01, 20.0)


@dataclass(slots=True, eq=False)
class _Job:
    function: Callable[[], Any]
    done: asyncio.Future[Any]
    value: Any = field(default=None)
    error: Exception | None = field(default=None)


class SimWorkers:
    """The worker threads of one node.

    As with threads, a limited number of functions run at once and more wait in order; one that has
    started runs even if its caller has gone; results come back in any order. The seed decides
    whether a function reads its arguments at the start of its delay or at the end, since code must
    not change what a worker reads.
    """

    def __init__(
        self,
        loop: SimLoop,
        node: Node,
        random: Random,
        *,
        threads: int = 2,
        delay_ms: Span = _DELAY_MS,
    ) -> None:
        self._loop = loop
        self._node = node
        self._random = random
        self._delay_ms = delay_ms
        self._free_count = threads
        self._waiting: deque[_Job] = deque()

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """The result of ``function(*args)``; what it raises is raised here."""
        job = _Job(lambda: function(*args), self._loop.create_future())
        self._waiting.append(job)
        self._start()
        await job.done
        if job.error is not None:
            raise job.error
        value: T = job.value
        return value

    def _start(self) -> None:
        while self._free_count and self._waiting:
            job = self._waiting.popleft()
            if job.done.cancelled():
                continue
            self._free_count -= 1
            early = self._random.random() < 0.5
            if early:
                _compute(job)
            delay_s = self._delay_ms.draw(self._random) / 1000
            context = self._node.context.copy()
            self._loop.call_later(delay_s, self._finish, job, early, context=context)

    def _finish(self, job: _Job, computed: bool) -> None:  # noqa: FBT001 - a callback's argument
        if not computed:
            _compute(job)
        if not job.done.done():
            job.done.set_result(None)
        self._free_count += 1
        self._start()


def _compute(job: _Job) -> None:
    try:
        job.value = job.function()
    except Exception as error:  # noqa: BLE001 - is raised where the result is awaited
        job.error = error


_OFFSET_MS_MAX = 10.0**9
_DRIFT_PPM_MAX = 500.0
_DAY_MS = 86_400_000
_RESERVED = frozenset({"root", "store"})


def some_days_ms(random: Random) -> int:
    """Draw the error of a clock that is set wrong, forward or back."""
    return random.choice((-1, 1)) * random.randint(_DAY_MS, 20 * _DAY_MS)


class Simulation:
    """One run of the simulation: its nodes, their machines, and the object store.

    Methods that take a node accept its name, too; a name starts the node if none is alive.
    """

    def __init__(self, seed: int, loop: SimLoop, faults: Faults, options: Options = ALL) -> None:
        self.seed = seed
        self.options = options
        self.loop = loop
        self._purposes: set[str] = set()  # that have their generator
        self.rng = self.random_for("workload")
        self.store = SimStore(loop, self.random_for("store"), faults)
        self._nodes: dict[str, list[Node]] = {}
        self._clocks: dict[str, NodeClock] = {}
        self._runtimes: dict[Node, Runtime] = {}

    def node(self, name: str) -> Node:
        """The living process of that name; started if there is none, or none any more."""
        if name in _RESERVED:
            raise ValueError(f"{name!r} is the name of a node of the simulation itself")
        incarnations = self._nodes.setdefault(name, [])
        if not incarnations or not incarnations[-1].alive:
            incarnations.append(Node(self.loop, name, len(incarnations) + 1))
        return incarnations[-1]

    def find(self, name: str) -> Node | None:
        """The living process of that name, None if there is none; it is not started."""
        return next((node for node in self.nodes() if node.name == name), None)

    def nodes(self) -> list[Node]:
        """All living processes, in the order in which their names first appeared."""
        return [each[-1] for each in self._nodes.values() if each[-1].alive]

    def runtime_for(self, node: Node | str) -> Runtime:
        """Return the runtime of the process, always the same one.

        The clock is that of the machine and continues after a crash; randomness and workers are new
        with each process.
        """
        node = self._resolve(node)
        if node not in self._runtimes:
            random = self.random_for(f"{node.label}/runtime")
            workers = SimWorkers(self.loop, node, self.random_for(f"{node.label}/workers"))
            self._runtimes[node] = Runtime(self.clock_of(node), random, workers)
        return self._runtimes[node]

    def clock_of(self, node: Node | str) -> NodeClock:
        name = self._resolve(node).name
        if name not in self._clocks:
            random = self.random_for(f"{name}/clock")
            offset_ms = random.uniform(0.0, _OFFSET_MS_MAX)
            drift_ppm = random.uniform(-_DRIFT_PPM_MAX, _DRIFT_PPM_MAX)
            self._clocks[name] = NodeClock(self.loop, offset_ms=offset_ms, drift_ppm=drift_ppm)
        return self._clocks[name]

    def store_for(self, node: Node | str) -> ObjectStore:
        """A new client of the store for the process."""
        return self.store.client(self._resolve(node))

    def crash(self, node: Node | str) -> None:
        """See `Node.crash`. Nothing happens where no process of that name is alive."""
        for living in self.nodes():
            if node in {living, living.name}:
                living.crash()

    def pause(self, node: Node | str, duration_ms: float | None = None) -> None:
        self._resolve(node).pause(duration_ms)

    def resume(self, node: Node | str) -> None:
        self._resolve(node).resume()

    @property
    def now_ms(self) -> float:
        """True virtual time since the start of the run."""
        return self.loop.now_us / 1000

    async def sleep_ms(self, duration_ms: float) -> None:
        await LoopClock().sleep_ms(duration_ms)

    def note(self, text: str) -> None:
        self.loop.note(text)

    def random_for(self, purpose: str) -> Random:
        """A generator of its own for `purpose`, derived from the seed.

        A second one would draw what the first draws: clients would ask for the same in step, under
        the same idempotency keys. So each purpose has one only.
        """
        if purpose in self._purposes:
            raise ValueError(f"{purpose!r} has its generator already: say what sets this one apart")
        self._purposes.add(purpose)
        return Random(f"{self.seed}/{purpose}")

    def _resolve(self, node: Node | str) -> Node:
        return self.node(node) if isinstance(node, str) else node
