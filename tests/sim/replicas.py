"""I6: replicas that follow the log through crashes and long pauses, and clients that read them.

They are the shipped readers. Each of their replies is a state of the log, with nothing left out and
nothing after it; none is older than one before it, nor than its header states.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from random import Random

from shalekv.errors import (
    DatabaseNotFound,
    DeadlinePassed,
    ManifestConflict,
    ObjectNotFound,
    Overloaded,
    PageExpired,
    SeqNotReached,
    SnapshotNotFound,
    Stopping,
    StoreUnavailable,
    TooStale,
)
from shalekv.server.reader import Reader
from shalekv.server.service import Call
from shalekv.settings import (
    CacheSettings,
    LimitSettings,
    ReaderConfig,
    ReaderSettings,
    SnapshotChoice,
    UrlSettings,
)
from shalekv.v1 import kv_pb2
from tests.kit.constants import draw
from tests.kit.serving.answers import answered, scan_of
from tests.sim.cluster import Cluster
from tests.sim.errors import NodeCrashed, Violation
from tests.sim.history import Got, Seen
from tests.sim.invariants.answers import check_i6_replicas_show_prefixes
from tests.sim.nodes import Node
from tests.sim.options import Trouble
from tests.sim.requests import KEYS
from tests.sim.serial import SerialOrder

NAMES = ("replica1", "replica2")
CLIENTS = 2
PAUSES_MS = (10.0, 1_000.0, 5_000.0, 10_000.0, 60_000.0)  # the longer ones outlast snapshots
LIVES_S = (2, 4, 20)  # of snapshots, at pace 1
WAIT_MS = 2_000
# Errors by which a reader or a read may end: each is typed, and none is an answer.
ENDS = (StoreUnavailable, ManifestConflict, ObjectNotFound, DatabaseNotFound)
REFUSALS = (
    NodeCrashed,
    DeadlinePassed,
    Stopping,
    Overloaded,
    PageExpired,
    SnapshotNotFound,
    StoreUnavailable,
    SeqNotReached,
    TooStale,
)


class Replicas:
    """The readers of one database, and their clients."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sim = cluster.sim
        self._running: dict[str, tuple[Node, Reader | None]] = {}
        self.seen: list[Seen] = []
        self.problems: list[str] = []

    async def chaos(self, cluster: Cluster) -> None:
        """Start, crash, pause and resume them at random moments, until cancelled.

        None runs afterwards: what they protect must be garbage when all is collected in the end.
        """
        try:
            await self._disturb(cluster)
        finally:
            for name, (node, _) in list(self._running.items()):
                node.crash()
                self._running.pop(name, None)

    async def _disturb(self, cluster: Cluster) -> None:
        random, options = self._sim.random_for("replicas"), self._sim.options
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(self._client(self._sim.random_for(f"reading {number}")))
            while True:
                await self._sim.sleep_ms(random.choice([30.0, 1_000.0, 4_000.0]) * cluster.pace)
                name = random.choice(NAMES)
                node = self._running[name][0] if name in self._running else None
                event = random.choices(["crash", "pause", "resume", "nothing"], [2, 3, 2, 3])[0]
                pause_ms = random.choice(PAUSES_MS) * max(cluster.pace, 1.0)  # lives are in seconds
                if node is None:
                    self._start(name, random)
                elif event == "crash" and options.has(Trouble.CRASHES):
                    node.crash()
                    self._running.pop(name, None)
                elif event == "pause" and options.has(Trouble.PAUSES):
                    node.pause(pause_ms)
                elif event == "resume":
                    node.resume()

    def check(self, order: SerialOrder) -> None:
        """Every reply shows a prefix of the log, never less than one before it (I6)."""
        if self.problems:
            raise Violation(self.problems[0])
        check_i6_replicas_show_prefixes(order, self.seen)

    def _start(self, name: str, random: Random) -> None:
        settings = draw_reader(random, self._cluster.pace)
        if not self._sim.options.has(Trouble.REPLICAS):
            return
        node = self._sim.node(name)
        self._running[name] = (node, None)
        node.start(self._serve(name, node, settings))

    async def _serve(self, name: str, node: Node, settings: ReaderConfig) -> None:
        store, runtime = self._cluster.store_for(node), self._sim.runtime_for(node)
        links = self._cluster.links_for(node)
        try:
            reader = await Reader.open(store, settings=settings, runtime=runtime, links=links)
            self._running[name] = (node, reader)
            await reader.run()
        except ENDS:
            pass
        except Exception as error:
            self.problems.append(f"I6: {node} ended: {error!r}")
            raise
        finally:
            if self._running.get(name, (None, None))[0] is node:
                del self._running[name]

    async def _client(self, random: Random) -> None:
        """Read one of them, whichever is there, until cancelled."""
        while True:
            await self._sim.sleep_ms(random.choice([5.0, 100.0]) * self._cluster.pace)
            there = [(n, node, r) for n, (node, r) in self._running.items() if r is not None]
            if not there:
                continue
            _, node, reader = random.choice(there)
            assert reader is not None
            header = kv_pb2.RequestHeader()
            if random.random() < 0.4 and self.seen:
                header.min_seq = max(each.seq for each in self.seen[-20:])
            if random.random() < 0.2:
                header.max_staleness_ms = random.choice([1, 500, 5_000])
            with suppress(*REFUSALS):
                read = self._read(reader, node, header, random)
                self.seen.append(await node.run(read))

    async def _read(
        self, reader: Reader, node: Node, header: kv_pb2.RequestHeader, random: Random
    ) -> Seen:
        began_us = self._sim.loop.now_us
        call = Call()
        if header.min_seq:  # which is waited for
            call = Call(deadline_ms=reader.clock.monotonic_ms() + WAIT_MS * self._cluster.pace)
        keys = tuple(KEYS)
        found: dict[bytes, Got] = {}
        reply_header = kv_pb2.ReplyHeader()
        replied_us = 0
        if random.random() < 0.5:
            keys = tuple(random.sample(KEYS, 2))
            request = kv_pb2.BatchGetRequest(header=header, keys=keys)
            answer = reader.kv.batch_get(request, call)
            reply = await answered(kv_pb2.BatchGetReply, answer)
            replied_us, reply_header = self._sim.loop.now_us, reply.header
            for key, each in zip(keys, reply.results, strict=True):
                if each.found:
                    found[key] = Got(each.value, each.seq, each.expire_at_ms)
        else:
            scan = kv_pb2.ScanRequest(header=header, reverse=random.random() < 0.3)
            async with aclosing(scan_of(reader.kv, scan, call)) as replies:
                async for part in replies:
                    replied_us, reply_header = replied_us or self._sim.loop.now_us, part.header
                    for e in part.entries:
                        found[e.key] = Got(e.value, e.seq, e.expire_at_ms)
                    await self._sim.sleep_ms(random.choice([0.0, 0.0, 3_000.0]))
        return Seen(
            node.label,
            began_us,
            replied_us,
            reply_header.seq,
            reply_header.staleness_ms,
            header.min_seq,
            keys,
            found,
        )


def draw_reader(random: Random, pace: float) -> ReaderConfig:
    """Draw settings of a reader that polls often, and whose snapshots are short."""
    ttl_s = max(2, int(random.choice(LIVES_S) * pace))
    poll_ms = max(1, int(random.choice([10, 100, 1_000]) * pace))
    snapshot = random.choice([SnapshotChoice.OWN, *SnapshotChoice])
    draw({"shalekv.replica.progress:POLL_INTERVAL_MIN_MS": random.choice([0, 20])})
    reader = ReaderSettings(
        snapshot=snapshot,
        reader_snapshot_ttl_s=ttl_s,
        poll_interval_ms=poll_ms,
        poll_interval_idle_ms=4 * poll_ms,
        manifest_interval_ms=max(10, int(random.choice([100, 2_000]) * pace)),
    )
    draw({"shalekv.replica.follow:PARALLEL_READS_MAX": random.choice([1, 4])})
    cache = CacheSettings().model_copy(
        update={"block_cache_bytes": 0, "metadata_cache_bytes": random.choice([0, 1 << 20])}
    )
    limits = LimitSettings().model_copy(update={"scan_message_bytes": random.choice([1, 1 << 20])})
    return ReaderConfig(
        database=UrlSettings(url="memory://sim"), reader=reader, cache=cache, limits=limits
    )
