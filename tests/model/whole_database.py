"""All roles of one database over one memory store, in virtual time, called from outside.

Writers, replicas, compactors and collectors are the shipped ones, with settings so small that a few
entries fill blocks, files and levels. Each call returns when it is answered; only background tasks
run beside it. Requests to the store take no time, so decisions are made at the moment of the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, TypeVar

from shalekv.format.footer import SstProperties
from shalekv.format.names import level_name
from shalekv.format.sst import open_sst
from shalekv.format.sst_writer import encode_sst
from shalekv.jobs.collect import CollectJob
from shalekv.protocol.entry import Entry
from shalekv.protocol.sst_table import SstInfo
from shalekv.runtime import Runtime
from shalekv.server.compactor import Compactor
from shalekv.server.database import create_database
from shalekv.server.reader import Reader
from shalekv.server.service import Call
from shalekv.server.snapshots import SnapshotAdmin
from shalekv.server.writer import Writer
from shalekv.settings import SnapshotChoice, StoreSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.store.memory import MemoryObjects, MemoryStore
from tests.kit.constants import draw, undo_drawn
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.serving.answers import parsed, replied, scan_of
from tests.sim.loop import SimLoop
from tests.sim.nodes import Node
from tests.sim.replicas import draw_reader
from tests.sim.simulation import NodeClock
from tests.sim.tiny import draw_collector, draw_compactor, draw_writer

T = TypeVar("T")

EPOCH_MS = 1_700_000_000_000
DIRECT_INGEST_BYTES = 900  # larger batches become files of the levels at once
CALL_TIMEOUT_MS = 20_000.0


class WholeDatabase:
    """One writer, perhaps a replica, and compactors and collectors on demand."""

    def __init__(self) -> None:
        self.loop = SimLoop("model")
        self.clock = NodeClock(self.loop)
        self.objects = MemoryObjects()
        self.seeds = Random(7)
        self.writer: Writer
        self.reader: Reader | None = None
        self.is_replica_protected = False  # by a snapshot of what it reads
        self._writes: Node
        self._reads: Node
        self._serving: dict[Node, asyncio.Task[None]] = {}
        self._started = 0

    def create(self) -> None:
        node = self._node("creator")
        self._on(node, create_database(self._store(), self._runtime(), StoreSettings()))

    def close(self) -> None:
        self.loop.close()
        undo_drawn()

    # --- time ----------------------------------------------------------------------------------

    def pass_ms(self, duration_ms: float) -> None:
        """Time passes, and what wakes up by itself does so."""
        self.loop.run_until_complete(self.clock.sleep_ms(duration_ms))

    def check_alive(self) -> None:
        """Nothing has ended by itself, and no error was lost."""
        for node, serving in self._serving.items():
            assert not serving.done(), (node, serving)
        assert not self.loop.unhandled

    # --- the writer ----------------------------------------------------------------------------

    def open(self, seed: int) -> None:
        """A process that opens the database for writing, with settings drawn from `seed`."""
        self._writes = node = self._node("writer")
        drawn = draw_writer(Random(seed))
        update = {
            "direct_ingest_bytes": DIRECT_INGEST_BYTES,
            "idempotency_window_s": 86_400,
        }
        # Whether anybody compacts is drawn.
        draw({"shalekv.write.admission:UNCOMPACTED_LOADS_MAX": 10_000})
        settings = drawn.model_copy(update={"writer": drawn.writer.model_copy(update=update)})
        self.writer = self._on(
            node, Writer.open(self._store(), settings=settings, runtime=self._runtime())
        )
        self._serving[node] = self._spawn(node, self.writer.run())

    def end_writer(self) -> None:
        self.writer.close()
        self.loop.run_until_complete(self._serving.pop(self._writes))
        self._on(self._writes, self.writer.release())
        self._writes.crash()

    def crash_writer(self) -> None:
        """The process is gone, and with it all that was only in its memory."""
        del self._serving[self._writes]
        self._writes.crash()

    @property
    def now_ms(self) -> int:
        return self.writer.engine.time.now_ms()

    def ask(self, method: str, request: Any) -> Any:
        return self._on(self._writes, self._called(self.writer.kv, method, request))

    def begin(self, method: str, request: Any) -> asyncio.Task[Any]:
        """Begin a call to the writer, without waiting for it."""
        return self._spawn(self._writes, self._called(self.writer.kv, method, request))

    def scan(self, request: Any) -> Sequence[Any]:
        return self._on(self._writes, _scanned(self.writer.kv, request, Call()))

    def administer(self, method: str, request: Any) -> Any:
        return self._on(self._writes, self._called(self.writer.admin, method, request))

    def snapshots(self, method: str, request: Any) -> Any:
        service = SnapshotAdmin(self.writer.engine, self.writer.kv.header)
        return self._on(self._writes, self._called(service, method, request))

    # --- the replica ---------------------------------------------------------------------------

    def start_replica(self, seed: int) -> None:
        """A replica, in the place of the one that was there."""
        self.crash_replica()
        self._reads = node = self._node("replica")
        settings = draw_reader(Random(seed), 1.0)
        self.is_replica_protected = settings.reader.snapshot is SnapshotChoice.OWN
        opening = Reader.open(self._store(), settings=settings, runtime=self._runtime())
        self.reader = self._on(node, opening)
        self._serving[node] = self._spawn(node, self.reader.run())

    def crash_replica(self) -> None:
        if self.reader is not None:
            del self._serving[self._reads]
            self._reads.crash()
            self.reader = None

    def ask_replica(self, method: str, request: Any) -> Any:
        """Return the reply of the replica to one call. REQUIRES: there is one."""
        assert self.reader is not None
        return self._on(self._reads, self._called(self.reader.kv, method, request, CALL_TIMEOUT_MS))

    def scan_replica(self, request: Any) -> Sequence[Any]:
        """A scan at the replica, to its end. REQUIRES: there is one."""
        assert self.reader is not None
        call = Call(deadline_ms=self.clock.monotonic_ms() + CALL_TIMEOUT_MS)
        return self._on(self._reads, _scanned(self.reader.kv, request, call))

    # --- beside them ---------------------------------------------------------------------------

    def compact(self, seed: int) -> None:
        """A compactor that does what is due, with settings drawn from `seed`, and ends."""
        node = self._node("compactor")

        async def run() -> None:
            compactor = await Compactor.open(
                self._store(),
                settings=draw_compactor(Random(seed), 1.0),
                runtime=self._runtime(),
                hurry=asyncio.Event(),
                holder=node.label,
            )
            await compactor.run(is_once=True)
            await compactor.close()

        self._on(node, run())

    def collect(self, seed: int) -> None:
        """Run a collector that deletes all garbage, with settings drawn from `seed`."""
        settings = draw_collector(Random(seed), 1.0)
        cas = CasStore(self._store(), self._runtime(), StoreSettings())
        self._on(self._node("collector"), CollectJob(cas, settings).collect())

    def write_file(self, entries: Sequence[Entry]) -> SstInfo:
        """Write a file of the levels to be loaded, as another process does."""
        random = self.seeds
        sst_id = bytearray(random.randbytes(16))
        sst_id[6] = 0x70 | sst_id[6] & 0x0F
        sst_id[8] = 0x80 | sst_id[8] & 0x3F
        name = level_name(bytes(sst_id))
        cas = CasStore(self._store(), self._runtime(), StoreSettings())
        manifest = self._on(self.loop.root, StoredManifest(cas).refresh())
        properties = SstProperties(
            name=name,
            database_id=manifest.database_id,
            writer_epoch=0,
            writer_nonce=bytes(16),
            write_id=random.randbytes(16),
        )
        block_bytes, filter_bits = random.choice([20, 200]), random.choice([None, 10])
        data = encode_sst(
            properties, entries, block_bytes=block_bytes, filter_bits_per_key=filter_bits
        )
        self._on(self.loop.root, self._store().create(name, data))
        return open_sst(name, data, database_id=manifest.database_id).footer.info(0)

    # --- processes -----------------------------------------------------------------------------

    def _node(self, name: str) -> Node:
        self._started += 1
        return Node(self.loop, name, self._started)

    def _store(self) -> MemoryStore:
        return MemoryStore(lambda: EPOCH_MS + self.loop.now_us // 1_000, objects=self.objects)

    def _runtime(self) -> Runtime:
        return Runtime(self.clock, Random(self.seeds.getrandbits(64)), InlineWorkers())

    def _spawn(self, node: Node, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return node.spawn(coro)

    def _on(self, node: Node, coro: Coroutine[Any, Any, T]) -> T:
        found: T = self.loop.run_until_complete(self._spawn(node, coro))
        return found

    async def _called(
        self, service: Any, method: str, request: Any, timeout_ms: float | None = None
    ) -> Any:
        deadline_ms = None if timeout_ms is None else self.clock.monotonic_ms() + timeout_ms
        call: Callable[[Any, Call], Any] = getattr(service, method)
        answer = call(request, Call(peer="model", deadline_ms=deadline_ms))
        return parsed(request, await replied(answer))


async def _scanned(kv: Any, request: Any, call: Call) -> Sequence[Any]:
    return [reply async for reply in scan_of(kv, request, call)]
