"""A safekeeper as a process: killed, stopped in order, and started in the wrong way."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from shalekv.protocol.quorum_records import Append, Ballot, Refusal, VoteRequest
from shalekv.rpc.safekeeper_links import GrpcLinks
from shalekv.write.quorum.links import DatabasePlace, LinkBroken
from tests.kit.processes.child import READY_S, Child
from tests.kit.processes.processes import Processes
from tests.kit.quorum.safekeepers import DATABASE_ID, DEADLINE_S, REQUEST_ID, Writer, flushed_lsn


def start(processes: Processes, folder: Path, *flags: str) -> Child:
    """Start a safekeeper on a free port, and don't wait."""
    return processes.start(
        *("safekeeper", "--data", f"{folder}/data", "--url", f"file://{folder}/archive"),
        *("--listen", "127.0.0.1:0", "--log-format", "json", *flags),
    )


@asynccontextmanager
async def links() -> AsyncIterator[GrpcLinks]:
    made = GrpcLinks()
    try:
        yield made
    finally:
        await made.close()


async def test_promise_and_records_survive_a_kill(processes: Processes, tmp_path: Path) -> None:
    """Promises and acknowledged records are there after SIGKILL in the middle of appends."""
    place = DatabasePlace(DATABASE_ID, f"file://{tmp_path}/archive/db")
    async with links() as way:
        node = start(processes, tmp_path)
        await node.ready(within_s=READY_S)
        member_id = await way.admit(node.listen, place, REQUEST_ID)
        writer = Writer(await way.connect(node.listen, place), Ballot(7, b"7" * 16))
        await writer.win()
        acknowledged = 0
        for number in range(300):
            await writer.link.send(Append(writer.ballot, writer.make(b"%d" % number), 0))
        while acknowledged < 100:
            acknowledged = flushed_lsn(await writer.link.receive())
        await node.kill()
        with suppress(LinkBroken):
            while True:
                acknowledged = flushed_lsn(await writer.link.receive())
        again = start(processes, tmp_path)
        await again.ready(within_s=READY_S)
        older = Writer(await way.connect(again.listen, place), Ballot(6, b"6" * 16))
        greeting = await older.greet()
        assert (greeting.member_id, greeting.promise) == (member_id, writer.ballot)
        assert isinstance(await older.ask(VoteRequest(member_id, older.ballot)), Refusal)
        assert acknowledged <= greeting.log.last.lsn <= 300
        held = [
            record
            async for records in way.fetch(again.listen, DATABASE_ID, member_id, 1)
            for record in records
        ]
        assert held == writer.records[: len(held)]
        assert len(held) >= acknowledged


async def test_stopped_in_order(processes: Processes, tmp_path: Path) -> None:
    """SIGTERM ends a node with open streams, with exit code 0."""
    place = DatabasePlace(DATABASE_ID, f"file://{tmp_path}/archive/db")
    async with links() as way:
        node = start(processes, tmp_path)
        await node.ready(within_s=READY_S)
        await way.admit(node.listen, place, REQUEST_ID)
        writer = Writer(await way.connect(node.listen, place), Ballot(7, b"7" * 16))
        await writer.win()
        tail = way.tail(node.listen, DATABASE_ID, 0)
        await anext(tail)
        assert await node.stop() == 0
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(LinkBroken):
                await anext(tail)
            with pytest.raises(LinkBroken):
                await writer.link.receive()


async def test_port_that_is_taken(processes: Processes, tmp_path: Path) -> None:
    """An address on which another process listens is exit code 7, before anything is touched."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        child = start(processes, tmp_path, "--listen", f"127.0.0.1:{port}")
        assert await child.exited() == 7, child.report()
    assert not (tmp_path / "data").exists()


async def test_folder_that_is_taken(processes: Processes, tmp_path: Path) -> None:
    """A data folder that another safekeeper uses is refused by name."""
    node = start(processes, tmp_path)
    await node.ready(within_s=READY_S)
    other = start(processes, tmp_path)
    assert await other.exited() == 6, other.report()
    assert "another safekeeper uses this folder" in other.stderr()
