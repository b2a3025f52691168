"""The trace of a run: one hash over everything that ran, and its last lines for a reader."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

KEEP_LINES = 50
_FLUSH_STEPS = 1024


class Line(NamedTuple):
    """An event on a node at a moment of virtual time."""

    at_us: int
    node: str
    text: str


class Trace:
    """Two kinds of lines go in: *steps* (each callback that ran) and *events* (what they meant).

    An event is a request at the store, a crash, a pause, a note of the workload. All lines enter
    the hash; the last of each kind are kept. Nothing in a line may depend on addresses, on the
    hash seed of the interpreter, or on the wall clock.
    """

    def __init__(self, keep_lines: int = KEEP_LINES) -> None:
        self.step_count = 0
        self._steps: deque[tuple[int, str, str]] = deque(maxlen=keep_lines)
        self._events: deque[tuple[int, str, str]] = deque(maxlen=keep_lines)
        self._hash = hashlib.blake2b(digest_size=16)
        self._pending: list[str] = []

    @property
    def steps(self) -> list[Line]:
        return [Line(*each) for each in self._steps]

    @property
    def events(self) -> list[Line]:
        return [Line(*each) for each in self._events]

    def keep_all_events(self) -> None:
        self._events = deque(self._events)

    def step(self, at_us: int, node: str, callback: str) -> None:
        self.step_count += 1
        self._steps.append((at_us, node, callback))
        self._pending.append(f"{at_us} {node} {callback}\n")
        if not self.step_count % _FLUSH_STEPS:
            self._flush()

    def event(self, at_us: int, node: str, text: str) -> None:
        """Something that a reader of the timeline wants to see."""
        self._events.append((at_us, node, text))
        self._pending.append(f"{at_us} {node} ! {text}\n")

    def digest(self) -> str:
        """The hash over all lines up to now: equal for two runs with the same events."""
        self._flush()
        return self._hash.hexdigest()

    def _flush(self) -> None:
        self._hash.update("".join(self._pending).encode())
        self._pending.clear()


def timeline(lines: Iterable[Line]) -> str:
    """The lines as text, one column per node in order of appearance, equal times shown once."""
    rows = list(lines)
    nodes = list(dict.fromkeys(row.node for row in rows))
    width = max((len(node) for node in nodes), default=0)
    text = []
    before_us = -1
    for row in rows:
        time = f"{row.at_us / 1e6:14.6f}" if row.at_us != before_us else " " * 14
        lane = "  " * nodes.index(row.node)
        text.append(f"{time}  {row.node:<{width}}  {lane}{row.text}")
        before_us = row.at_us
    return "\n".join(text)
