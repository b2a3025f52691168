"""Writers that rival, clients that use them, and chaos: the shipped writer in the simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from shalekv.errors import (
    Fenced,
    ManifestConflict,
    OutcomeUnknown,
    Overloaded,
    Stopping,
    StoreUnavailable,
)
from shalekv.roles.database import create_database
from shalekv.roles.service import Call
from shalekv.roles.writer import Writer
from shalekv.settings import DatabaseSettings, ServeSettings, StoreSettings, WriterSettings
from shalekv.v1 import kv_pb2
from tests.sim.errors import NodeCrashed
from tests.sim.faults import Faults
from tests.sim.history import History, Outcome, ReadOp, ScanOp, WriteOp
from tests.sim.nodes import Node
from tests.sim.world import World

WRITER_NAMES = ("w1", "w2", "w3")
KEYS = tuple(f"key{number}".encode() for number in range(8))
CLIENTS = 6
CHAOS_STEPS = 60
CALM_MS = 2_000.0  # clients go on for so long when the faults have stopped
PEACE_MS = 90_000.0  # the longest timeout of a request, and time to open and to notice
LATE_MS = 1_000_000.0  # longer than any request of `Faults.swarm` is on its way
ENDS = (Fenced, StoreUnavailable, ManifestConflict)  # how a writer may end; others fail the run
NOT_APPLIED = (Stopping, Overloaded)


class Cluster:
    """The writers of one database, and what their clients have seen."""

    def __init__(self, world: World) -> None:
        """No writer runs yet."""
        self.world = world
        self.history = History()
        self.running: dict[str, Node] = {}  # processes that open or serve
        self.writers: dict[str, Writer] = {}  # those that serve

    def start_writer(self, name: str, settings: ServeSettings) -> None:
        """Open the database on node `name`, which must not run a writer."""
        node = self.running[name] = self.world.node(name)
        node.start(self._serve(node, settings))

    def crash(self, name: str) -> None:
        """Cut the power of a running writer."""
        self.writers.pop(name, None)
        self.running.pop(name).crash()

    async def _serve(self, node: Node, settings: ServeSettings) -> None:
        runtime, store = self.world.runtime_for(node), self.world.store_for(node)
        ending = "CLOSED"
        try:
            writer = await Writer.open(store, settings=settings, runtime=runtime)
            self.writers[node.name] = writer
            await writer.run()
        except ENDS as error:
            ending = error.reason
        self.history.endings.append(ending)
        self.world.note(f"{node.label} ends: {ending}")
        # A process that has ended is gone; a node cannot do that to itself.
        self.world.loop.call_soon(self._bury, node, context=self.world.loop.root.context)

    def _bury(self, node: Node) -> None:
        if self.running.get(node.name) is node:
            self.crash(node.name)

    async def client(self, number: int) -> None:
        """Use writers at random, until cancelled."""
        random = self.world.random_for(f"client {number}")
        while True:
            await self.world.sleep_ms(random.choice([0.0, 1.0, 20.0, 500.0]))
            names = list(self.writers)
            if not names:
                await self.world.sleep_ms(100.0)
                continue
            name = random.choice(names)
            timeout_ms = random.choice([50.0, 2_000.0, 30_000.0])
            action = random.choices(
                [self.put, self.batch, self.delete, self.put_memory, self.read, self.scan],
                [50, 15, 10, 5, 17, 3],
            )[0]
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    await action(name, random.sample(KEYS, 3))
            except (TimeoutError, NodeCrashed):
                continue  # the write is unknown, the read says nothing

    async def put(self, name: str, keys: list[bytes]) -> None:
        """Put one key."""
        op = self._begin(tuple(keys[:1]))
        request = kv_pb2.PutRequest(key=op.keys[0], value=op.value)
        await self._write(name, op, lambda kv: kv.put(request, Call()))

    async def put_memory(self, name: str, keys: list[bytes]) -> None:
        """Put one key, acknowledged from memory."""
        op = self._begin(tuple(keys[:1]))
        request = kv_pb2.PutRequest(
            key=op.keys[0], value=op.value, durability=kv_pb2.Durability.DURABILITY_MEMORY
        )
        await self._write(name, op, lambda kv: kv.put(request, Call()), Outcome.IN_MEMORY)

    async def delete(self, name: str, keys: list[bytes]) -> None:
        """Delete one key."""
        op = self._begin(tuple(keys[:1]), is_delete=True)
        request = kv_pb2.DeleteRequest(key=op.keys[0])
        await self._write(name, op, lambda kv: kv.delete(request, Call()))

    async def batch(self, name: str, keys: list[bytes]) -> None:
        """Put several keys at once."""
        op = self._begin(tuple(keys))
        request = kv_pb2.WriteRequest()
        for key in op.keys:
            request.changes.add().put.CopyFrom(kv_pb2.PutChange(key=key, value=op.value))
        await self._write(name, op, lambda kv: kv.write(request, Call()))

    async def read(self, name: str, keys: list[bytes]) -> None:
        """Get one key, at a level that the name of the key decides."""
        is_linearizable = keys[0] < keys[1]
        level = "READ_LEVEL_LINEARIZABLE" if is_linearizable else "READ_LEVEL_COMMITTED"
        request = kv_pb2.GetRequest(key=keys[0])
        request.header.read_level = kv_pb2.ReadLevel.Value(level)
        invoked_us = self.world.loop.now_us

        async def get() -> kv_pb2.GetReply:
            answer = self.writers[name].kv.get(request, Call())
            return answer if isinstance(answer, kv_pb2.GetReply) else await answer

        try:
            reply = await self.world.node(name).run(get())
        except (Stopping, StoreUnavailable):
            return
        self.history.reads.append(
            ReadOp(
                keys[0],
                is_linearizable,
                invoked_us,
                reply.found,
                reply.value,
                reply.seq,
                reply.header.seq,
            )
        )

    async def scan(self, name: str, _keys: list[bytes]) -> None:
        """Scan everything."""
        invoked_us = self.world.loop.now_us

        async def collect() -> ScanOp:
            entries: list[tuple[bytes, int]] = []
            seq = 0
            async for reply in self.writers[name].kv.scan(kv_pb2.ScanRequest(), Call()):
                seq = reply.header.seq
                entries.extend((entry.key, entry.seq) for entry in reply.entries)
            return ScanOp(invoked_us, seq, tuple(entries))

        try:
            self.history.scans.append(await self.world.node(name).run(collect()))
        except Stopping:
            return

    def _begin(self, keys: tuple[bytes, ...], *, is_delete: bool = False) -> WriteOp:
        op = WriteOp(len(self.history.writes) + 1, keys, is_delete, self.world.loop.now_us)
        self.history.writes.append(op)
        return op

    async def _write(
        self,
        name: str,
        op: WriteOp,
        submit: Callable[[Any], Any],
        success: Outcome = Outcome.ACKNOWLEDGED,
    ) -> None:
        async def send() -> Any:
            answer = submit(self.writers[name].kv)
            return await answer if isinstance(answer, Awaitable) else answer

        try:
            reply = await self.world.node(name).run(send())
        except NOT_APPLIED:
            op.outcome = Outcome.NOT_APPLIED
        except OutcomeUnknown:
            op.outcome = Outcome.UNKNOWN
        else:
            op.outcome, op.seq = success, reply.header.seq
            op.wal_id = reply.header.wal_id if reply.header.HasField("wal_id") else None
        op.replied_us = self.world.loop.now_us


def draw_settings(random: Random) -> ServeSettings:
    """The settings of one opening: they differ from one to the next."""
    return ServeSettings(
        database=DatabaseSettings(url="memory://sim"),
        writer=WriterSettings(
            max_parallel_writes=random.choice([1, 1, 2, 4]),
            flush_interval_ms=random.choice([0, 10, 50]),
            fence_poll_ms=random.choice([1_000, 5_000]),
        ),
    )


async def chaos(cluster: Cluster) -> None:
    """Start, crash, pause and resume writers at random moments."""
    world, random = cluster.world, cluster.world.random_for("chaos")
    for _ in range(CHAOS_STEPS):
        await world.sleep_ms(random.choice([1.0, 30.0, 300.0, 3_000.0]) * random.random())
        name = random.choice(WRITER_NAMES)
        is_running = name in cluster.running
        event = random.choices(["start", "crash", "pause", "resume"], [5, 2, 3, 2])[0]
        if event == "start" and not is_running:
            cluster.start_writer(name, draw_settings(random))
        elif event == "crash" and is_running:
            cluster.crash(name)
        elif event == "pause" and is_running:
            cluster.running[name].pause(random.choice([10.0, 1_000.0, 60_000.0, 1_200_000.0]))
        elif event == "resume" and is_running:
            cluster.running[name].resume()


async def rival_writers(world: World) -> Cluster:
    """Chaos under load, then peace: at the end one writer has opened last and serves.

    The last opening happens while requests of earlier writers may still be on their way, and time
    goes on until none is.
    """
    cluster = Cluster(world)
    admin = world.node("admin")
    runtime = world.runtime_for(admin)
    await admin.run(create_database(world.store_for(admin), runtime, StoreSettings()))
    world.store.faults = Faults.swarm(world.rng)
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(cluster.client(number)) for number in range(CLIENTS)]
        await chaos(cluster)
        world.store.faults = Faults.none()
        await world.sleep_ms(CALM_MS)
        for client in clients:
            client.cancel()
    await end_in_peace(cluster)
    await world.sleep_ms(LATE_MS)
    return cluster


async def end_in_peace(cluster: Cluster) -> None:
    """Without faults, one writer soon serves and the others have ended (I13).

    A writer that was slow to open may take over from one that came later; it then is the one.
    """
    for node in cluster.running.values():
        node.resume()
    for _ in range(2):
        if not cluster.running:
            cluster.start_writer("last", draw_settings(cluster.world.rng))
        await cluster.world.sleep_ms(PEACE_MS)
    if len(cluster.writers) != 1 or list(cluster.running) != list(cluster.writers):
        raise AssertionError(
            f"I13: in peace {list(cluster.writers)} serve, {list(cluster.running)} run; "
            f"others ended by {cluster.history.endings}"
        )
    name = next(iter(cluster.writers))
    before = len(cluster.history.writes)
    await cluster.put(name, [KEYS[0]])
    if cluster.history.writes[before].outcome is not Outcome.ACKNOWLEDGED:
        raise AssertionError(f"I13: in peace this was not written: {cluster.history.writes[-1]}")
