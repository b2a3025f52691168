"""Workers without threads: functions run inline, and their results arrive after a virtual delay."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from tests.sim.faults import Span
from tests.sim.nodes import Node

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop

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

    As with threads, at most so many functions run at once and more wait in order; one that has
    started runs even if nobody waits for it any more; results come back in any order. The seed
    decides whether a function reads its arguments at the start of its delay or at the end, since
    code must not change what a worker reads.
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
        """The workers of `node`, whose functions take `delay_ms`."""
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
