"""Group commit under faults, rivals and ends at any moment: one true answer for every write."""

from __future__ import annotations

from random import Random

import pytest

from shalekv.engine.commit import Receipt, changes_bytes
from shalekv.errors import OutcomeUnknown, ShaleError
from tests.kit.engine.running_log import Write
from tests.sim.faults import Faults
from tests.sim.run import simulate
from tests.sim.world import World
from tests.unit.engine.trials import ENDS, Trial


class WriteTrial(Trial):
    """Clients that put; every write has a value of its own."""

    def __init__(self, world: World, *, end: str) -> None:
        super().__init__(world, end=end, clients=6)
        self.writes: list[Write] = []

    async def client(self, number: int) -> None:
        random = Random(f"{self.world.seed}/client {number}")
        for count in range(40):
            write = Write(b"%d" % random.randrange(10), b"%d.%d" % (number, count))
            size_bytes = changes_bytes(write.changes)
            try:
                if not self.admission.try_admit(size_bytes):
                    await self.admission.wait(size_bytes)
                self.log.submit(write.changes, write.settle)
            except ShaleError:
                return
            self.writes.append(write)
            if random.random() < 0.5:
                await write.outcome()
            await self.world.sleep_ms(random.choice([0, 1, 30, 100]))

    def check(self) -> None:
        """Every write was told once, and what it was told is what is in the store."""
        durable = self.durable()
        for write in self.writes:
            (told,) = write.told
            change = write.changes[0]
            found = durable.get(change.value)
            if isinstance(told, Receipt):
                assert found == (change.key, told.seq, told.wal_id)
                landed = self.memtable.get(change.key)
                assert landed is not None
                assert landed.seq >= told.seq
            elif not isinstance(told, OutcomeUnknown):
                assert found is None, f"{change} was not lost: {told}"
        if self.end == "close" and self.log.is_closing:
            assert all(isinstance(write.told[0], Receipt) for write in self.writes)
        self.check_nothing_is_left()

    def durable(self) -> dict[bytes, tuple[bytes, int, int]]:
        """Key, number and slot of every value of ours in the store; slots are in order (I4)."""
        found: dict[bytes, tuple[bytes, int, int]] = {}
        last_seq = 0
        for wal_id, contents in self.objects().items():
            for entry in contents.points:
                assert entry.value not in found, "one write in two objects"
                found[entry.value] = (entry.key, entry.seq, wal_id)
            if contents.points:
                assert min(entry.seq for entry in contents.points) > last_seq
                last_seq = max(entry.seq for entry in contents.points)
        return found


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("seed", range(12))
def test_every_write_hears_the_truth_once(seed: int, end: str) -> None:
    """Acknowledged means durable where it was said, lost means nowhere; each is told once."""

    async def main(world: World) -> None:
        trial = WriteTrial(world, end=end)
        await trial.run()
        trial.check()

    simulate(seed, main, faults=Faults.swarm(Random(seed)))
