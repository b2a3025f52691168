"""What the writer answers to the calls of `shalekv.v1.Admin`."""

from __future__ import annotations

from collections.abc import Callable

import shalekv
from shalekv.clock import Clock
from shalekv.roles.ingests import Ingests
from shalekv.roles.manifest_status import manifest_status
from shalekv.roles.memory_use import MemoryUse
from shalekv.roles.quorum_status import quorum_status
from shalekv.roles.store_use import StoreUse
from shalekv.roles.watching import Watches
from shalekv.server import requests
from shalekv.server.readiness import Readiness
from shalekv.server.service import Answer, Call
from shalekv.server.snapshots import SnapshotAdmin
from shalekv.server.status import LevelsReport
from shalekv.settings import WriterSettings
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv.write.engine import WriterEngine


class WriterAdmin:
    """Implements `roles.service.AdminService` on a `WriterEngine`."""

    def __init__(  # noqa: PLR0913 - all that a status is about
        self,
        engine: WriterEngine,
        settings: WriterSettings,
        clock: Clock,
        memory: MemoryUse,
        store_use: StoreUse,
        *,
        url: str,
        open_ms: float,
        levels: LevelsReport | None = None,
        readiness: Callable[[], Readiness] = Readiness,
    ) -> None:
        """`url` without credentials; `open_ms` is how long opening took.

        Without `levels` a status says nothing of levels, caches, store and snapshots.
        """
        self.memory = memory
        self.store_use = store_use
        self._levels = levels
        self.watches: Watches | None = None  # to be set by who has them
        self.readiness = readiness
        self._engine = engine
        self._ingests = Ingests(engine.loads, self._header)
        self.snapshots = SnapshotAdmin(engine, self._header)
        self._settings = settings
        self._clock = clock
        self._url = url
        self._open_ms = open_ms
        self._began_ms = clock.monotonic_ms()

    def status(self, request: admin_pb2.StatusRequest, call: Call) -> Answer[admin_pb2.StatusReply]:
        """What this process is and how it does."""
        del call  # answered soon, whatever the deadline
        requests.check_header(request.header)
        reply = self._reply()
        self.readiness().fill(reply, self._clock.monotonic_ms())
        return reply if self._levels is None else self._with_levels(reply, self._levels)

    def stats(self, request: admin_pb2.StatsRequest, call: Call) -> Answer[admin_pb2.StatsReply]:
        """What the processes of this server have sent to the object store."""
        del call  # as above
        requests.check_header(request.header)
        prefix = self._engine.prefix
        return self.store_use.reply(self._header(prefix.landed_seq, prefix.wal_id))

    def ingest_sst(
        self, request: admin_pb2.IngestSstRequest, call: Call
    ) -> Answer[admin_pb2.IngestSstReply]:
        """Commit files that stand ready."""
        requests.check_deadline(call, self._clock)
        self._engine.check_serving()
        return self._ingests.ingest_sst(request)

    async def _with_levels(
        self, reply: admin_pb2.StatusReply, levels: LevelsReport
    ) -> admin_pb2.StatusReply:
        await levels.fill(reply)
        return reply

    def _header(self, seq: int, wal_id: int | None) -> kv_pb2.ReplyHeader:
        return kv_pb2.ReplyHeader(
            database_id=self._engine.manifest.current.database_id,
            role=kv_pb2.Role.ROLE_WRITER,
            epoch=self._engine.manifest.own.epoch,
            seq=seq,
            wal_id=wal_id,
        )

    def _reply(self) -> admin_pb2.StatusReply:
        engine = self._engine
        return admin_pb2.StatusReply(
            header=self._header(engine.prefix.landed_seq, engine.prefix.wal_id),
            version=shalekv.__version__,
            url=self._url,
            uptime_ms=int(self._clock.monotonic_ms() - self._began_ms),
            writer=self._writer_status(),
            memtable=admin_pb2.MemtableStatus(
                keys=engine.memtable.key_count,
                bytes=engine.memory_bytes,
                bytes_max=self._settings.memtable_bytes_max,
                runs=engine.memtable.run_count,
                range_tombstones=engine.memtable.range_tombstone_count,
                idempotency_records=len(engine.idempotency),
            ),
            manifest=manifest_status(self._engine.manifest.current),
            memory=self.memory.status(),
            watches=None if self.watches is None else self.watches.status(),
            quorum=quorum_status(engine.slots.report()),
        )

    def _writer_status(self) -> admin_pb2.WriterStatus:
        engine = self._engine
        return admin_pb2.WriterStatus(
            durable_prefix_seq=engine.prefix.seq,
            next_wal_id=engine.log.next_wal_id,
            wal_objects_in_flight=engine.log.objects_in_flight,
            max_parallel_writes=engine.policy.max_parallel_writes,
            queued_bytes=engine.admission.queued_bytes,
            queued_bytes_max=self._settings.queued_bytes_max,
            wal_objects_written=engine.log.objects_written,
            commits=engine.log.commits_landed,
            open_ms=int(self._open_ms),
            wal_objects_replayed=engine.objects_replayed,
        )
