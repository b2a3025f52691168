"""Watches of a real server: exactly the log, across kills and restarts, live and from the past."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import grpc

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from shalekv_client import Client
from tests.kit.processes.history import History
from tests.kit.processes.load import Load
from tests.kit.processes.processes import Processes
from tests.kit.processes.wal_contents import Changes, WalObject, check_wal, read_wal
from tests.kit.seeds import random_of, run_seed

Commits = list[tuple[int, Changes]]
WatchCall: TypeAlias = "grpc.aio.StreamStreamCall[kv_pb2.WatchRequest, kv_pb2.WatchReply]"


async def reply_of(call: WatchCall) -> kv_pb2.WatchReply:
    reply = await call.read()
    assert isinstance(reply, kv_pb2.WatchReply), "the stream is over"
    return reply


class Follower:
    """Some prefixes on one stream; each resumes behind its last commit."""

    def __init__(self, prefixes: Sequence[bytes]) -> None:
        self.prefixes = prefixes
        self.commits: list[Commits] = [[] for _ in prefixes]
        self.seen = [0 for _ in prefixes]  # everything up to there was reported
        self._partial: list[Changes] = [{} for _ in prefixes]
        self._moved = asyncio.Event()

    async def follow(self, address: str) -> None:
        """Watch the server at `address` until it is gone."""
        self._partial = [{} for _ in self.prefixes]
        async with grpc.aio.insecure_channel(address) as channel:
            call = kv_pb2_grpc.KVStub(channel).Watch()
            try:
                for number, prefix in enumerate(self.prefixes):
                    create = kv_pb2.WatchCreate(
                        watch_id=number,
                        range=kv_pb2.KeyRange(prefix=prefix),
                        start_seq=self.seen[number] + 1,
                    )
                    await call.write(kv_pb2.WatchRequest(create=create))
                async for reply in call:
                    self._note(reply)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE, error  # noqa: PT017 - it is expected
            except asyncio.InvalidStateError:
                pass  # the call was over before all was written

    async def reached(self, seq: int) -> None:
        """Wait until every watch has everything up to `seq`."""
        while min(self.seen) < seq:
            self._moved.clear()
            await self._moved.wait()

    def _note(self, reply: kv_pb2.WatchReply) -> None:
        number, kind = reply.watch_id, reply.WhichOneof("event")
        seq = reply.progress_seq
        if kind == "closed":
            assert reply.closed.reason in ("STOPPING", "FENCED"), reply
        elif kind == "commit":
            changes = self._partial[number]
            for change in reply.commit.changes:
                entry = change.entry
                assert entry.key.startswith(self.prefixes[number])
                assert entry.key not in changes
                is_put = change.kind == kv_pb2.WatchChange.KIND_PUT
                changes[entry.key] = entry.value if is_put else None
            if reply.commit.more:
                return
            seq = reply.commit.seq
            assert seq > self.seen[number], "told twice, or out of order"
            self.commits[number].append((seq, changes))
            self._partial[number] = {}
        if seq > self.seen[number]:
            self.seen[number] = seq
            self._moved.set()


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


async def test_watches_report_the_log_across_kills(processes: Processes, tmp_path: Path) -> None:
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
