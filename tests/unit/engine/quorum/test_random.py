"""Random troubles of links and nodes, and take-overs in between: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from shalekv.clock import LoopClock
from shalekv.engine.commit import Receipt
from shalekv.errors import QuorumUnavailable, ShaleError
from tests.kit.engine.running_log import Write
from tests.kit.quorum.links import InProcessLinks
from tests.kit.quorum.log import Ground, Writing, contents
from tests.sim.run import simulate
from tests.sim.world import World

WRITERS = 4
WRITES_EACH = 25


class _Troubles:
    """What goes wrong, for a while each time; never more than a minority of nodes is down."""

    def __init__(self, ground: Ground, random: Random) -> None:
        self.ground = ground
        self.random = random
        self.links: list[InProcessLinks] = []

    async def run(self) -> None:
        """Go on until cancelled; all is well again then."""
        addresses = [*self.ground.nodes.nodes]
        try:
            while True:
                await LoopClock().sleep_ms(self.random.uniform(1, 300))
                address = self.random.choice(addresses)
                node, links = self.ground.nodes[address], self.random.choice(self.links)
                match self.random.randrange(4):
                    case 0:
                        links.cut(address)
                    case 1:
                        node.hold()
                    case 2:
                        node.stop()
                    case _:
                        self.ground.log(address).has_room = False
                await LoopClock().sleep_ms(self.random.uniform(1, 800))
                self._mend()
        finally:
            self._mend()

    def _mend(self) -> None:
        for links in self.links:
            links.heal()
        for node in self.ground.nodes:
            node.start()
            node.let_go()
            node.log(self.ground.database_id).has_room = True


async def _write_all(writing: Writing, name: int, random: Random) -> list[tuple[bytes, Write]]:
    """Writes, one after another without waiting, as far as they are taken."""
    writes = []
    for number in range(WRITES_EACH):
        key = b"%d-%02d" % (name, number)
        try:
            writes.append((key, writing.write(key, bytes(random.randrange(2_000)))))
        except QuorumUnavailable:
            pass
        except ShaleError:
            break
        await LoopClock().sleep_ms(random.uniform(0, 40))
    return writes


async def _history(seed: int) -> None:
    random = Random(seed)
    ground = await Ground.created(random.choice([3, 5]))
    troubles = _Troubles(ground, random)
    writes: list[tuple[bytes, Write]] = []
    for name in range(WRITERS):
        troubles.links.append(ground.links())
        interval_ms = random.choice([0, 50, 500])
        async with ground.writing(troubles.links[-1], archive_interval_ms=interval_ms) as writing:
            found = {key for key, _ in await writing.contents()}
            _check(writes, found)
            async with asyncio.TaskGroup() as tasks:
                troubling = tasks.create_task(troubles.run())
                writes += await _write_all(writing, name, random)
                troubling.cancel()
            if random.random() < 0.5:
                troubles.links[-1].cut()  # this one is lost with what it has not been told
    found = {key for key, _ in contents(await ground.open())}
    _check(writes, found)
    assert {key for key, write in writes if write.told} >= found
    assert sum(isinstance(write.told[0], Receipt) for _, write in writes) > WRITES_EACH


def _check(writes: list[tuple[bytes, Write]], found: set[bytes]) -> None:
    acknowledged = {key for key, write in writes if isinstance(write.told[0], Receipt)}
    assert acknowledged <= found
    assert all(len(write.told) == 1 for _, write in writes)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_acknowledged_is_lost(seed: int) -> None:
    """Each write is told once; what was acknowledged is in every later opening (I1, I11)."""

    async def main(world: World) -> None:
        del world
        await _history(seed)

    simulate(seed, main)
