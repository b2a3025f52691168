"""The processes of a scenario that answer reads: writers and readers, and their clients."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from shalekv.errors import ShaleError
from shalekv.jobs.collect import CollectJob
from shalekv.server.compactor import Compactor
from shalekv.server.reader import Reader
from shalekv.server.service import Call
from shalekv.server.writer import Writer
from shalekv.settings import (
    CollectorSettings,
    CompactorConfig,
    CompactorSettings,
    DatabaseSettings,
    ReaderConfig,
    ReaderSettings,
    StoreSettings,
    UrlSettings,
    WriterConfig,
    WriterSettings,
)
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.v1 import kv_pb2
from shalekv.write.snapshots import Snapshots
from tests.kit.serving.answers import answered, replied, scan_of
from tests.sim.simulation import Simulation
from tests.sim.store import URL

RoleT = TypeVar("RoleT")

Options = dict[str, str]

# One job takes all that is there, however little, and leaves the levels below L0 alone.
_COMPACTOR = {"wal_trigger_age_ms": 0, "l0_trigger_count": 100}
# Age is the subject of few scenarios, and the retention of the WAL of none.
_COLLECTOR = {"collect_age_s": 0, "wal_retention_s": 0}


class Process(Generic[RoleT]):
    """One process: it opens a role once, and then lives until it ends, or is made to."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim = sim
        self.name = name
        self.node = sim.node(name)
        self.is_resolved = True  # whether the scenario has stated how the present or last job ended
        self._role: asyncio.Future[RoleT] = sim.loop.create_future()
        self._life: asyncio.Task[Any]

    def begin(self, life: Coroutine[Any, Any, object]) -> None:
        """Do this from now on, and nothing beside it."""
        self._life = self.node.spawn(life)

    def has_role(self, role: RoleT) -> None:
        """For its life: from now on it has opened."""
        self._role.set_result(role)

    @property
    def role(self) -> RoleT:
        assert self._role.done(), f"{self.name} has not opened"
        return self._role.result()

    @property
    def has_opened(self) -> bool:
        return self._role.done()

    @property
    def has_ended(self) -> bool:
        return self._life.done()

    async def opened(self) -> RoleT:
        """The role when it has opened; raises what kept it from that."""
        either: set[asyncio.Future[Any]] = {self._role, self._life}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._role.done():
            self.is_resolved = True
            await self._life
        return self.role

    async def end(self) -> BaseException | None:
        await asyncio.wait({self._life})
        self.is_resolved = True
        return self._life.exception()

    def error_now(self) -> BaseException | None:
        return self._life.exception() if self.has_ended else None

    def cas(self) -> CasStore:
        sim = self.sim
        return CasStore(sim.store_for(self.node), sim.runtime_for(self.node), StoreSettings())


class Jobs(Process[RoleT]):
    """A process that does one job after another, when the scenario says so."""

    def begin_job(self, job: Coroutine[Any, Any, object]) -> None:
        """Begin a job; the scenario must state how it ends."""
        if not self.is_resolved:
            job.close()
            raise AssertionError(f"{self.name} does something else still")
        self.begin(job)
        self.is_resolved = False

    async def done(self) -> None:
        """Return once the job is done; raises what ended it."""
        error = await self.end()
        if error is not None:
            raise error


class CompactorProcess(Jobs[Compactor]):
    """A compactor, which polls for work when the scenario says so."""

    def begin_open(self, options: Options) -> None:
        compactor = CompactorSettings.model_validate({**_COMPACTOR, **options})
        settings = CompactorConfig(compactor=compactor)
        self.begin_job(self._open(settings))

    async def opened(self) -> Compactor:
        role = await super().opened()
        await self.done()
        return role

    async def _open(self, settings: CompactorConfig) -> None:
        role = await Compactor.open(
            self.sim.store_for(self.node),
            settings=settings,
            runtime=self.sim.runtime_for(self.node),
            hurry=asyncio.Event(),
            holder=self.name,
        )
        self.has_role(role)

    def begin_pass(self) -> None:
        self.begin_job(self.role.run(is_once=True))

    def begin_close(self) -> None:
        self.begin_job(self.role.close())


class CollectorProcess(Jobs[CollectJob]):
    """A collector, which collects when the scenario says so."""

    def begin_collection(self, options: Options) -> None:
        """`options`: fields of `CollectorSettings`; those of the first time hold."""
        if not self.has_opened:
            settings = CollectorSettings.model_validate({**_COLLECTOR, **options})
            self.has_role(CollectJob(self.cas(), settings))
        self.begin_job(self.role.collect())


class ClientProcess(Jobs[Snapshots]):
    """A client that makes snapshots."""

    def __init__(self, sim: Simulation, name: str) -> None:
        super().__init__(sim, name)
        self.has_role(Snapshots(self.cas()))


class CreatorProcess(Jobs[ObjectStore]):
    """A process that does nothing but create, delete and recover."""

    def __init__(self, sim: Simulation, name: str) -> None:
        super().__init__(sim, name)
        self.outcome = ""  # of its last create
        self.has_role(sim.store_for(self.node))

    async def create(self, name: str) -> None:
        """Create the object, whose contents name its author."""
        self.outcome = type(await self.role.create(name, f"of {self.name}".encode())).__name__


# A writer learns at a slot that it was fenced, not by a poll in between, and not when it renews its
# snapshot. A request that a scenario holds for long does not end by a deadline.
_HOUR_MS = 3_600_000
_DAY_S = 86_400
_WRITER = {
    "flush_interval_ms": 0,
    "fence_poll_ms": _HOUR_MS,
    "open_timeout_ms": _HOUR_MS,
    "snapshot_ttl_s": _DAY_S,
}


class ServingProcess(Process[RoleT], abc.ABC):
    """A process that answers reads."""

    @property
    def _kv(self) -> Writer | Reader:
        role = self.role
        assert isinstance(role, Writer | Reader)
        return role

    @abc.abstractmethod
    def begin_open(self, options: Options) -> None:
        """Begin to open with these settings, and then serve."""

    async def value(self, key: str) -> str | None:
        request = kv_pb2.GetRequest(key=key.encode())
        answer = self._kv.kv.get(request, Call())
        reply = await self.node.run(answered(kv_pb2.GetReply, answer))
        return reply.value.decode() if reply.found else None

    def begin_scan(self, snapshot_id: bytes = b"") -> None:
        """Begin to scan everything, as it is now or as the snapshot shows it."""
        self._scan = self.node.spawn(_scan(self._kv, snapshot_id))

    @property
    def is_scanning(self) -> bool:
        return not self._scan.done()

    async def scanned(self) -> dict[str, str]:
        """The result of the scan: all keys with their values."""
        await asyncio.wait({self._scan})
        return self._scan.result()

    async def close(self) -> None:
        """Stop in order: nothing is lost, and nothing left behind."""
        self._kv.close()
        await asyncio.wait({self._life})
        await self.node.run(self._kv.release())


class WriterProcess(ServingProcess[Writer]):
    """A writer."""

    def begin_open(self, options: Options) -> None:
        writer = WriterSettings.model_validate({**_WRITER, **options})
        settings = WriterConfig(database=DatabaseSettings(url=URL), writer=writer)
        self.is_resolved = False
        self.begin(self._live(settings))

    async def _live(self, settings: WriterConfig) -> None:
        writer = await Writer.open(
            self.sim.store_for(self.node),
            settings=settings,
            runtime=self.sim.runtime_for(self.node),
        )
        self.has_role(writer)
        await writer.run()


class ReaderProcess(ServingProcess[Reader]):
    """A replica."""

    def begin_open(self, options: Options) -> None:
        reader = ReaderSettings.model_validate(options)
        settings = ReaderConfig(database=UrlSettings(url=URL), reader=reader)
        self.is_resolved = False
        self.begin(self._live(settings))

    async def _live(self, settings: ReaderConfig) -> None:
        reader = await Reader.open(
            self.sim.store_for(self.node),
            settings=settings,
            runtime=self.sim.runtime_for(self.node),
        )
        self.has_role(reader)
        await reader.run()


class Put:
    """A put of one key, on its way."""

    def __init__(self, writer: WriterProcess, key: str, value: str) -> None:
        self.is_resolved = False  # whether the scenario has stated its outcome
        self._node = writer.node
        self._outcome = writer.node.spawn(_put(writer.role, key, value))

    @property
    def is_lost(self) -> bool:
        """Return whether its outcome is lost, since the process has crashed before."""
        return not self._outcome.done() and not self._node.alive

    def now(self) -> str:
        """Return its present outcome: "acknowledged", "pending", or the name of an error."""
        if not self._outcome.done():
            return "pending"
        return self._name(self._outcome)

    async def settled(self) -> str:
        await asyncio.wait({self._outcome})
        self.is_resolved = True
        return self._name(self._outcome)

    def _name(self, outcome: asyncio.Task[kv_pb2.PutReply]) -> str:
        try:
            outcome.result()
        except ShaleError as error:
            return type(error).__name__
        return "acknowledged"


async def _put(writer: Writer, key: str, value: str) -> kv_pb2.PutReply:
    request = kv_pb2.PutRequest(key=key.encode(), value=value.encode())
    return await replied(writer.kv.put(request, Call()))


async def _scan(server: Writer | Reader, snapshot_id: bytes) -> dict[str, str]:
    header = kv_pb2.RequestHeader(snapshot_id=snapshot_id)
    replies = scan_of(server.kv, kv_pb2.ScanRequest(header=header), Call())
    entries = [entry async for reply in replies for entry in reply.entries]
    return {entry.key.decode(): entry.value.decode() for entry in entries}
