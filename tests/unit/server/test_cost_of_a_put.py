"""The cost of a durable put: syncs, requests, jobs of workers, and calls of Python functions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TypeVar, TypeVarTuple

import pytest

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.server.service import Call
from shalekv.server.writer import Writer
from shalekv.store.api import ObjectStore, RequestKind
from shalekv.store.files import FileSystem
from shalekv.store.local import LocalStore
from shalekv.v1 import kv_pb2
from shalekv.write.pending_replies import PendingReply
from tests.kit.processes.in_process import (
    memory_store,
    real_runtime,
    running,
    serve_settings,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
CALL = Call(peer="test")
COMMITS = 20
TOGETHER = 64  # puts of one turn of the loop
NO_POLLS = {"fence_poll_ms": 600_000, "open_timeout_ms": 600_000}  # which are requests, too
# Python functions that are called for a put; measured, and a tenth more. A group costs 33 for its
# activity, its stages and its bill, which a lone put pays alone.
FRAMES_MAX = {1: 224, TOGETHER: 33}


class CountingFiles(FileSystem):
    """Files that count what makes them durable."""

    def __init__(self) -> None:
        self.syncs = 0

    def fsync(self, descriptor: int) -> None:
        self.syncs += 1
        super().fsync(descriptor)

    def sync_data(self, descriptor: int) -> None:
        self.syncs += 1
        super().sync_data(descriptor)


class CountingWorkers(ThreadWorkers):
    """Threads that count their jobs."""

    def __init__(self) -> None:
        super().__init__(2)
        self.jobs = 0

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        self.jobs += 1
        return await super().run(function, *args)


class Puts:
    """Durable puts of new keys, some in each turn of the loop."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._numbers = count()

    async def commit(self, together: int) -> None:
        """Put so many keys in one turn, and wait until all are durable."""
        answers = []
        for number in [next(self._numbers) for _ in range(together)]:
            request = kv_pb2.PutRequest(key=b"%016d" % number, value=b"v" * 100)
            answer = self.writer.kv.put(request, CALL)
            assert isinstance(answer, PendingReply)
            answers.append(answer)
        last = asyncio.get_running_loop().create_future()
        answers[-1].add_done_callback(lambda _: last.set_result(None))
        await last
        assert all(isinstance(answer.result(), bytes) for answer in answers)


@pytest.mark.parametrize("together", [1, TOGETHER])
async def test_a_commit_is_one_request_one_job_and_two_syncs(tmp_path: Path, together: int) -> None:
    """A commit costs a create, in one hop to a thread, with a sync of the file and its folder."""
    files, workers = CountingFiles(), CountingWorkers()
    with real_runtime() as plain:
        runtime = Runtime(LoopClock(), plain.random, workers)
        store: ObjectStore = LocalStore(tmp_path, runtime, filesystem=files)
        async with running(store, serve_settings(writer=NO_POLLS), runtime) as writer:
            puts = Puts(writer)
            await puts.commit(together)
            before = files.syncs, workers.jobs, store.sent.by_kind[RequestKind.WRITE]
            for _ in range(COMMITS):
                await puts.commit(together)
            after = files.syncs, workers.jobs, store.sent.by_kind[RequestKind.WRITE]
    workers.close()
    assert [now - then for now, then in zip(after, before, strict=True)] == [
        2 * COMMITS,
        COMMITS,
        COMMITS,
    ]


@pytest.mark.parametrize("together", [1, TOGETHER])
async def test_a_put_calls_few_functions(together: int) -> None:
    """Growth here is a cost for each put, on any machine: raise the bound for a reason only."""
    with real_runtime() as runtime:
        async with running(memory_store(), serve_settings(), runtime) as writer:
            puts = Puts(writer)
            await puts.commit(together)
            with called() as frames:
                for _ in range(COMMITS):
                    await puts.commit(together)
    assert frames[0] / (COMMITS * together) <= FRAMES_MAX[together]


@contextmanager
def called() -> Iterator[list[int]]:
    """Count the Python functions of the project that are called in the block."""
    frames = [0]

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        frames[0] += event == "call" and "/shalekv/" in frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield frames
    finally:
        sys.setprofile(before)
