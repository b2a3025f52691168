"""Watches of a real server: exactly the log, across kills and restarts, live and from the past."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv_client import Client
from tests.e2e.watchers import Commits, Follower, reply_of
from tests.kit.processes.history import History
from tests.kit.processes.load import Load
from tests.kit.processes.processes import Processes
from tests.kit.processes.wal_contents import WalObject, check_wal, read_wal
from tests.kit.seeds import random_of, run_seed

KILLS = 2
BURST_S = 0.5
DEADLINE_S = 200
PREFIXES = (b"", b"shared/", b"shared/1", b"own/", b"nothing/")


def expected(wal: list[WalObject], prefix: bytes) -> Commits:
    found = []
    for each in wal:
        for seq, changes in sorted(each.commits.items()):
            inside = {key: value for key, value in changes.items() if key.startswith(prefix)}
            if inside:
                found.append((seq, inside))
    return found


async def test_watches_tell_the_log_across_kills(processes: Processes, tmp_path: Path) -> None:
    """Watches that resume behind their last commit after a kill of their server, and one from the
    beginning, report exactly the log: all that was acknowledged, each commit once, in order. So do
    those of one reader, which outlive the writers.
    """
    random, history = random_of("watches"), History(run_seed())
    url = f"file://{tmp_path}/db"
    follower, late, replica = Follower(PREFIXES), Follower(PREFIXES), Follower(PREFIXES)
    reader = None
    at_reader: asyncio.Task[None] | None = None
    for number in range(KILLS):
        server = await processes.serve(
            url, "--max-parallel-writes", "4", "--watch-progress-ms", "20"
        )
        if reader is None:
            reader = await processes.read(url, "--watch-progress-ms", "20")
            at_reader = asyncio.create_task(replica.follow(reader.listen))
        load = Load(history, server.listen, random)
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            following = tasks.create_task(follower.follow(server.listen))
            writing = tasks.create_task(load.run())
            if number < KILLS - 1:
                asyncio.get_running_loop().call_later(
                    random.uniform(0.1, BURST_S), server.send, signal.SIGKILL
                )
                continue
            await load.acknowledged(150)
            load.stop()
            await writing
            async with Client(server.listen) as client:
                last_seq = (await client.put(b"last", b"%d:" % 10**9)).seq
            following_late = tasks.create_task(late.follow(server.listen))
            await follower.reached(last_seq)
            await late.reached(last_seq)
            await replica.reached(last_seq)
            assert await reader.stop() == 0, reader.report()
            assert at_reader is not None
            await at_reader
            assert await server.stop() == 0, server.report()
            await following
            await following_late
    wal = read_wal(tmp_path / "db")
    for each in (follower, late, replica):
        for prefix, commits in zip(PREFIXES, each.commits, strict=True):
            assert commits == expected(wal, prefix)
    del wal[-1]  # the marker, which is not in the history
    check_wal(wal, history)


async def test_a_server_that_stops_ends_each_watch_with_a_reason(
    processes: Processes, tmp_path: Path
) -> None:
    """A server that is stopped ends at once although streams of watches are open, one of which is
    not read: each watch gets STOPPING, and the stream ends as UNAVAILABLE with that reason.
    """
    server = await processes.serve(f"file://{tmp_path}/db", "--shutdown-grace-ms", "60000")
    async with (
        grpc.aio.insecure_channel(server.listen) as channel,
        Client(server.listen) as client,
    ):
        stuck = kv_pb2_grpc.KVStub(channel).Watch()
        await stuck.write(kv_pb2.WatchRequest(create=kv_pb2.WatchCreate(watch_id=1)))
        await stuck.read()
        for number in range(10):
            await client.put(b"%d" % number, bytes(1_000_000))
        call = kv_pb2_grpc.KVStub(channel).Watch()
        create = kv_pb2.WatchCreate(watch_id=1)
        await call.write(kv_pb2.WatchRequest(create=create))
        assert (await reply_of(call)).opened_at_seq == 11
        async with asyncio.timeout(DEADLINE_S):
            server.send(signal.SIGTERM)
            assert (await reply_of(call)).closed.reason == "STOPPING"
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert "shutting down" in await call.details()
            assert await server.exited() == 0, server.report()
