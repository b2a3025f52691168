"""A real safekeeper on a free port and a folder, and a writer that speaks to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from shalekv.cli.process.peers import open_links
from shalekv.clock import LoopClock
from shalekv.errors import StoreBroken
from shalekv.format.wal_record import make_record
from shalekv.protocol.quorum_records import (
    EMPTY_LOG,
    Append,
    Appended,
    Ballot,
    Elected,
    Greet,
    Greeting,
    Joined,
    LogEnd,
    LogShape,
    Record,
    RelayTarget,
    ToProposer,
    Vote,
    VoteRequest,
)
from shalekv.rpc.safekeeper_links import GrpcLinks
from shalekv.rpc.server import Server
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.safekeeper.node import Node
from shalekv.server.safekeeper.service import SafekeeperService
from shalekv.settings import SafekeeperConfig
from shalekv.store.files import REAL_FILE_SYSTEM, FileSystem
from shalekv.write.quorum.links import DatabasePlace, Link
from tests.kit.serving import rpc

DATABASE_ID = b"d" * 16
REQUEST_ID = b"r" * 16
DEADLINE_S = 30
# Nothing happens by itself in these tests.
_QUIET = {"archive_unappointed_ms": 3_600_000, "archive_list_interval_ms": 3_600_000}


@dataclass(frozen=True, slots=True)
class Safekeeper:
    """One that serves."""

    node: Node
    address: str
    links: GrpcLinks
    url: str  # of its archive

    def place(self, name: str = "db", database_id: bytes = DATABASE_ID) -> DatabasePlace:
        return DatabasePlace(database_id, f"{self.url}/{name}")

    async def admit(self) -> bytes:
        """Admit the database; return the id of the member."""
        return await self.links.admit(self.address, self.place(), REQUEST_ID)

    async def connect(self) -> Link:
        return await self.links.connect(self.address, self.place())

    async def lead(self, epoch: int, log: LogShape = EMPTY_LOG) -> Writer:
        """A writer that was elected with this log, on a stream of its own."""
        writer = Writer(await self.connect(), Ballot(epoch, b"%016d" % epoch), log)
        writer.address = self.address
        await writer.win()
        return writer


class Writer:
    """The messages of a writer on one stream."""

    def __init__(self, link: Link, ballot: Ballot, log: LogShape = EMPTY_LOG) -> None:
        self.link = link
        self.ballot = ballot
        self.log = log
        self.member_id = b""
        self.address = ""  # of the safekeeper
        self.records: list[Record] = []  # records that it has made

    async def ask(self, message: Any) -> ToProposer:
        async with asyncio.timeout(DEADLINE_S):
            await self.link.send(message)
            return await self.link.receive()

    async def greet(self) -> Greeting:
        greeting = await self.ask(Greet())
        assert isinstance(greeting, Greeting)
        self.member_id = greeting.member_id
        return greeting

    async def vote(self) -> ToProposer:
        """Ask for the promise. REQUIRES: `greet`."""
        return await self.ask(VoteRequest(self.member_id, self.ballot))

    async def elect(self) -> ToProposer:
        """Send that it was elected. REQUIRES: `greet`."""
        return await self.ask(Elected(self.member_id, self.ballot, self.log))

    async def win(self) -> None:
        await self.greet()
        vote = await self.vote()
        assert isinstance(vote, Vote), vote
        joined = await self.elect()
        assert isinstance(joined, Joined), joined

    def make(self, *payloads: bytes, ends_object: bool = True) -> tuple[Record, ...]:
        made = []
        for payload in payloads:
            last = self.log.last
            is_open = not last.ends_object and last.epoch == self.ballot.epoch
            wal_id = last.wal_id if is_open and last.wal_id is not None else last.next_wal_id
            record = make_record(
                last,
                epoch=self.ballot.epoch,
                wal_id=wal_id,
                ends_object=ends_object,
                payload=payload,
            )
            self.log = self.log.appended([record])
            made.append(record)
        self.records += made
        return tuple(made)

    async def append(self, *payloads: bytes, committed_lsn: int = 0) -> ToProposer:
        return await self.send(self.make(*payloads), committed_lsn=committed_lsn)

    async def send(
        self, records: Iterable[Record], *, committed_lsn: int = 0, relays: Sequence[Writer] = ()
    ) -> ToProposer:
        """Send these records, to be relayed to members that other writers use; return the reply."""
        targets = tuple(RelayTarget(each.member_id, each.address) for each in relays)
        return await self.ask(Append(self.ballot, tuple(records), committed_lsn, b"", targets))

    async def hear(self) -> ToProposer:
        async with asyncio.timeout(DEADLINE_S):
            return await self.link.receive()

    async def commit(self, lsn: int) -> None:
        """Send how far the log is committed. There is no reply."""
        await self.link.send(Append(self.ballot, (), lsn))


def flushed_lsn(reply: ToProposer) -> int:
    assert isinstance(reply, Appended), reply
    return reply.flushed_lsn


def last_of(records: Iterable[Record]) -> LogEnd:
    return [*records][-1].mark


def safekeeper_settings(folder: Path, **changes: Any) -> SafekeeperConfig:
    return SafekeeperConfig.model_validate(
        {
            "database": {"url": f"file://{folder}/archive"},
            "server": {"listen": "127.0.0.1:0", "wire": rpc.WIRE},
            "safekeeper": {"data": f"{folder}/data", "segment_bytes": 1 << 16} | changes,
            "archiving": _QUIET,
        }
    )


@asynccontextmanager
async def running_node(
    settings: SafekeeperConfig,
    *,
    filesystem: FileSystem = REAL_FILE_SYSTEM,
    settles: bool = True,
    links: GrpcLinks | None = None,
) -> AsyncIterator[Node]:
    """A node on its folder; at the end all that was taken is durable, unless not `settles`.

    By `links` it passes on what it is asked to.
    """
    workers, sync_workers = ThreadWorkers(2), ThreadWorkers(1)
    runtime = Runtime(clock=LoopClock(), random=Random(), workers=workers)
    try:
        node = await Node.open(
            settings, runtime, sync_workers=sync_workers, filesystem=filesystem, links=links
        )
    except BaseException:
        sync_workers.close()
        workers.close()
        raise

    async def run() -> None:
        with suppress(StoreBroken):  # `ended` has the error
            await node.run()

    try:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run())
            try:
                yield node
            finally:
                if settles:
                    node.close()
                else:
                    running.cancel()
    finally:
        sync_workers.close()
        await node.release()
        workers.close()


@asynccontextmanager
async def safekeeper(
    folder: Path, *, filesystem: FileSystem = REAL_FILE_SYSTEM, **changes: Any
) -> AsyncIterator[Safekeeper]:
    """A node that serves; `changes` are those of its settings that are not the defaults.

    Its calls, and those of its links, go over the wire that the test has chosen.
    """
    settings = safekeeper_settings(folder, **changes)
    async with (
        open_links(settings.tls, settings.server.wire) as links,
        running_node(settings, filesystem=filesystem, links=links) as node,
    ):
        runtime = Runtime(clock=LoopClock(), random=Random(), workers=ThreadWorkers(1))
        server = Server(settings.server, runtime)
        await server.start_safekeeper(SafekeeperService(node))
        try:
            yield Safekeeper(node, server.listen, links, settings.database.url)
        finally:
            await links.close()
            node.close()
            await server.stop()
