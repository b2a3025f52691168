"""Commands of one call: the attempt without an event loop, and what follows when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import click
import grpc
import pytest

from shalekv.cli.commands.add import add
from shalekv.cli.commands.count import count
from shalekv.cli.commands.delete import delete
from shalekv.cli.commands.exists import exists
from shalekv.cli.commands.get import get
from shalekv.cli.commands.put import put
from shalekv.cli.commands.ttl import ttl
from shalekv.cli.commands.txn import txn
from shalekv.cli.console.connection import Target
from shalekv.v1 import kv_pb2
from shalekv_client import SessionToken
from tests.kit.serving.dict_server import DictServer, Failure, bare, losing
from tests.unit.cli_client.conftest import Run
from tests.unit.client.cluster import cluster

MIB = 1024 * 1024
ELSEWHERE = SessionToken(bytes(range(16)), 1)  # of another database
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def with_event_loop(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let commands make all their calls by the `Client`, from when this is called."""

    def switch() -> None:
        monkeypatch.setattr(Target, "plain_address", None)

    return switch


@asynccontextmanager
async def relay(address: str, *, cuts: int) -> AsyncIterator[tuple[str, list[int]]]:
    """Relay connections to a server; the first `cuts` of them end before the server has answered.

    They end when the server sends DATA, so it has executed the call. Yields the address, and a list
    that has a number for each connection.
    """
    host, _, port = address.rpartition(":")
    connections: list[int] = []

    async def serve(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        connections.append(number := len(connections) + 1)
        server, to_server = await asyncio.open_connection(host, int(port))

        async def back() -> None:
            while data := await server.read(MIB):
                if number <= cuts and is_reply(data):
                    break
                to_client.write(data)
            to_client.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(back())
            while data := await client.read(MIB):
                to_server.write(data)
            to_server.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}", connections


def is_reply(data: bytes) -> bool:
    """Return whether a HEADERS frame is among the frames of `data`."""
    at = 0
    while at + 9 <= len(data):
        if data[at + 3] == 1:
            return True
        at += 9 + int.from_bytes(data[at : at + 3], "big")
    return False


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (get, "k"),
        (get, "nothing"),
        (get, "k --format json"),
        (get, "k --snapshot none"),
        (get, "k --min-seq 1"),
        (get, "k --min-seq 999 --timeout-ms 500"),
        (get, f"k --token {ELSEWHERE}"),
        (exists, "k"),
        (exists, "k nothing"),
        (ttl, "k"),
        (ttl, f"k --token {ELSEWHERE}"),
        (count, ""),
        (count, f"--token {ELSEWHERE}"),
        (put, "new v"),
        (put, "k v --if-absent"),
        (add, "n 5"),
        (delete, "k"),
        (delete, "--prefix k"),
        (txn, "--then=get\\ k"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
async def test_both_ways_say_the_same(
    run: Run, with_event_loop: Callable[[], None], command: click.Command, arguments: str
) -> None:
    """Output and exit code don't depend on whether an event loop was needed."""
    words = [word.replace("\\", " ") for word in arguments.replace("\\ ", "\\").split()]
    results: list[tuple[int, str, str]] = []
    for _ in range(2):
        async with DictServer() as server:
            server.state.data[b"k"] = kv_pb2.Entry(key=b"k", value=b"v", seq=1)
            ended = await run(command, *words, "--addr", server.address)
            said = ended.stderr.replace(server.address, "ADDRESS")
            results.append((ended.exit_code, ended.stdout, said))
        with_event_loop()
    assert results[0] == results[1]


async def test_large_values_go_both_ways(run: Run) -> None:
    """A value of 3 MiB is sent and received under flow control."""
    value = bytes(range(256)) * (3 * MIB // 256)
    assert (await run(put, "k", "-", stdin=value)).exit_code == 0
    assert (await run(get, "k", "--format", "raw")).stdout_bytes == value


@pytest.mark.parametrize("failure", [bare(UNAVAILABLE), losing()], ids=["before", "after"])
async def test_a_failed_attempt_is_repeated(run: Run, server: DictServer, failure: Failure) -> None:
    """A write that has failed once succeeds, and is applied once."""
    server.state.failures.append(failure)
    result = await run(add, "n")
    assert (result.exit_code, result.stdout) == (0, "1\n")
    assert (await run(add, "n")).stdout == "2\n"


async def test_a_reader_names_the_writer(run: Run) -> None:
    """A write that a reader has refused goes on to the writer that it reports."""
    async with cluster(readers=1) as servers:
        result = await run(put, "k", "v", "--addr", servers.readers[0].address)
        assert (result.exit_code, result.stderr) == (0, "")
        assert b"k" in servers.writer.state.data


async def test_a_cut_connection_is_repeated_once_applied(run: Run, server: DictServer) -> None:
    """When the connection ends before the reply, the write is sent again, and applied once."""
    async with relay(server.address, cuts=1) as (address, connections):
        result = await run(add, "n", "--addr", address)
    assert (result.exit_code, result.stdout, len(connections)) == (0, "1\n", 2)


async def test_an_unknown_outcome_stays_unknown(run: Run, server: DictServer) -> None:
    """A write that may have been applied is not called unapplied when later attempts fail."""
    async with relay(server.address, cuts=4) as (address, connections):
        result = await run(add, "n", "--addr", address)
    assert (result.exit_code, len(connections)) == (11, 4)
    assert "It is not known whether it was applied" in result.stderr


async def test_a_server_that_never_answers_is_left_at_the_deadline(run: Run) -> None:
    """What accepts connections and says nothing ends a command as a silent server does."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as listening:
        address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        result = await run(get, "k", "--timeout-ms", "50", "--addr", address)
    assert result.exit_code == 11
    assert "no answer within 50 ms" in result.stderr
