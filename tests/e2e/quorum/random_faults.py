"""Random faults: nodes and writers are killed, paused and restarted, and take over.

A safekeeper that is down is damaged now and then, one at a time, which a majority tolerates.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.clock import LoopClock
from tests.e2e.quorum import damage
from tests.kit.processes.child import Child
from tests.kit.processes.cluster import Cluster, is_sound

CALM_MS = (50, 500)
DOWN_MS = (0, 500)
STILL_MS = (100, 2_500)  # past the time-outs of writers, and sometimes below
READY_S = 120.0
FILLED_S = 200.0
DAMAGED_SHARE = 0.8  # share of the kills of a single safekeeper
# A writer may end by itself: superseded, without a majority, or in the race with another one.
ENDS = (ExitCode.FENCED, ExitCode.NO_QUORUM, ExitCode.CONFLICT, ExitCode.ADDRESS_IN_USE)


class RandomFaults:
    """Two concurrent sources of faults: one for the safekeepers, one for the writers."""

    def __init__(
        self, cluster: Cluster, addresses: list[str], flags: tuple[str, ...], random: Random
    ) -> None:
        """Writers listen on `addresses`, one at a time on each, and are started with `flags`."""
        self.made: Counter[str] = Counter()
        self._cluster = cluster
        self._addresses = addresses
        self._flags = flags
        self._random = random
        self._writers: list[Child | None] = [None] * len(addresses)
        self._clock = LoopClock()
        self._over = asyncio.Event()

    async def begin(self) -> None:
        self._writers[0] = first = self._start(0, create=True)
        await first.ready(within_s=READY_S)

    async def run(self, duration_s: float) -> None:
        """Cause faults for this time; then restart everything, until one writer serves."""
        asyncio.get_running_loop().call_later(duration_s, self._over.set)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._trouble_nodes(Random(self._random.getrandbits(64))))
            tasks.create_task(self._trouble_writers(Random(self._random.getrandbits(64))))

    async def settle(self) -> Child:
        """One writer is left, and it serves; all safekeepers are sound, or become so."""
        for seat, child in enumerate(self._writers):
            if child is not None and child.running:
                child.resume()
                await self._end(seat)
        while True:
            last = self._start(0)
            self._writers[0] = last
            if await self._serves(last):
                break
        for index in range(len(self._cluster.nodes)):  # damaged ones are filled again
            await self._cluster.until(index, is_sound, within_s=FILLED_S)
        return last

    async def _trouble_nodes(self, random: Random) -> None:
        count = len(self._cluster.nodes)
        while not self._over.is_set():
            await self._wait(random, CALM_MS)
            struck = random.sample(range(count), random.choice([1, 1, 1, 1, 2, count]))
            if random.random() < 0.6:
                self.made[f"{len(struck)} safekeepers killed"] += 1
                is_harmed = random.random() < DAMAGED_SHARE and await self._can_lose(struck)
                await self._cluster.kill(struck)
                await self._wait(random, DOWN_MS)
                if is_harmed:
                    self._damage(struck[0], random)
                for index in struck:
                    node = await self._cluster.start_node(index)
                    self.made["logs found damaged"] += len(damage.damage_events(node))
            else:
                self.made[f"{len(struck)} safekeepers paused"] += 1
                for index in struck:
                    self._cluster.node(index).pause()
                await self._wait(random, STILL_MS)
                for index in struck:
                    self._cluster.node(index).resume()

    async def _can_lose(self, struck: Sequence[int]) -> bool:
        """Return whether their log can be spared: it is one alone, and the others are sound."""
        others = {*range(len(self._cluster.nodes))} - {*struck}
        held = [await self._cluster.held_by(index) for index in others]
        return len(struck) == 1 and all(is_sound(each) for each in held)

    def _damage(self, index: int, random: Random) -> None:
        """Rot in the log of one that is down."""
        folder = self._cluster.log_folder(index)
        if damage.segments(folder):  # else all of it is in the archive
            harm = random.choice(damage.ALL)
            harm(folder)
            self.made[f"logs damaged ({harm.__name__})"] += 1

    async def _trouble_writers(self, random: Random) -> None:
        seat = 0
        while not self._over.is_set():
            await self._wait(random, CALM_MS)
            seat = await random.choice(
                [self._replace, self._take_over, self._take_over, self._stand_still]
            )(seat, random)
            await self._reopen(seat)

    async def _reopen(self, seat: int) -> None:
        """Start the writer until one serves: there may have been no majority for too long.

        One that is still opening when the next one is started may well be the later of the two.
        """
        child = self._writers[seat]
        assert child is not None
        while not await self._serves(child):
            self.made["writers that could not open"] += 1
            self._writers[seat] = child = self._start(seat)

    async def _replace(self, seat: int, random: Random) -> int:
        self.made["writers killed"] += 1
        await self._end(seat)
        await self._wait(random, (0, 500))
        self._writers[seat] = self._start(seat)
        return seat

    async def _take_over(self, seat: int, random: Random) -> int:
        """Start another writer beside the one that serves, which may be paused meanwhile."""
        other, before = 1 - seat, self._writers[seat]
        assert before is not None
        is_still = random.random() < 0.5
        self.made["take-overs" + " from one that paused" * is_still] += 1
        if is_still:
            before.pause()
        self._writers[other] = successor = self._start(other)
        served = await self._serves(successor)
        await self._wait(random, (0, 1_000))
        before.resume()
        if served and successor.running:
            code = await before.exited(within_s=READY_S)
            assert code in ENDS, before.report()
            return other
        await self._end(other)
        return seat

    async def _stand_still(self, seat: int, random: Random) -> int:
        self.made["writers paused"] += 1
        child = self._writers[seat]
        assert child is not None
        child.pause()
        await self._wait(random, STILL_MS)
        child.resume()
        return seat

    async def _serves(self, child: Child) -> bool:
        """Wait until a writer serves, or has ended for a good reason."""
        line = await child.line(
            lambda line: "listen" in line or "exit_code" in line, within_s=READY_S
        )
        if "listen" in line and child.running:
            await child.ready()  # its address stays the same from now on
            return True
        code = await child.exited(within_s=READY_S)
        assert code in ENDS, child.report()
        return False

    async def _end(self, seat: int) -> None:
        child, self._writers[seat] = self._writers[seat], None
        if child is not None and child.running:
            await child.kill()

    def _start(self, seat: int, *, create: bool = False) -> Child:
        listen = ("--listen", self._addresses[seat])
        return self._cluster.start_serve(*self._flags, *listen, create=create)

    async def _wait(self, random: Random, bounds_ms: tuple[int, int]) -> None:
        await self._clock.sleep_ms(random.uniform(*bounds_ms))
