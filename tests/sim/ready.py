"""What can run now, and what will at a later moment; and which of it goes first.

A real loop runs callbacks in the order of `call_soon`. Correct code relies on some of that order,
and must not rely on the rest:

- Plain callbacks of one node run in that order, and none of them is overtaken by a step of a task
  of that node that became ready later. So the callbacks of a future run in the order in which
  they were added, and what `TaskGroup`, `gather`, `timeout` and `add_done_callback` book-keep has
  been booked when the task that awaits the future goes on.
- Steps of different tasks have no order: which of two ready tasks goes first is for the seed to
  decide. A step may also be overtaken by a plain callback that became ready after it, such as a
  timeout that fires between a result and its reader.
- Nodes share nothing but the store, so nothing is ordered between them.
"""

from __future__ import annotations

import heapq
import math
from random import Random

from tests.sim.nodes import Node
from tests.sim.tasks import SimHandle

NEVER_US = 10**18
_CANCELLED_MIN = 64  # fewer cancelled timers than this are not worth removing


class Ready:
    """The ready callbacks of all nodes, picked at random within the promises of a real loop.

    An entry that is a step of a task stands for itself. An entry that is a plain callback stands
    for "the next plain callback of that node". A step whose node has an older plain callback runs
    that one instead and stays; the entry that stood for it then finds nothing and is dropped.
    """

    def __init__(self, random: Random, kept: list[object]) -> None:
        """What belongs to crashed nodes goes to `kept`."""
        self._draw = random.random
        self._kept = kept
        self._entries: list[SimHandle] = []

    def push(self, handle: SimHandle) -> None:
        """`handle`, whose `order` is set, can run."""
        if not handle.is_step:
            handle.node.plain.append(handle)
        self._entries.append(handle)

    def unpark(self, node: Node) -> None:
        """What was set aside for `node` while it was paused can run."""
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
        """What belongs to crashed nodes goes to `kept`."""
        self._kept = kept
        self._heap: list[tuple[int, int, SimHandle]] = []
        self._cancelled_count = 0

    def push(self, handle: SimHandle) -> None:
        """`handle`, whose `due_us` and `order` are set, waits."""
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
