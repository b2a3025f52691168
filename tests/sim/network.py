"""The way between nodes and the object store: latencies, faults and scripts act on it."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from shalekv.errors import ShaleError
from tests.sim.errors import NodeCrashed
from tests.sim.faults import Faults
from tests.sim.nodes import Node
from tests.sim.tasks import to_us

if TYPE_CHECKING:
    from tests.sim.loop import SimLoop


@dataclass(frozen=True, slots=True)
class Match:
    """Selects requests: all fields must match; each is a shell pattern.

    `operation` is the method of the store. `name` is the object or, for a list, the prefix; for a
    delete, any of the names. `node` is the name of the sending node, in any incarnation. The first
    `nth - 1` matches, in the order of sending, are left alone.
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
    """Fate of a request."""

    SERVED = "served"
    REFUSED = "refused"
    LOST_REQUEST = "request lost"
    LOST_REPLY = "reply lost"
    LATE_REQUEST = "late"


class Gate:
    """Holds requests, or replies, at the store until the test releases them."""

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
        """Release what is held, and let later requests pass."""
        self._open = True
        held, self._held = self._held, []
        for go_on in held:
            go_on()

    def drop(self) -> None:
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
    """Fate of one request, and the gates on its way."""

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


T = TypeVar("T")

NEAR_TIMEOUT_MS = 3_600_000.0  # of a node near to the store, whose requests are only ever held


class NoAnswer(Exception):
    """The client of a request has given up, or was refused: `cause` has the reason."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Refused(NoAnswer):
    """The request was refused and not carried out, and the client can tell."""


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any = None
    error: ShaleError | NoAnswer | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way. `serve` applies it, and is called at most once."""

    sender: Node
    operation: str
    names: tuple[str, ...]
    serve: Callable[[], Any]
    plan: Plan
    reply: asyncio.Future[_Answer]
    reply_ms: float
    # of the caller, in which the reply is delivered
    context: Context = field(default_factory=copy_context)

    def __str__(self) -> str:
        names = self.names[0] if len(self.names) == 1 else f"{len(self.names)} objects"
        return f"{self.operation} {names} of {self.sender.label}"


class Network:
    """Carries requests to the node `store`, and replies back."""

    def __init__(self, loop: SimLoop, store: Node, random: Random, faults: Faults) -> None:
        """`faults` and `script` may be changed at any time; requests under way keep theirs."""
        self.faults = faults
        self.script = Script()
        self.near_ms: dict[str, float] = {}  # one way, of nodes that suffer no drawn faults
        self.last_arrival_us = 0  # of all requests sent
        self._loop = loop
        self._store = store
        self._random = random
        self._spell_start_us = -1.0
        self._spell_end_us = -1.0
        self._quota = math.inf  # requests that may be sent now
        self._quota_at_s = 0.0

    async def ask(
        self, sender: Node, operation: str, names: tuple[str, ...], serve: Callable[[], T]
    ) -> T:
        """The value of `serve()`, which runs at the store when the request arrives there.

        Raises what `serve` raises, and `NoAnswer`. Cancelling this call does not call the request
        back.
        """
        if not sender.alive:
            raise NodeCrashed(sender.label)
        plan = self.script.plan_for(operation, names, sender.name)
        if sender.name in self.near_ms:
            plan = plan or Plan()
            request_ms = reply_ms = self.near_ms[sender.name]
            timeout_ms, cause = NEAR_TIMEOUT_MS, "the node near to the store gave up"
        else:
            plan = plan or Plan(self._draw_fate())
            factor = self._spell_factor() * (self.faults.list_factor if operation == "list" else 1)
            request_ms = self.faults.request_ms.draw(self._random) * factor
            reply_ms = self.faults.reply_ms.draw(self._random) * factor
            timeout_ms, cause = self._timeout(plan.fate, request_ms + reply_ms)
        reply: asyncio.Future[_Answer] = self._loop.create_future()
        request = Request(sender, operation, names, serve, plan, reply, reply_ms)
        if plan.fate is Fate.LATE_REQUEST:
            request_ms = timeout_ms + self.faults.late_ms.draw(self._random)
        self._loop.call_later(request_ms / 1000, self._arrive, request, context=self._store.context)
        arrival_us = self._loop.now_us + to_us(request_ms / 1000)
        self.last_arrival_us = max(self.last_arrival_us, arrival_us)
        giving_up = self._loop.call_later(timeout_ms / 1000, self._give_up, request, cause)
        try:
            answer = await reply
        finally:
            giving_up.cancel()
        if answer.error is not None:
            raise answer.error
        value: T = answer.value
        return value

    def _draw_fate(self) -> Fate:
        if self._throttled():
            return Fate.REFUSED
        faults, drawn = self.faults, self._random.random()
        for fate, probability in (
            (Fate.LOST_REQUEST, faults.lost_request),
            (Fate.LOST_REPLY, faults.lost_reply),
            (Fate.LATE_REQUEST, faults.late_request),
            (Fate.REFUSED, faults.refused),
        ):
            if drawn < probability:
                return fate
            drawn -= probability
        return Fate.SERVED

    def _throttled(self) -> bool:
        """Return whether requests come too fast; those of a second may come at once."""
        rate, now_s = self.faults.throttle_per_s, self._loop.time()
        if rate == math.inf:
            return False
        self._quota = min(rate, self._quota + (now_s - self._quota_at_s) * rate)
        self._quota_at_s = now_s
        if self._quota < 1:
            return True
        self._quota -= 1
        return False

    def _spell_factor(self) -> float:
        """The factor of latencies now: above 1 in a slow spell."""
        faults, now_us = self.faults, self._loop.now_us
        if faults.spell_every_ms == math.inf:
            return 1.0
        while now_us >= self._spell_end_us:
            wait_us = self._random.expovariate(1 / faults.spell_every_ms) * 1000
            self._spell_start_us = max(self._spell_end_us, 0.0) + wait_us
            self._spell_end_us = self._spell_start_us + faults.spell_ms.draw(self._random) * 1000
        return faults.spell_factor if now_us >= self._spell_start_us else 1.0

    def _timeout(self, fate: Fate, round_trip_ms: float) -> tuple[float, str]:
        """The time that the client waits for an answer, and the cause that it reports then."""
        faults = self.faults
        answered = fate is Fate.SERVED or fate is Fate.REFUSED
        if not answered and (faults.timeout_ms == math.inf or self._random.random() < faults.reset):
            return min(round_trip_ms * self._random.random(), faults.timeout_ms), "connection reset"
        return faults.timeout_ms, f"no answer within {faults.timeout_ms:g} ms"

    # --- at the store --------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        fate, gate = request.plan.fate, request.plan.request_gate
        if fate is Fate.LOST_REQUEST:
            self._note(f"{request}: lost on its way")
        elif fate is Fate.REFUSED:
            self._note(f"{request}: refused")
            self._reply(request, _Answer(error=Refused("503 slow down")))
        elif gate is not None:
            self._note(f"{request}: held at the store")
            gate.arrive(lambda: self._apply(request))
        else:
            self._apply(request)

    def _apply(self, request: Request) -> None:
        try:
            answer = _Answer(value=request.serve())
        except ShaleError as error:
            answer = _Answer(error=error)
        gate, fate = request.plan.reply_gate, request.plan.fate
        suffix = "" if fate is Fate.SERVED else f" ({fate.value})"
        self._note(f"{request}: {_outcome(answer)}{suffix}")
        if fate is not Fate.SERVED:
            return
        if gate is not None:
            gate.arrive(lambda: self._reply(request, answer))
        else:
            self._reply(request, answer)

    def _reply(self, request: Request, answer: _Answer) -> None:
        self._loop.call_later(
            request.reply_ms / 1000, _resolve, request.reply, answer, context=request.context
        )

    def _note(self, text: str) -> None:
        self._loop.note(text, self._store)

    # --- at the client -------------------------------------------------------------------------

    def _give_up(self, request: Request, cause: str) -> None:
        if not request.reply.done():
            self._loop.note(f"{request}: {cause}", request.sender)
            request.reply.set_result(_Answer(error=NoAnswer(cause)))


def _resolve(reply: asyncio.Future[_Answer], answer: _Answer) -> None:
    if not reply.done():
        reply.set_result(answer)


def _outcome(answer: _Answer) -> str:
    if answer.error is not None:
        return type(answer.error).__name__
    return type(answer.value).__name__
