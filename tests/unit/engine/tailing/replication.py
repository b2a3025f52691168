"""Replicas of a quorum database at random: tails break, members come and go, writers take over.

As in `tests.kit.engine.replication`: each reply is a state of the log with nothing left out, never
older than one before it, than its `min_seq`, or than it says (I6).
"""

from __future__ import annotations

import asyncio
from random import Random

from shalekv.core.manifest import WalMode
from tests.kit.engine.replica import pass_s
from tests.kit.engine.replication import KEYS, Replication
from tests.sim.world import World
from tests.unit.engine.tailing.ground import QuorumGround
from tests.unit.engine.tailing.safekeepers import Safekeeper

LIFE_S = 120
LOST = {b"lost": b"with the writer"}  # no reply shows that


class QuorumReplication(Replication):
    """One run."""

    ground: QuorumGround

    def __init__(self, world: World, ground: QuorumGround) -> None:
        super().__init__(world, ground)
        self.links = ground.links
        self._pending: list[tuple[int, int]] = []  # lsn and sequence number, not acknowledged
        self._numbers = len(ground.keepers)
        self._writing = asyncio.Lock()

    async def write(self, random: Random, k: int) -> None:
        """Commits, some of which end an object, in bursts and with pauses."""
        del k
        while True:
            await pass_s(random.choice([0.0, 0.001, 0.01, 0.1, 3.0]))
            async with self._writing:
                self._write(random)

    def _write(self, random: Random) -> None:
        if random.random() < 0.1:
            self.ground.seal()
        else:
            key, value = random.choice(KEYS), b"%d" % (self.ground.seq + 1)
            commit = self.ground.commit(**{key: value})
            self.log.write(key, value)
            self.ground.write(commit, ends_object=random.random() < 0.2)
            self._pending.append((self.ground.leader.log.last.lsn, commit.seq))
        self._acknowledge()

    async def archive(self, random: Random) -> None:
        """Archive, at times late; trim what is archived, or leave it."""
        while True:
            await pass_s(random.choice([0.05, 0.3, 2.0, 8.0]))
            await self.ground.archive(trims=random.random() < 0.6)

    async def trouble(self, random: Random) -> None:
        """Break tails, cut members off, replace them, elect writers."""
        while True:
            await pass_s(random.choice([0.1, 1.0, 4.0]))
            async with self._writing:
                await self._trouble(random)

    async def _trouble(self, random: Random) -> None:
        keepers = self.ground.keepers
        victim = random.choice(keepers)
        match random.randrange(6):
            case 0:
                victim.break_tails()
            case 1:
                victim.pieces_max = random.choice([None, 1, 3])
            case 2:
                victim.is_up = not victim.is_up
                victim.wake()
            case 3:  # a majority hears the writer, always
                for keeper in keepers:
                    keeper.hears = True
                victim.hears = random.random() < 0.5
                self.ground.tell_commit()
            case 4:
                await self._elect(random)
            case 5:
                await self._replace(random, victim)
        self._acknowledge()

    async def _elect(self, random: Random) -> None:
        """Another writer; what the last one had not committed may be lost."""
        minority = random.choice(self.ground.keepers)
        heard = [keeper.hears for keeper in self.ground.keepers]
        for keeper in self.ground.keepers:
            keeper.hears = keeper is minority
        lost = self._write_to_minority(random)
        for keeper, hears in zip(self.ground.keepers, heard, strict=True):
            keeper.hears = hears
        if random.random() < 0.5 and all(heard):
            minority.hears = False
        last_lsn = self.ground.leader.log.last.lsn
        await self.ground.elect()
        if self.ground.leader.first_own_lsn <= last_lsn:  # it was not found
            self.log.states[-1] = LOST
            self.ground.seq += 1
            self.log.states.append(self.log.states[-2])
        else:
            self._pending.append(lost)

    def _write_to_minority(self, random: Random) -> tuple[int, int]:
        key, value = random.choice(KEYS), b"%d" % (self.ground.seq + 1)
        commit = self.ground.commit(**{key: value})
        self.log.write(key, value)
        self.ground.write(commit)
        return self.ground.leader.log.last.lsn, commit.seq

    async def _replace(self, random: Random, victim: Safekeeper) -> None:
        """One member goes, and knows nothing of that; another one is in its place."""
        for keeper in self.ground.keepers:
            keeper.hears = True
        self.ground.tell_commit()
        self._numbers += 1
        kept = [keeper for keeper in self.ground.keepers if keeper is not victim]
        await self.ground.set_members([*kept, Safekeeper(self._numbers)])
        del random

    def _acknowledge(self) -> None:
        committed = self.ground.leader.committed_lsn
        for lsn, seq in self._pending:
            if lsn <= committed:
                self.log.acknowledge(seq)
        self._pending = [each for each in self._pending if each[0] > committed]


async def replicate(world: World) -> int:
    """Two replicas, three clients. How many replies were checked."""
    ground = await QuorumGround.opened(seed=world.seed)
    assert (await ground.manifest()).wal_mode is WalMode.QUORUM
    run = QuorumReplication(world, ground)
    try:
        async with asyncio.timeout(LIFE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(run.write(world.random_for("writer"), 1))
            for name in ("replica1", "replica2"):
                tasks.create_task(run.follow(name, world.random_for(name)))
            while len(run.readers) < 2:
                await pass_s(0.1)
            tasks.create_task(run.archive(world.random_for("archiver")))
            tasks.create_task(run.keep_house(world.random_for("janitor")))
            tasks.create_task(run.disturb(world.random_for("chaos")))
            tasks.create_task(run.trouble(world.random_for("trouble")))
            for number in range(3):
                tasks.create_task(run.read(world.random_for(f"client {number}")))
    except TimeoutError:
        return run.answered
    raise AssertionError
