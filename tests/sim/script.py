"""Faults on purpose: which request, and what becomes of it. Scenario tests are written with this.

gate = world.store.hold(Match("create", "manifest/*", node="b"))
await gate.reached()      # b's create has arrived at the store, and waits there
...                       # somebody else takes over
gate.release()            # only now it is applied
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Match:
    """Which requests are meant: all fields must fit; each is a shell pattern.

    `operation` is the method of the store. `name` is the object or, for a list, the prefix; of a
    delete, any of the names. `node` is the name of the node that sent it, in any incarnation.
    Counted in the order of sending, those before the `nth` are left alone.
    """

    operation: str = "*"
    name: str = "*"
    node: str = "*"
    nth: int = 1

    def fits(self, operation: str, names: Iterable[str], node: str) -> bool:
        return (
            _fits(operation, self.operation)
            and _fits(node, self.node)
            and any(_fits(name, self.name) for name in names)
        )


@lru_cache(4_096)  # a pattern that does not fit takes long, and the names are few
def _fits(text: str, pattern: str) -> bool:
    return pattern in {"*", text} or fnmatchcase(text, pattern)


class Fate(enum.Enum):
    """What becomes of a request."""

    SERVED = "served"
    REFUSED = "refused"
    LOST_REQUEST = "request lost"
    LOST_REPLY = "reply lost"
    LATE_REQUEST = "late"


class Gate:
    """Holds requests, or replies, at the store until it is told what to do with them."""

    def __init__(self) -> None:
        self.arrived_count = 0
        self._open = False
        self._held: list[Callable[[], None]] = []
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def reached(self, count: int = 1) -> None:
        """Wait until `count` requests have arrived at the gate, counted from the beginning."""
        if self.arrived_count < count:
            arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((count, arrival))
            await arrival

    def release(self) -> None:
        """Let what is held go on now, and what comes later pass."""
        self._open = True
        held, self._held = self._held, []
        for go_on in held:
            go_on()

    def drop(self) -> None:
        """What is held is lost; the gate stays closed."""
        self._held.clear()

    def arrive(self, go_on: Callable[[], None]) -> None:
        """For the store: something is at the gate, and `go_on` continues it."""
        self.arrived_count += 1
        for count, arrival in self._waiting:
            if count <= self.arrived_count and not arrival.done():
                arrival.set_result(None)
        if self._open:
            go_on()
        else:
            self._held.append(go_on)


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of one request, and where it is held on its way."""

    fate: Fate = Fate.SERVED
    request_gate: Gate | None = None
    reply_gate: Gate | None = None


@dataclass(slots=True)
class _Rule:
    match: Match
    plan: Plan
    times: float
    seen_count: int = field(default=0)
    used_count: int = field(default=0)


class Script:
    """The rules of a scenario. Where several fit a request, the one that was added first counts."""

    def __init__(self) -> None:
        self._rules: list[_Rule] = []

    def add(self, match: Match, plan: Plan, times: int | None) -> None:
        """From now on, `plan` for the next `times` requests that `match`, None for all."""
        self._rules.append(_Rule(match, plan, math.inf if times is None else times))

    def plan_for(self, operation: str, names: Iterable[str], node: str) -> Plan | None:
        """The plan for a request that is being sent, if there is one."""
        plan = None
        for rule in self._rules:
            if not rule.match.fits(operation, names, node):
                continue
            rule.seen_count += 1
            if plan is None and rule.seen_count >= rule.match.nth and rule.used_count < rule.times:
                rule.used_count += 1
                plan = rule.plan
        if plan is not None:
            self._rules = [rule for rule in self._rules if rule.used_count < rule.times]
        return plan
