"""Several servers of one database for tests of clients: a writer and readers, on real sockets.

Each does what the published documentation of the API says. A reader shows what the writer has, or
what it had when it was made to `lag`. A test says who is the writer, and what readers
believe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from google.protobuf.message import Message

from shalekv.errors import NotTheWriter, SeqNotReached, TooStale
from shalekv.v1 import admin_pb2, kv_pb2
from tests.kit.serving.dict_server import DATABASE_ID, Context, DictServer, ServerState, end
from tests.kit.serving.dict_state import Data, Failed, Failure, refusing, silent

EPOCH = 7
READS = (kv_pb2.GetRequest, kv_pb2.BatchGetRequest, kv_pb2.CountRequest)


class MemberState(ServerState):
    """The state of one server, and what it reports of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.role: kv_pb2.Role.ValueType = kv_pb2.ROLE_WRITER
        self.epoch = EPOCH
        self.database_id = DATABASE_ID
        self.source: MemberState | None = None  # of a reader: the writer that it follows
        self.writer_address = ""  # of a reader: where it believes the writer to be
        self.staleness_ms = 0
        self.unmet: Failure | None = None  # of a min_seq that is not reached; None: as documented
        self.statuses = 0
        self.asked = asyncio.Event()  # for its status
        self.status_is_silent = False

    def header(self) -> kv_pb2.ReplyHeader:
        self.follow()
        return kv_pb2.ReplyHeader(
            database_id=self.database_id,
            role=self.role,
            epoch=self.epoch,
            seq=self.seq,
            wal_id=self.seq or None,
            staleness_ms=self.staleness_ms,
        )

    def answer(self, request: Any) -> Message:
        self.follow()
        header: kv_pb2.RequestHeader = request.header
        if self.role == kv_pb2.ROLE_READER:
            self.check_reader(request, header)
        return super().answer(request)

    def check_reader(self, request: Message, header: kv_pb2.RequestHeader) -> None:
        """Raise `Failed` for a call that a reader does not answer."""
        is_read = isinstance(request, (*READS, kv_pb2.ScanRequest))
        if not is_read or header.read_level > kv_pb2.READ_LEVEL_COMMITTED:
            self.begin(request)
            what = request.DESCRIPTOR.name
            raise Failed(refusing(NotTheWriter(what, writer_address=self.writer_address)))
        if header.max_staleness_ms and self.staleness_ms > header.max_staleness_ms:
            self.begin(request)
            stale = TooStale(
                staleness_ms=self.staleness_ms, max_staleness_ms=header.max_staleness_ms
            )
            raise Failed(refusing(stale))
        if header.min_seq > self.seq:
            self.begin(request)
            behind = SeqNotReached(min_seq=header.min_seq, seq=self.seq)
            raise Failed(self.unmet or refusing(behind))

    def admit(self, request: kv_pb2.ScanRequest) -> None:
        """Raise `Failed` for a scan that a reader does not answer."""
        self.follow()
        if self.role == kv_pb2.ROLE_READER:
            self.check_reader(request, request.header)

    def follow(self) -> None:
        if self.source is not None:
            self.data, self.seq = self.source.data, self.source.seq

    def lag(self, *, silently: bool = True) -> None:
        """Apply nothing more; requests for a later commit wait for ever, or are refused."""
        self.follow()
        self.source = None
        self.unmet = silent() if silently else None


class Member(DictServer):
    """One server."""

    state: MemberState
    scan_message_entries = 2

    def __init__(self, snapshots: dict[bytes, Data]) -> None:
        super().__init__()
        self.state = MemberState()
        self.snapshots = snapshots

    async def _status(
        self, _request: admin_pb2.StatusRequest, context: Context
    ) -> admin_pb2.StatusReply:
        self.state.statuses += 1
        self.state.asked.set()
        if self.state.status_is_silent:
            await end(context, silent())
        reader = None
        if self.state.role == kv_pb2.ROLE_READER:
            reader = admin_pb2.ReaderStatus(writer_address=self.state.writer_address)
        return admin_pb2.StatusReply(
            header=self.state.header(), version=self.address, reader=reader
        )


class Cluster:
    """A writer and readers that follow it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.snapshots: dict[bytes, Data] = {}
        self.readers: list[Member] = []

    async def add(self) -> Member:
        """Add a running server with no data, which reports itself as the writer."""
        return await self._stack.enter_async_context(Member(self.snapshots))

    async def begin(self, readers: int) -> None:
        self.writer = await self.add()
        for _ in range(readers):
            reader = await self.add()
            reader.state.role = kv_pb2.ROLE_READER
            self.readers.append(reader)
        self.tell(self.writer)

    def tell(self, writer: Member) -> None:
        for reader in self.readers:
            reader.state.source = writer.state
            reader.state.epoch = writer.state.epoch
            reader.state.writer_address = writer.address

    async def take_over(self) -> Member:
        """Add a new writer with the data of the old one, which no server has reported yet."""
        old, new = self.writer.state, await self.add()
        new.state.data, new.state.seq = dict(old.data), old.seq + (1 << 32)
        new.state.replies, new.state.loads = dict(old.replies), dict(old.loads)
        new.state.epoch = old.epoch + 1
        self.writer = new
        return new

    @property
    def addresses(self) -> list[str]:
        return [member.address for member in (*self.readers, self.writer)]


@asynccontextmanager
async def cluster(readers: int = 2) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        running = Cluster(stack)
        await running.begin(readers)
        yield running


async def until_called(member: Member, method: str, count: int = 1) -> None:
    while member.state.calls[method] < count:
        member.state.begun.clear()
        await asyncio.wait_for(member.state.begun.wait(), 10.0)


async def until_asked(member: Member, count: int) -> None:
    """Wait until a server was asked for its status so often."""
    while member.state.statuses < count:
        member.state.asked.clear()
        await asyncio.wait_for(member.state.asked.wait(), 10.0)
