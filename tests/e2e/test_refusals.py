"""A server that refuses as much as it can does not grow.

`make soak` does it for half an hour; REFUSALS_S in the environment takes another time, in seconds.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.processes.child import Child
from tests.kit.processes.process_memory import resident_bytes
from tests.kit.processes.processes import Processes
from tests.kit.serving.roles import METHODS, absent, add, header, key_header, present
from tests.unit.rpc.sessions import operation

DURATION_S = 3.0
SOAK_S = float(os.environ.get("REFUSALS_S", "1800"))
SAMPLES = 20  # of the resident bytes; the first half shows the need at full load
GROWTH_BYTES_MAX = 8 << 20  # beyond that in the second half: what is free is not always reused
CALLS, SESSIONS, IN_FLIGHT = 100, 4, 350  # calls at once; operations of each session at once

Put = kv_pb2.PutRequest
REQUESTS: tuple[Message, ...] = (
    Put(key=b"k", value=bytes(100), precondition=absent()),
    Put(key=b"k", precondition=absent(), header=header(kv_pb2.READ_LEVEL_COMMITTED)),
    Put(key=b"k", precondition=absent(), header=key_header(b"idempotency-key!")),
    kv_pb2.DeleteRequest(key=b"none", precondition=present()),
    kv_pb2.WriteRequest(changes=[add(b"k")]),
    kv_pb2.TxnRequest(),
    Put(key=b""),
    kv_pb2.GetRequest(key=b""),
)


class Refused:
    """Clients all of whose requests are refused, at the rate that the server allows, for a time.

    A time without refusals, in which nobody has come to it, does not count.
    """

    def __init__(self, server: Child, duration_s: float) -> None:
        self.reasons: Counter[str] = Counter()
        self.samples: list[int] = []  # resident bytes of the server, at least so long apart
        self._server = server
        self._apart_s = duration_s / SAMPLES
        self._sampled_s = 0.0

    async def run(self) -> None:
        async with grpc.aio.insecure_channel(self._server.listen) as channel:
            kv = kv_pb2_grpc.KVStub(channel)
            await kv.Put(Put(key=b"k", value=b"no counter"))
            self._sampled_s = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for number in range(CALLS):
                    tasks.create_task(self._call(kv, number))
                for _ in range(SESSIONS):
                    tasks.create_task(self._converse(kv))

    @property
    def _is_over(self) -> bool:
        return len(self.samples) >= SAMPLES

    def _count(self, how: str, count: int = 1) -> None:
        self.reasons[how] += count
        now_s = time.monotonic()
        if not self._is_over and now_s - self._sampled_s >= self._apart_s:
            self._sampled_s = now_s
            self.samples.append(resident_bytes(self._server.pid))
            sys.stdout.write(f"{len(self.samples)}: {self.samples[-1] >> 10} KiB\n")

    async def _call(self, kv: kv_pb2_grpc.KVStub, number: int) -> None:
        methods: dict[str, Callable[..., Any]] = {
            "put": kv.Put,
            "delete": kv.Delete,
            "write": kv.Write,
            "txn": kv.Txn,
            "get": kv.Get,
        }
        for request in cycle([*REQUESTS[number % len(REQUESTS) :], *REQUESTS]):
            try:
                await methods[METHODS[type(request)]](request)
            except grpc.aio.AioRpcError as error:
                self._count(error.code().name)
            if self._is_over:
                return

    async def _converse(self, kv: kv_pb2_grpc.KVStub) -> None:
        call: Any = kv.Session()
        operations = [operation(number, each) for number, each in _numbered()]
        await call.write(kv_pb2.SessionRequest(operations=operations))
        left = len(operations)
        while left:
            reply = await call.read()
            self._count("in a session", sum(each.HasField("error") for each in reply.results))
            again = [operations[each.id] for each in reply.results if not self._is_over]
            left -= len(reply.results) - len(again)
            if again:
                await call.write(kv_pb2.SessionRequest(operations=again))
        await call.done_writing()


def _numbered() -> zip[tuple[int, Message]]:
    return zip(range(IN_FLIGHT), cycle(REQUESTS), strict=False)


@pytest.mark.timeout(SOAK_S + 300)
@pytest.mark.parametrize(
    "duration_s", [DURATION_S, pytest.param(SOAK_S, marks=pytest.mark.soak)], ids=["short", "soak"]
)
async def test_refusals_take_no_memory(
    processes: Processes, tmp_path: Path, duration_s: float
) -> None:
    """Conditions that fail, and requests that are wrong, at full load."""
    server = await processes.serve(f"file://{tmp_path}/db")
    clients = Refused(server, duration_s)
    await clients.run()
    count = sum(clients.reasons.values())
    sys.stdout.write(f"{count} refusals, {count / duration_s:.0f} a second: {clients.reasons}\n")
    first, second = clients.samples[: SAMPLES // 2], clients.samples[SAMPLES // 2 :]
    assert max(second) - max(first) <= GROWTH_BYTES_MAX, clients.samples
    assert await server.stop() == 0, server.report()
