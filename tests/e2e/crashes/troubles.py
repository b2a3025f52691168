"""Kills and stops of real processes, a number of each, at random moments and at chosen ones.

Each role has its own sequence of troubles, concurrently. A killed process is restarted. A stopped
process stays so for longer than its leases live, while another one does its work and the collector
deletes what seems to be garbage; then it resumes.
"""

from __future__ import annotations

import enum
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.clock import LoopClock
from tests.e2e.crashes.clients import Clients
from tests.e2e.crashes.fleet import (
    COLLECT_AGE_MS,
    WITHIN_S,
    Fleet,
    Role,
    Serving,
    draw_pin,
    events,
    is_stopped,
)
from tests.kit.processes.child import Child, epoch_of
from tests.kit.timeouts import until
from tests.servers.process import free_port

STOPPED_MS = (2_500, 3_500)  # leases and snapshots have expired by then, and their objects are old
CALM_MS = (0, 400)
PINNED_SHARE = 0.5
# An opener may lose the race for the manifest, and the store may be silent for too long for it.
OPENING_ENDS = (ExitCode.FENCED, ExitCode.CONFLICT, ExitCode.STORE)


class Kind(enum.Enum):
    """Kind of trouble of a process."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    TAKE_OVER = "taken over"  # while it is well


@dataclass(frozen=True, slots=True)
class Trouble:
    """The next trouble of a role: at the request that `pin` names, or at any moment."""

    kind: Kind
    pin: str


Plan = Mapping[Role, Mapping[Kind, int]]


def draw_troubles(role: Role, counts: Mapping[Kind, int], random: Random) -> list[Trouble]:
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    random.shuffle(kinds)
    troubles: list[Trouble] = []
    for kind in kinds:
        # A process that does the work of a stopped one is not stopped itself meanwhile.
        is_free = not troubles or troubles[-1].kind is Kind.KILL
        is_pinned = is_free and random.random() < PINNED_SHARE
        troubles.append(Trouble(kind, draw_pin(role, random) if is_pinned else ""))
    return troubles


class Troubles:
    """All that happens to the processes of one database."""

    def __init__(self, fleet: Fleet, clients: Clients, random: Random) -> None:
        self.made: Counter[tuple[Role, Kind]] = Counter()
        self.notes: Counter[str] = Counter()
        self.stopped_ms: list[float] = []  # how long each stood that was stopped
        self._past_their_pins: set[Child] = set()  # their pinned trouble happens at any moment
        self._fleet = fleet
        self._clients = clients
        self._random = random
        self._clock = LoopClock()

    async def writers(self, troubles: list[Trouble]) -> None:
        server = self._fleet.writers[-1]
        for trouble, following in _with_next(troubles):
            child = server.child
            if not trouble.pin:
                await self._clients.more(self._random.randint(3, 20))
            await self._moment(child, trouble)
            if trouble.kind is Kind.KILL:
                await self._kill(child)
                server.is_gone = True
                successor = await self.start_writer(following)
            else:
                successor = await self._take_over(child, trouble, following)
                server.is_gone = True
            self.made[Role.WRITER, trouble.kind] += 1
            server = successor

    async def compactors(self, troubles: list[Trouble]) -> None:
        child = self._fleet.start(Role.COMPACTOR, pin=troubles[0].pin)
        for trouble, following in _with_next(troubles):
            await _at_work(child, "compacted")
            await self._moment(child, trouble)
            if trouble.kind is Kind.KILL:
                await self._kill(child)
                successor = self._fleet.start(Role.COMPACTOR, pin=following)
            else:
                began_ms = self._pause(child)
                successor = self._fleet.start(Role.COMPACTOR, pin=following)
                await _at_work(successor, "compacted")
                await self._resume(child, began_ms)
                assert await child.exited(within_s=WITHIN_S) == ExitCode.FENCED, child.report()
            self.made[Role.COMPACTOR, trouble.kind] += 1
            child = successor
        await _at_work(child, "compacted")
        assert child.running, child.report()

    async def collectors(self, troubles: list[Trouble]) -> None:
        child = self._fleet.start(Role.COLLECTOR, pin=troubles[0].pin)
        for trouble, following in _with_next(troubles):
            await _at_work(child, "collected")
            await self._moment(child, trouble)
            if trouble.kind is Kind.KILL:
                await self._kill(child)
                successor = self._fleet.start(Role.COLLECTOR, pin=following)
            else:
                began_ms = self._pause(child)
                successor = self._fleet.start(Role.COLLECTOR, pin=following)
                await self._resume(child, began_ms)
                done = len(events(child, "collected"))
                await until(lambda: len(events(child, "collected")) > done, "a collection")  # noqa: B023
                assert await child.stop(within_s=WITHIN_S) == ExitCode.OK, child.report()
            self.made[Role.COLLECTOR, trouble.kind] += 1
            child = successor
        await _at_work(child, "collected")
        assert child.running, child.report()

    async def readers(self, troubles: list[Trouble]) -> None:
        """To readers, one at a time; all of them serve at the end."""
        readers = self._fleet.readers
        for trouble in troubles:
            seat = self._random.randrange(len(readers))
            child = readers[seat].child
            await self._clients.more_reads(seat, self._random.randint(1, 8))
            await self._calm()
            if trouble.kind is Kind.KILL:
                await self._kill(child)
                readers[seat].is_gone = True
                readers[seat] = await self.start_reader(listen=child.listen)
            else:
                await self._resume(child, self._pause(child))
            await self._clients.more_reads(seat, 3)
            self.made[Role.READER, trouble.kind] += 1

    async def start_writer(self, pin: str = "") -> Serving:
        """A writer that serves; an opener that fails for a good reason is started again."""
        while True:
            child = self._fleet.start(Role.WRITER, pin=pin)
            if await self._serves(child):
                server = Serving(child, epoch_of(child))
                self._fleet.writers.append(server)
                return server
            self.notes["writers that could not open"] += 1

    async def start_reader(self, listen: str = "") -> Serving:
        """A reader that serves, where another one did or at a port that is kept for it."""
        listen = listen or f"127.0.0.1:{free_port()}"
        while True:
            child = self._fleet.start(Role.READER, listen=listen)
            if await self._serves(child):
                return Serving(child)
            self.notes["readers that could not open"] += 1

    async def _serves(self, child: Child) -> bool:
        def is_decided() -> bool:
            if is_stopped(child):  # its moment came too early
                self.notes["pins that were met while opening"] += 1
                self._past_their_pins.add(child)
                child.resume()
            return any("listen" in line or "exit_code" in line for line in child.lines())

        await until(is_decided, "an opening", within_s=WITHIN_S)
        if child.running and any("listen" in line for line in child.lines()):
            await child.ready()
            return True
        assert await child.exited() in OPENING_ENDS, child.report()
        return False

    async def _take_over(self, child: Child, trouble: Trouble, following: str) -> Serving:
        """Another writer serves; the one before, wherever it stood, must find itself fenced."""
        began_ms = self._pause(child) if trouble.kind is Kind.STOP else 0.0
        successor = await self.start_writer(following)
        if trouble.kind is Kind.STOP:
            await self._clients.acknowledged_by(successor.epoch, 5)
            await self._resume(child, began_ms)
        else:
            child.resume()  # from its pin
        assert await child.exited(within_s=WITHIN_S) == ExitCode.FENCED, child.report()
        return successor

    async def _moment(self, child: Child, trouble: Trouble) -> None:
        """Wait for the moment of the trouble."""
        if trouble.pin and child not in self._past_their_pins:
            is_met = lambda: is_stopped(child) or not child.running  # noqa: E731
            await until(is_met, f"the pin {trouble.pin}", within_s=WITHIN_S)
        else:
            await self._calm()
        assert child.running, child.report()

    async def _calm(self) -> None:
        await self._clock.sleep_ms(self._random.uniform(*CALM_MS))

    async def _kill(self, child: Child) -> None:
        child.send(signal.SIGKILL)
        assert await child.exited() == -signal.SIGKILL, child.report()

    def _pause(self, child: Child) -> float:
        child.pause()
        return self._clock.monotonic_ms()

    async def _resume(self, child: Child, began_ms: float) -> None:
        """Resume a process that was stopped for long, while the collector was busy."""
        deleted = self._fleet.deletions()
        left_ms = began_ms + self._random.uniform(*STOPPED_MS) - self._clock.monotonic_ms()
        await self._clock.sleep_ms(max(left_ms, COLLECT_AGE_MS))
        # Nothing is collected without writes: a writer may be opening, or fail to.
        is_collected = lambda: self._fleet.deletions() > deleted  # noqa: E731
        await until(is_collected, "objects that were collected", within_s=WITHIN_S)
        assert is_stopped(child), child.report()
        self.stopped_ms.append(self._clock.monotonic_ms() - began_ms)
        child.resume()


def _with_next(troubles: list[Trouble]) -> list[tuple[Trouble, str]]:
    pins = [*(each.pin for each in troubles[1:]), ""]
    return list(zip(troubles, pins, strict=True))


async def _at_work(child: Child, name: str) -> None:
    """Wait until it has done something, or has met its pin before, or has ended."""

    def is_decided() -> bool:
        return bool(events(child, name)) or is_stopped(child) or not child.running

    await until(is_decided, f"{name!r} in the log", within_s=WITHIN_S)
