"""Nodes: the processes of a simulated cluster, which can crash, be paused and resume.

A node is a name and a context variable. Every task, callback and timer runs in a `Context`, which
the tasks it starts inherit. So the loop knows the node of each of them, while the code that runs
does not know that there are nodes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from shalekv.errors import ShaleError
from tests.sim.errors import NodeCrashed, SimulationError

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop
    from tests.sim.tasks import SimHandle

T = TypeVar("T")

_EXPECTED = (type(None), ShaleError, NodeCrashed, TimeoutError)
NODE: ContextVar[Node] = ContextVar("tests.sim.node")


class Node:
    """One process, from its start to its crash; a restarted one is another `Node`.

    The loop reads `alive` and `paused` each time it is about to run something.
    """

    __slots__ = (
        "_callers",
        "_loop",
        "_pauses",
        "alive",
        "context",
        "label",
        "name",
        "parked",
        "paused",
        "plain",
        "started",
    )

    def __init__(self, loop: SimLoop, name: str, incarnation: int = 1) -> None:
        self.name = name
        self.label = name if incarnation == 1 else f"{name}/{incarnation}"
        self.alive = True
        self.paused = False
        self.started = False  # whether anything was ever run on it
        self.plain: deque[SimHandle] = deque()  # ready callbacks that are no steps of tasks
        self.parked: list[SimHandle] = []  # ready, but the node is paused
        self.context = Context()
        self.context.run(NODE.set, self)
        self._loop = loop
        self._pauses = 0
        self._callers: dict[asyncio.Future[Any], None] = {}

    def __repr__(self) -> str:
        return f"<node {self.label}>"

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """A task of this node that runs `coro`, and starts with an empty context."""
        if not self.alive:
            coro.close()
            raise NodeCrashed(self.label)
        self.started = True
        return self._loop.create_task(coro, name=name, context=self.context.copy())

    def start(self, coro: Coroutine[Any, Any, object], *, name: str | None = None) -> None:
        """Run `coro` on this node without a caller that waits for it: its error fails the run.

        The error is recorded at once, so also if the node crashes afterwards.
        """
        self.spawn(coro, name=name).add_done_callback(self._tell_error)

    def _tell_error(self, task: asyncio.Task[object]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            context = {"message": "what ran here has failed", "exception": error, "task": task}
            self._loop.call_exception_handler(context)

    async def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run `coro` on this node and return its result to a caller on another one.

        Raises what `coro` raises, and `NodeCrashed` as soon as the node crashes. Cancelling the
        call cancels `coro`; its error is then not reported, unless it is unexpected.
        """
        task = self.spawn(coro)
        done: asyncio.Future[None] = self._loop.create_future()
        task.add_done_callback(
            lambda ended: self._let_end(ended) if done.done() else done.set_result(None)
        )
        self._callers[done] = None
        try:
            await done
        except asyncio.CancelledError:
            task.cancel()
            if not done.cancelled():  # else the callback is still to come
                self._let_end(task)
            raise
        finally:
            del self._callers[done]
        try:
            return task.result()
        finally:
            del task  # an error of it would refer to it, and to all frames on its way, for ever

    def _let_end(self, task: asyncio.Task[Any]) -> None:
        """Report the error of a task whose caller has gone, unless a caller has to expect it."""
        ended = task.done() and not task.cancelled()
        if ended and not isinstance(task.exception(), _EXPECTED):
            self._tell_error(task)

    def crash(self) -> None:
        """Cut the power: nothing of this node runs ever again, no `finally` and no `except`.

        What it has sent is on its way and may still take effect. A second crash does nothing.
        """
        self._refuse_own("crash")
        self._loop.befallen["crashes"] += self.alive
        self._end("crashes")

    def mark_ended(self) -> None:
        """The process has ended by itself: nothing that is left of it runs any more."""
        self._refuse_own("end")
        self._end("has ended")

    def exit(self) -> None:
        """End the process from within: nothing of it runs after the current step.

        The step that calls this should have nothing left to do: it runs up to its next `await`.
        """
        self._end("exits")

    def _end(self, how: str) -> None:
        if not self.alive:
            return
        self.alive = False
        self._loop.note(how, self)
        for caller in self._callers:
            if not caller.done():
                caller.set_exception(NodeCrashed(self.label))

    def pause(self, duration_ms: float | None = None) -> None:
        """Stop the process, as SIGSTOP does, for `duration_ms` or until `resume`.

        Time passes; callbacks that become ready or due wait, and run afterwards. A pause of a
        paused node replaces the earlier one.
        """
        self._refuse_own("pause")
        self._loop.befallen["pauses"] += 1
        self._pauses += 1
        self.paused = True
        span = "until resumed" if duration_ms is None else f"for {duration_ms:g} ms"
        self._loop.note(f"is paused {span}", self)
        if duration_ms is not None:
            resume, context = self._end_of_pause, self._loop.root.context
            self._loop.call_later(duration_ms / 1000, resume, self._pauses, context=context)

    def resume(self) -> None:
        """Continue, as SIGCONT does. No effect on a node that is not paused."""
        if not self.paused:
            return
        self.paused = False
        if self.alive:
            self._loop.note("goes on", self)
            self._loop.unpark(self)

    def _end_of_pause(self, pause: int) -> None:
        if pause == self._pauses:
            self.resume()

    def _refuse_own(self, what: str) -> None:
        if current_node(self._loop) is self:
            raise SimulationError(
                f"{self.label} cannot {what} itself, as its current step would go on: let another "
                "node do it, or `exit`"
            )


def current_node(loop: SimLoop) -> Node:
    """The node whose code runs now; the root node where no node was set."""
    return NODE.get(loop.root)
