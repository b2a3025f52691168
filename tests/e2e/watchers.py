"""Clients that watch a server, resume at the next one when it is killed, and record all commits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

import grpc

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.processes.wal_contents import Changes

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
