"""Replicas that are stopped for long, next to a writer, a compactor and a collector, at random.

Each reply must be a state of the log with nothing left out, never older than one before it, than
its `min_seq`, or than it says (I6). The simulation of the whole database has all the faults of a
store; here is none, and so much time goes into replicas that lose what protects them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from random import Random

from shalekv.engine.quorum.links import Links
from shalekv.errors import SeqNotReached, SnapshotNotFound, TooStale
from shalekv.roles.reader import Reader
from shalekv.roles.service import Call
from shalekv.settings import (
    CacheSettings,
    ReaderSettings,
    ReadSettings,
    SnapshotChoice,
    UrlSettings,
)
from shalekv.v1 import kv_pb2
from tests.kit.engine.replica import AskedStore, ReplicaGround, pass_s
from tests.kit.inline_runtime import gathered
from tests.sim.errors import Violation
from tests.sim.nodes import Node
from tests.sim.world import World

KEYS = ("a", "b", "c", "d")
LIFE_S = 150
TTL_S = 4
SLACK_MS = 20  # of clocks that drift apart
REFUSALS = (SeqNotReached, SnapshotNotFound, TooStale)
NO_CACHE = CacheSettings().model_copy(update={"block_cache_bytes": 0, "metadata_cache_bytes": 0})


@dataclass(slots=True)
class Log:
    """What the writer has written, and when it was acknowledged."""

    states: list[dict[bytes, bytes]] = field(default_factory=lambda: [{}])  # by sequence number
    acknowledged: list[tuple[float, int]] = field(default_factory=list)  # seconds, number

    def write(self, key: str, value: bytes) -> None:
        """The next commit."""
        self.states.append(self.states[-1] | {key.encode(): value})

    def acknowledge(self, seq: int) -> None:
        """The commit is durable, those before it or not."""
        self.acknowledged.append((asyncio.get_running_loop().time(), seq))

    def newest_before(self, at_s: float) -> int:
        """The greatest number that was acknowledged before that."""
        return max((seq for when_s, seq in self.acknowledged if when_s < at_s), default=0)


class Replication:
    """One run."""

    def __init__(self, world: World, ground: ReplicaGround) -> None:
        self.world = world
        self.ground = ground
        self.log = Log()
        self.readers: dict[str, tuple[Node, Reader]] = {}
        self.answered = 0
        self.links: Links | None = None

    async def write(self, random: Random, k: int) -> None:
        """Up to `k` objects are on their way at once, and land in any order."""
        while True:
            await pass_s(random.choice([0.01, 0.1, 5.0]))
            landing = []
            for _ in range(random.randint(1, k)):
                key = random.choice(KEYS)
                self.ground.slot += 1
                value = b"%d" % (self.ground.seq + 1)
                commit = self.ground.commit(**{key: value})
                self.log.write(key, value)
                landing.append((self.ground.slot, commit))
            random.shuffle(landing)
            for slot, commit in landing:
                await pass_s(random.choice([0.0, 0.02, 0.5]))
                await self.ground.fill_with(slot, self.ground.writer, commit)
                self.log.acknowledge(commit.seq)

    async def keep_house(self, random: Random) -> None:
        """Compact and collect."""
        while True:
            await pass_s(random.choice([0.1, 1.0, 10.0]))
            await self.ground.compact()
            if random.random() < 0.5:
                await self.ground.collect()

    async def disturb(self, random: Random) -> None:
        """Stop replicas for longer than their snapshots live."""
        while True:
            await pass_s(random.choice([0.5, 5.0]))
            node, _ = random.choice([*self.readers.values()])
            node.pause(1_000 * random.choice([0.1, TTL_S + 0.5, 5 * TTL_S]))

    async def follow(self, name: str, random: Random) -> None:
        """One replica, on a store that takes its time."""
        node = self.world.node(name)
        store = AskedStore(self.ground)

        async def take_time(_: str) -> None:
            await pass_s(random.choice([0.0, 0.001, 0.03]))

        store.before_get = store.after_get = store.before_list = take_time
        reader = await node.run(self._open(node, store, draw(random)))
        self.readers[name] = (node, reader)
        await node.run(reader.run())

    async def _open(self, node: Node, store: AskedStore, settings: ReadSettings) -> Reader:
        runtime = self.world.runtime_for(node)
        return await Reader.open(store, settings=settings, runtime=runtime, links=self.links)

    async def read(self, random: Random) -> None:
        """Ask one replica after another."""
        last = dict.fromkeys(self.readers, 0)
        while True:
            await pass_s(random.choice([0.0, 0.001, 0.1]))
            name, (node, reader) = random.choice([*self.readers.items()])
            header = kv_pb2.RequestHeader()
            began_s = asyncio.get_running_loop().time()
            if random.random() < 0.4:
                header.min_seq = self.log.newest_before(began_s)
            if random.random() < 0.2:
                header.max_staleness_ms = random.choice([1, 200, 5_000])
            try:
                told, found = await node.run(ask(reader, header, is_scan=random.random() < 0.3))
            except REFUSALS:
                continue
            self._check(name, header.min_seq, began_s, told, found)
            if told.seq < last[name]:
                raise Violation(f"{name} goes back from {last[name]} to {told.seq}")
            last[name] = told.seq
            self.answered += 1

    def _check(
        self,
        name: str,
        min_seq: int,
        began_s: float,
        told: kv_pb2.ReplyHeader,
        found: Mapping[bytes, bytes],
    ) -> None:
        if found != self.log.states[told.seq]:
            raise Violation(f"{name} at {told.seq}: {found}, not {self.log.states[told.seq]}")
        if told.seq < min_seq:
            raise Violation(f"{name} shows {told.seq} to who asks for {min_seq}")
        newest = self.log.newest_before(began_s - (told.staleness_ms + SLACK_MS) / 1_000)
        if told.seq < newest:
            raise Violation(f"{name} shows {told.seq}, not {newest}, at {told.staleness_ms} ms")


async def ask(
    reader: Reader, header: kv_pb2.RequestHeader, *, is_scan: bool
) -> tuple[kv_pb2.ReplyHeader, dict[bytes, bytes]]:
    """All keys at one moment."""
    call = Call(deadline_ms=reader.clock.monotonic_ms() + 3_000)
    if is_scan:
        scan = reader.kv.scan(kv_pb2.ScanRequest(header=header), call)
        messages = await gathered(scan)
        return messages[0].header, {e.key: e.value for m in messages for e in m.entries}
    keys = [key.encode() for key in KEYS]
    answer = reader.kv.batch_get(kv_pb2.BatchGetRequest(header=header, keys=keys), call)
    reply = await answer if isinstance(answer, Awaitable) else answer
    pairs = zip(keys, reply.results, strict=True)
    return reply.header, {key: each.value for key, each in pairs if each.found}


def draw(random: Random) -> ReadSettings:
    """Settings of a reader whose snapshots are soon over."""
    reader = ReaderSettings(
        snapshot=random.choice([*SnapshotChoice]),
        reader_snapshot_ttl_s=TTL_S,
        poll_interval_ms=random.choice([50, 1_000]),
        poll_interval_min_ms=random.choice([0, 20]),
        poll_interval_idle_ms=random.choice([1_000, 30_000]),
        manifest_interval_ms=random.choice([200, 30_000]),
        reader_parallel_reads=random.choice([1, 4]),
    )
    return ReadSettings(database=UrlSettings(url="memory://here"), reader=reader, cache=NO_CACHE)


async def replicate(world: World) -> int:
    """Two replicas, three clients. How many replies were checked."""
    random = world.random_for("replication")
    ground = await ReplicaGround.created(seed=world.seed)
    k = random.choice([1, 4])
    await ground.take_over(k=k)
    run = Replication(world, ground)
    try:
        async with asyncio.timeout(LIFE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(run.write(world.random_for("writer"), k))
            for name in ("replica1", "replica2"):
                tasks.create_task(run.follow(name, world.random_for(name)))
            while len(run.readers) < 2:
                await pass_s(0.1)
            tasks.create_task(run.keep_house(world.random_for("janitor")))
            tasks.create_task(run.disturb(world.random_for("chaos")))
            for number in range(3):
                tasks.create_task(run.read(world.random_for(f"client {number}")))
    except TimeoutError:
        return run.answered
    raise AssertionError
