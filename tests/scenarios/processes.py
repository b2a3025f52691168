"""The processes of a scenario: what all of them have in common, and those that do jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from shalekv.engine.collection.collecting import Collecting
from shalekv.engine.snapshots import Snapshots
from shalekv.roles.compactor import Compactor
from shalekv.settings import (
    CollectorSettings,
    CompactorSettings,
    CompactSettings,
    StoreSettings,
    UrlSettings,
)
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from tests.sim.client import URL
from tests.sim.world import World

RoleT = TypeVar("RoleT")

Options = dict[str, str]

# One job takes all that is there, however little, and leaves the levels below L0 alone.
_COMPACTOR = {"wal_trigger_count": 1, "l0_trigger_count": 100}
# Age is the subject of few scenarios, and the retention of the WAL of none.
_COLLECTOR = {"collect_age_s": 0, "wal_retention_s": 0}


class Process(Generic[RoleT]):
    """One process: it opens a role once, and then lives until it ends, or is made to."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.node = world.node(name)
        self.is_told = True  # whether the scenario has said how what it does, or did, ended
        self._role: asyncio.Future[RoleT] = world.loop.create_future()
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
            self.is_told = True
            await self._life
        return self.role

    async def end(self) -> BaseException | None:
        await asyncio.wait({self._life})
        self.is_told = True
        return self._life.exception()

    def error_now(self) -> BaseException | None:
        return self._life.exception() if self.has_ended else None

    def cas(self) -> CasStore:
        world = self.world
        return CasStore(world.store_for(self.node), world.runtime_for(self.node), StoreSettings())


class Jobs(Process[RoleT]):
    """A process that does one job after another, when the scenario says so."""

    def begin_job(self, job: Coroutine[Any, Any, object]) -> None:
        """Do this; how it ends is to be told."""
        if not self.is_told:
            job.close()
            raise AssertionError(f"{self.name} does something else still")
        self.begin(job)
        self.is_told = False

    async def done(self) -> None:
        """Return once the job is done; raises what ended it."""
        error = await self.end()
        if error is not None:
            raise error


class CompactorProcess(Jobs[Compactor]):
    """A compactor, which looks for work when the scenario says so."""

    def begin_open(self, options: Options) -> None:
        """`options`: fields of `CompactorSettings`."""
        compactor = CompactorSettings.model_validate({**_COMPACTOR, **options})
        settings = CompactSettings(database=UrlSettings(url=URL), compactor=compactor)
        self.begin_job(self._open(settings))

    async def opened(self) -> Compactor:
        """As of all processes; with this its first job is over."""
        role = await super().opened()
        await self.done()
        return role

    async def _open(self, settings: CompactSettings) -> None:
        role = await Compactor.open(
            self.world.store_for(self.node),
            settings=settings,
            runtime=self.world.runtime_for(self.node),
            hurry=asyncio.Event(),
            holder=self.name,
        )
        self.has_role(role)

    def begin_pass(self) -> None:
        self.begin_job(self.role.run(is_once=True))

    def begin_close(self) -> None:
        self.begin_job(self.role.close())


class CollectorProcess(Jobs[Collecting]):
    """A collector, which collects when the scenario says so."""

    def begin_collection(self, options: Options) -> None:
        """`options`: fields of `CollectorSettings`; those of the first time hold."""
        if not self.has_opened:
            settings = CollectorSettings.model_validate({**_COLLECTOR, **options})
            self.has_role(Collecting(self.cas(), settings))
        self.begin_job(self.role.collect())


class ClientProcess(Jobs[Snapshots]):
    """Somebody who makes snapshots."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.has_role(Snapshots(self.cas()))


class CreatorProcess(Jobs[ObjectStore]):
    """A process that does nothing but create, delete and recover."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.told = ""  # of its last create
        self.has_role(world.store_for(self.node))

    async def create(self, name: str) -> None:
        """Create the object, whose contents tell whose it is."""
        self.told = type(await self.role.create(name, f"of {self.name}".encode())).__name__
