"""A seeded event loop with virtual time, which runs unchanged asyncio code.

The seed picks the next ready callback at random, within the promises of a real loop (see
`tests.sim.tasks.Ready`). Time does not pass while anything is ready; then it jumps to the next
timer. It is counted in whole microseconds; a positive delay lasts at least one, so that waiting for
a rounded-off remainder makes progress. Timers that are due at one moment run in an order that the
seed decides.
"""

from __future__ import annotations

import asyncio
import math
import threading
from asyncio.events import _set_running_loop
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from random import Random
from sys import get_asyncgen_hooks, set_asyncgen_hooks
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from tests.sim.errors import Deadlock, Livelock, NotSimulated, OutOfTime, SimulationError
from tests.sim.nodes import Node, current_node
from tests.sim.tasks import (
    NEVER_US,
    Ready,
    SimFuture,
    SimHandle,
    SimTask,
    Timers,
    close_all,
    describe_waiting,
    to_us,
)
from tests.sim.trace import KEEP_LINES, Trace

_REFUSED = (
    # names and connections
    "getaddrinfo getnameinfo create_connection create_server create_unix_connection "
    "create_unix_server create_datagram_endpoint connect_accepted_socket start_tls sendfile "
    # sockets, files and pipes
    "add_reader remove_reader add_writer remove_writer connect_read_pipe connect_write_pipe "
    "sock_accept sock_connect sock_recv sock_recv_into sock_recvfrom sock_recvfrom_into "
    "sock_sendall sock_sendfile sock_sendto "
    # threads, processes and signals
    "run_in_executor set_default_executor shutdown_default_executor subprocess_exec "
    "subprocess_shell add_signal_handler remove_signal_handler "
    # would replace parts of the simulation
    "set_task_factory set_exception_handler"
).split()


class IsolatedLoop(asyncio.BaseEventLoop):
    """An event loop without I/O, threads or signals: methods that need them raise `NotSimulated`.

    The refusal comes from the call itself, before anything is awaited.
    """


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(_loop: IsolatedLoop, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotSimulated(name)

    refuse.__name__ = name
    refuse.__qualname__ = f"IsolatedLoop.{name}"
    return refuse


for _name in _REFUSED:
    setattr(IsolatedLoop, _name, _refusal(_name))


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEPS_PER_MOMENT_MAX = 1_000_000
_SWEEP_TASKS = 1024


class SimLoop(IsolatedLoop):
    """The loop. It runs one main task on the root node, in one thread, and is then closed."""

    def __init__(
        self, seed: int | str, *, limit_s: float = math.inf, keep_lines: int = KEEP_LINES
    ) -> None:
        """The same `seed` and main task give the same trace; `limit_s` ends endless runs."""
        self._running = self._stopped = self._over = False
        super().__init__()
        self.set_debug(enabled=False)
        self.trace = Trace(keep_lines)
        self.now_us = 0
        self.root = Node(self, "root")
        self.befallen: Counter[str] = Counter()  # events of nodes: crashes, pauses
        self.unhandled: list[tuple[str, str, BaseException | None]] = []  # node, message, error
        self._random = Random(f"{seed}/order")  # strings seed by their bytes, not their hash
        self._limit_us = to_us(limit_s)
        self._kept: list[object] = []  # of crashed nodes: must not be finalized before the end
        self._queue = Ready(self._random, self._kept)
        self._timers = Timers(self._kept)
        self._order = 0
        self._tasks: list[SimTask[Any]] = []
        self._sweep_at = _SWEEP_TASKS
        self._thread = threading.get_ident()

    # --- time and callbacks --------------------------------------------------------------------

    def time(self) -> float:
        return self.now_us / 1e6

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> SimHandle:
        """Run `callback` on the node of `context`, or on the node that calls."""
        return self._schedule(SimHandle(self, callback, args, context))

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> SimHandle:
        """Same as `call_soon`; calls from other threads or from outside the run are refused."""
        if not self._running or threading.get_ident() != self._thread:
            raise NotSimulated("call_soon_threadsafe from outside of the loop")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> SimHandle:
        """Run `callback` after `delay` seconds, rounded up to microseconds."""
        handle = SimHandle(self, callback, args, context)
        handle.due_us = self.now_us + (max(1, to_us(delay)) if delay > 0 else 0)
        return self._schedule(handle)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> SimHandle:
        """Run `callback` at the virtual time `when`, at once if it has passed."""
        handle = SimHandle(self, callback, args, context)
        handle.due_us = to_us(when)
        return self._schedule(handle)

    def _schedule(self, handle: SimHandle) -> SimHandle:
        self._order += 1
        handle.order = self._order
        if self._over or not handle.node.alive or handle.due_us >= NEVER_US:
            self._kept.append(handle)
        elif handle.due_us > self.now_us:
            self._timers.push(handle)
        else:
            self._queue.push(handle)
        return handle

    def handle_cancelled(self, handle: SimHandle) -> None:
        if handle.due_us > self.now_us:
            self._timers.count_cancelled()

    def unpark(self, node: Node) -> None:
        self._queue.unpark(node)

    # --- tasks and futures ---------------------------------------------------------------------

    def create_future(self) -> SimFuture[Any]:
        self._order += 1
        return SimFuture(self, self._order)

    def create_task(  # type: ignore[override]  # generators are no coroutines of ours
        self, coro: Coroutine[Any, Any, T], *, name: object = None, context: Context | None = None
    ) -> SimTask[T]:
        """A task of the node of `context`, or of the node that calls.

        The loop holds every task until it is done: one of a crashed node must not be finalized.
        """
        if self._over:
            coro.close()
            raise SimulationError("the run is over")
        self._order += 1
        task = SimTask(coro, self, self._order, name=name, context=context)
        self._tasks.append(task)
        if len(self._tasks) > self._sweep_at:
            self.drop_done()
            self._sweep_at = _SWEEP_TASKS + 2 * len(self._tasks)
        return task

    def drop_done(self) -> None:
        self._tasks = [task for task in self._tasks if not task.done()]

    def _finalize_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        """The last reference to a suspended asynchronous generator is gone: close it in a task."""
        if self._over or not current_node(self).alive:
            self._kept.append(generator)
        else:
            _ = self.create_task(generator.aclose())

    # --- running -------------------------------------------------------------------------------

    def run_until_complete(self, future: Any) -> Any:
        """The result of the main task, given as a coroutine or a future.

        Raises what it raises, and `Deadlock`, `Livelock` or `OutOfTime` when it would never end.
        """
        main = future if asyncio.isfuture(future) else self.root.spawn(future, name="main")
        main.add_done_callback(lambda _: self.stop(), context=self.root.context)
        self.run_forever()
        return main.result()

    def run_forever(self) -> None:
        """Run until `stop` is called, which ends the run after the current callback."""
        if self._running or self._over or threading.get_ident() != self._thread:
            raise SimulationError("a simulated loop runs once at a time, in its own thread")
        hooks = get_asyncgen_hooks()
        self._running, self._stopped = True, False
        set_asyncgen_hooks(firstiter=None, finalizer=self._finalize_generator)
        _set_running_loop(self)
        try:
            while not self._stopped:
                self._run_moment()
                if not self._stopped:
                    self._advance()
        finally:
            _set_running_loop(None)
            set_asyncgen_hooks(*hooks)
            self._running = False

    def _run_moment(self) -> None:
        """Run what is ready, and what becomes ready by that, until nothing is."""
        pick, trace = self._queue.pick, self.trace.step
        steps = 0
        while not self._stopped and (handle := pick()) is not None:
            trace(self.now_us, handle.node.label, handle.label)
            try:
                handle.context.run(handle.callback, *handle.args)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - recorded, fails the run
                self.call_exception_handler(
                    {"message": "a callback failed", "exception": error, "handle": handle}
                )
            steps += 1
            if steps >= STEPS_PER_MOMENT_MAX:
                raise Livelock(self._report(f"{steps} callbacks ran without time passing"))

    def _advance(self) -> None:
        """Let time pass until the next timer is due."""
        due = self._timers.pop_next()
        if not due:
            raise Deadlock(self._report("nothing is ready and no timer runs"))
        if due[0].due_us > self._limit_us:
            raise OutOfTime(self._report(f"{self._limit_us / 1e6:g} s have passed"))
        self.now_us = due[0].due_us
        if len(due) > 1:
            self._random.shuffle(due)
        for handle in due:
            self._schedule(handle)

    def _report(self, what: str) -> str:
        tasks = [task for task in self._tasks if task.node.alive and not task.done()]
        waiting = [describe_waiting(task) for task in tasks]
        return "\n".join([f"{what}; {len(waiting)} tasks are not done", *waiting])

    def stop(self) -> None:
        self._stopped = True

    def is_running(self) -> bool:
        return self._running

    def note(self, text: str, node: Node | None = None) -> None:
        """Write a line into the timeline, for `node` or the node that calls."""
        self.trace.event(self.now_us, (node or current_node(self)).label, text)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an unhandled error, unless it is that of a crashed node."""
        source = context.get("handle") or context.get("task") or context.get("future")
        node: Node = getattr(source, "node", None) or current_node(self)
        if node.alive and not self._over:
            self.unhandled.append((node.label, context["message"], context.get("exception")))

    def close(self) -> None:
        if self.is_closed():
            return
        self._over = True
        close_all(self._tasks)
        for held in (self._tasks, self._kept, self._queue, self._timers):
            held.clear()
        super().close()
