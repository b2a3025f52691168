"""A database with its log in safekeepers, and writers of it, all in the process of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any, Self

from shalekv.clock import LoopClock
from shalekv.errors import ShaleError
from shalekv.protocol.manifest import WalMode
from shalekv.protocol.membership import Member
from shalekv.runtime import Runtime
from shalekv.settings import QuorumSettings, StoreSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.write.commit import Commit, Receipt, changes_bytes
from shalekv.write.engine import WriterEngine
from shalekv.write.opening import open_log
from shalekv.write.quorum.links import DatabasePlace
from shalekv.write.quorum.wal import QuorumWal
from shalekv.write.recovery import RecoveredLog
from tests.kit.engine.commits import read
from tests.kit.engine.databases import Database
from tests.kit.engine.running_log import Write
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.quorum.links import InProcessLinks
from tests.kit.quorum.nodes import KeptLog, Nodes

GRACE_MS = 1_000
ARCHIVE_EVERY_MS = 20
UNTIL_MS_MAX = 60_000
# Short enough that a test of what happens after them is no long run, in time that is not real.
TIMES = {"vote_timeout_ms": 12_000, "quorum_timeout_ms": 1_000}


def runtime(seed: int) -> Runtime:
    return Runtime(LoopClock(), Random(seed), InlineWorkers())


async def until(is_so: Callable[[], bool]) -> None:
    """Return when it is so, which what runs beside brings about."""
    for _ in range(UNTIL_MS_MAX):
        if is_so():
            return
        await LoopClock().sleep_ms(1)
    raise AssertionError("it never is")


class QuorumDatabase(Database):
    """A database, its bucket and its safekeepers."""

    database_id: bytes
    nodes: Nodes

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._opening_count = 0

    @classmethod
    async def in_object_store(cls, seed: int = 0, *, count: int = 6) -> Self:
        """Its log is in the bucket, and the nodes have nothing of it."""
        database = await super().created(seed)
        database.nodes = Nodes(count)
        database.database_id = (await database.manifest()).database_id
        return database

    @classmethod
    async def created(cls, seed: int = 0, *, count: int = 3) -> Self:
        database = await cls.in_object_store(seed, count=count)
        members = tuple(map(str, database.nodes.admit_all(database.place)))
        await database.edit(
            lambda m: replace(m, wal_mode=WalMode.QUORUM, wal_members=members, wal_generation=1)
        )
        return database

    @property
    def place(self) -> DatabasePlace:
        return DatabasePlace(self.database_id, self.store.url)

    def links(self) -> InProcessLinks:
        return InProcessLinks(self.nodes)

    def logs(self) -> list[KeptLog]:
        return self.nodes.logs(self.database_id)

    def log(self, address: str) -> KeptLog:
        return self.nodes[address].log(self.database_id)

    def member(self, address: str) -> Member:
        return Member(self.log(address).state.member_id, address)

    def cas(self) -> CasStore:
        self._opening_count += 1
        return CasStore(self.another_store(), runtime(self._opening_count), StoreSettings())

    async def archive(self) -> None:
        await self.nodes.archive(self.cas(), self.database_id)

    async def keep_archiving(self) -> None:
        cas = self.cas()
        while True:
            await self.nodes.archive(cas, self.database_id)
            await LoopClock().sleep_ms(ARCHIVE_EVERY_MS)

    async def opened(self, links: InProcessLinks | None = None, **quorum: Any) -> RecoveredLog:
        return await open_log(
            self.cas(),
            WriterSettings(flush_interval_ms=0),
            address="here:1",
            links=links or self.links(),
            quorum=QuorumSettings.model_validate(TIMES | {"archive_interval_ms": 100} | quorum),
        )

    def let_archive(self, can: bool) -> None:  # noqa: FBT001 - there is nothing else to say
        for kept in self.logs():
            kept.can_archive = can

    @asynccontextmanager
    async def writing(
        self, links: InProcessLinks | None = None, *, is_killed: bool = False, **quorum: Any
    ) -> AsyncIterator[Writing]:
        """A writer that runs, and safekeepers that archive beside it.

        At the end it is closed, or killed: then the end of its log is not archived.
        """
        links = links or self.links()
        opened = await self.opened(links, **quorum)
        async with asyncio.TaskGroup() as tasks:
            archiving = tasks.create_task(self.keep_archiving())
            writing = Writing(opened, links)
            running = tasks.create_task(writing.run())
            try:
                yield writing
            finally:
                if is_killed:
                    running.cancel()
                else:
                    writing.engine.close()
                await asyncio.wait([running])
                archiving.cancel()


class Writing:
    """A writer that runs."""

    def __init__(self, opened: RecoveredLog, links: InProcessLinks) -> None:
        self.opened = opened
        self.links = links
        self.engine = WriterEngine(opened, WriterSettings(flush_interval_ms=0), LoopClock())
        self.ended_by: ShaleError | None = None

    @property
    def slots(self) -> QuorumWal:
        assert isinstance(self.opened.wal, QuorumWal)
        return self.opened.wal

    @property
    def committed_lsn(self) -> int:
        return self.slots.report().committed_lsn

    async def run(self) -> None:
        """Run until it is closed or has failed; `ended_by` has the error."""
        try:
            await self.engine.run(stop_grace_ms=GRACE_MS)
        except ShaleError as error:
            self.ended_by = error

    def write(self, key: bytes, value: bytes = b"v") -> Write:
        write = Write(key, value)
        assert self.engine.admission.try_admit(changes_bytes(write.changes))
        commit = self.engine.log.submit(
            Commit(write.changes, self.engine.log.next_seq, write.settle)
        )
        del commit
        return write

    async def put(self, key: bytes, value: bytes = b"v") -> Receipt:
        return await self.write(key, value).receipt()

    async def contents(self) -> list[tuple[bytes, bytes]]:
        return read(await self.engine.committed_view())
