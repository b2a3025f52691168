"""Tasks, futures and handles whose hashes and names do not depend on addresses.

asyncio keeps tasks in sets (`TaskGroup`, `wait`, `all_tasks`) and walks through them, for example
to cancel them. The order of such a walk follows the hashes, and the default hash is the address.
Here the hash is a number that the loop counts up, so the order is the same in every run. Names are
counted per loop too; asyncio would count them per process.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import heapq
import math
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from random import Random
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from tests.sim.nodes import NODE, Node, current_node

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop


T = TypeVar("T")


class SimFuture(asyncio.Future[T]):
    """A future that remembers its number and its node."""

    def __init__(self, loop: SimLoop, number: int) -> None:
        self.number = number
        self.node = current_node(loop)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class SimTask(asyncio.Task[T]):
    """A task that remembers its number and its node."""

    def __init__(
        self,
        coro: Coroutine[Any, Any, T],
        loop: SimLoop,
        number: int,
        *,
        name: object = None,
        context: Context | None = None,
    ) -> None:
        self.number = number
        self.node = current_node(loop) if context is None else context.get(NODE, loop.root)
        self.label = getattr(coro, "__qualname__", type(coro).__qualname__)
        text = f"{self.label}#{number}" if name is None else str(name)
        super().__init__(coro, loop=loop, name=text, context=context)

    def __hash__(self) -> int:
        return self.number


class SimHandle(asyncio.TimerHandle):
    """A callback that is ready or waits for its time. `order` counts handles up.

    `is_step` distinguishes a step of a task from a plain callback, and `task` is that task. The
    constructor does not call the inherited one, which would read the debug flag and keep what is
    not needed here.
    """

    __slots__ = (
        "args",
        "callback",
        "context",
        "due_us",
        "is_cancelled",
        "is_step",
        "loop",
        "node",
        "order",
        "task",
    )

    def __init__(
        self,
        loop: SimLoop,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self.loop = loop
        self.callback = callback
        self.args = args
        if context is None:
            context = copy_context()
        self.context = context
        self.node = context.get(NODE, loop.root)
        self.order = 0
        self.due_us = 0
        self.task = task = stepped_task(callback)
        self.is_step = task is not None
        self.is_cancelled = False

    def __repr__(self) -> str:
        return f"<SimHandle {self.order} of {self.node.label}: {self.label}>"

    @property
    def label(self) -> str:
        """A name for what runs that is the same in every run."""
        return describe(self.callback) if self.task is None else self.task.label

    def __hash__(self) -> int:
        return self.order

    def __eq__(self, other: object) -> bool:
        return self is other

    def __lt__(self, other: asyncio.TimerHandle) -> bool:
        return self.when() < other.when()

    def when(self) -> float:
        """The virtual time in seconds at which the callback is due."""
        return self.due_us / 1e6

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self.args = ()
            self.callback = _nothing
            self.task = None
            self.loop.handle_cancelled(self)

    def cancelled(self) -> bool:
        return self.is_cancelled


def _nothing() -> None:
    """Replace the callback of a cancelled handle, which it releases."""


def stepped_task(callback: Callable[..., object]) -> SimTask[Any] | None:
    """Return the task of which `callback` is a step, or None if it is a plain callback.

    asyncio wraps a task's steps into objects that have the task as `__self__`; so have the task's
    public methods, which are recognized by being found on the class.
    """
    task = getattr(callback, "__self__", None)
    if not isinstance(task, SimTask):
        return None
    name = getattr(callback, "__name__", None)
    return task if name is None or name not in _METHODS else None


_METHODS = frozenset(dir(SimTask))


def describe(callback: Callable[..., object]) -> str:
    """A name for `callback` that is the same in every run."""
    task = stepped_task(callback)
    if task is not None:
        return task.label
    while isinstance(callback, functools.partial):
        callback = callback.func
    return getattr(callback, "__qualname__", None) or type(callback).__qualname__


def describe_waiting(task: SimTask[Any]) -> str:
    """Name, node and stack of a task that waits, outermost call first."""
    lines = [f"{task.node.label}: task {task.get_name()!r} waits in"]
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame: FrameType | None = getattr(awaited, "cr_frame", None) or getattr(
            awaited, "ag_frame", None
        )
        if frame is not None:
            code = frame.f_code
            lines.append(f"    {code.co_qualname}  ({code.co_filename}:{frame.f_lineno})")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    if task.node.paused:
        lines[0] = f"{task.node.label} (paused): task {task.get_name()!r} waits in"
    return "\n".join(lines)


# A coroutine that awaits in a `finally` block has to be closed once more for each such block.
_CLOSE_ATTEMPTS = 16


def close_all(tasks: Iterable[SimTask[Any]]) -> None:
    """Close the coroutines of all `tasks` that are not done, first created first."""
    with _silence():
        for task in tasks:
            if not task.done():
                _close(task)


@contextmanager
def collect_later() -> Iterator[None]:
    """No garbage collection inside; all garbage of the inside is collected at its end.

    A collection runs finalizers, and when it starts depends on what was allocated before the run.
    What is older than the run is set aside, so that the collection at the end is quick.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        collect_now()
        gc.unfreeze()
        if enabled:
            gc.enable()


def collect_now() -> None:
    """Collect garbage now, at a moment that is the same in every run."""
    with _silence():
        gc.collect()


def _close(task: SimTask[Any]) -> None:
    coro = task.get_coro()
    for _ in range(_CLOSE_ATTEMPTS):
        with suppress(BaseException):  # errors after the end of the run are ignored
            coro.close()
            return


@contextmanager
def _silence() -> Iterator[None]:
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook


NEVER_US = 10**18
_CANCELLED_MIN = 64  # fewer cancelled timers than this are not worth removing


class Ready:
    """The ready callbacks of all nodes, picked at random within the promises of a real loop.

    An entry that is a step of a task represents that step. An entry that is a plain callback
    represents "the next plain callback of that node". A step whose node has an older plain callback
    runs that one instead and stays; the entry of that callback then finds nothing and is dropped.
    """

    def __init__(self, random: Random, kept: list[object]) -> None:
        self._draw = random.random
        self._kept = kept
        self._entries: list[SimHandle] = []

    def push(self, handle: SimHandle) -> None:
        if not handle.is_step:
            handle.node.plain.append(handle)
        self._entries.append(handle)

    def unpark(self, node: Node) -> None:
        self._entries += node.parked
        node.parked.clear()

    def pick(self) -> SimHandle | None:
        """The next callback to run, or None if no running node has one."""
        entries = self._entries
        while entries:
            index = int(self._draw() * len(entries))
            handle = entries[index]
            node = handle.node
            running = node.alive and not node.paused
            plain = node.plain
            blocked = handle.is_step and plain and plain[0].order < handle.order
            if not running or not blocked:
                entries[index] = entries[-1]
                entries.pop()
            if not running:
                (node.parked if node.alive else self._kept).append(handle)
                continue
            if blocked or not handle.is_step:
                if not plain:
                    continue
                handle = plain.popleft()
            if not handle.is_cancelled:
                return handle
        return None

    def clear(self) -> None:
        self._entries.clear()


class Timers:
    """The callbacks that wait for their time."""

    def __init__(self, kept: list[object]) -> None:
        self._kept = kept
        self._heap: list[tuple[int, int, SimHandle]] = []
        self._cancelled_count = 0

    def push(self, handle: SimHandle) -> None:
        heapq.heappush(self._heap, (handle.due_us, handle.order, handle))

    def pop_next(self) -> list[SimHandle]:
        """All that is due at the earliest moment at which anything is, oldest first."""
        due: list[SimHandle] = []
        heap = self._heap
        while heap and (not due or heap[0][0] == due[0].due_us):
            handle = heapq.heappop(heap)[2]
            if handle.is_cancelled:
                self._cancelled_count -= 1
            elif handle.node.alive:
                due.append(handle)
            else:
                self._kept.append(handle)
        return due

    def count_cancelled(self) -> None:
        """One that waits was cancelled; when most are, they are removed."""
        self._cancelled_count += 1
        if self._cancelled_count > max(_CANCELLED_MIN, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if not entry[2].is_cancelled]
            heapq.heapify(self._heap)
            self._cancelled_count = 0

    def clear(self) -> None:
        self._heap.clear()


def to_us(seconds: float) -> int:
    """Whole microseconds, rounded up but for what rounding of floats has added."""
    return math.ceil(seconds * 1e6 - 1e-3) if seconds < NEVER_US / 1e6 else NEVER_US
