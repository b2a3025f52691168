"""Scans whose clients read only one message: others get the memory, and slow ones soon an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from shalekv.clock import LoopClock
from shalekv.format.sst_message import info_message
from shalekv.protocol.entry import Entry, Kind
from shalekv.settings import MIB
from shalekv.v1 import admin_pb2, kv_pb2, kv_pb2_grpc
from shalekv_client import Client
from tests.kit.processes.cluster import ALONE, Cluster
from tests.kit.processes.processes import Processes
from tests.kit.processes.stubs import admin_stub, kv_stub, reason_of
from tests.kit.timeouts import scaled_timeout_s
from tests.kit.uuids import new_uuid7

STALLED_MS = 1_500
WAIT_MS = 10_000  # the default: how long a scan waits for memory before it is refused
CLIENTS = 40
VALUE_BYTES = 16 * 1_024
KEYS = [b"key%04d" % number for number in range(128)]
PARTS = ("result_bytes_max", "scan_ahead_bytes_max")
# A client's own buffer is as small as HTTP/2 has it at first, so that a scan of 2 MiB fills it.
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
CALL_S = 60.0
POLL_MS = 20
SLOW_S = 0.2  # between two messages of a slow client


@asynccontextmanager
async def reader_of(address: str) -> AsyncIterator[kv_pb2_grpc.KVStub]:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        yield kv_pb2_grpc.KVStub(channel)


async def rest_of(call: Any, *, apart_s: float = 0.0, until_: asyncio.Event | None = None) -> int:
    """Read a scan to its end; how many entries came."""
    count = 0
    while (reply := await call.read()) is not grpc.aio.EOF:
        count += len(reply.entries)
        if until_ is not None and not until_.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(apart_s):
                    await until_.wait()
    return count


class Pace:
    """How long this process was held up at most: its clients read nothing then."""

    longest_ms = 0.0

    async def measure(self) -> None:
        clock = LoopClock()
        while True:
            before_ms = clock.monotonic_ms()
            await clock.sleep_ms(POLL_MS)
            self.longest_ms = max(self.longest_ms, clock.monotonic_ms() - before_ms)


async def rest_slowly(call: Any, hurry: asyncio.Event, pace: Pace) -> int | None:
    """Read a scan slowly until `hurry`; None if it was given up for want of this process."""
    try:
        return await rest_of(call, apart_s=SLOW_S, until_=hurry)
    except grpc.aio.AioRpcError:
        if pace.longest_ms < STALLED_MS:
            raise
        return None


async def outcome_of(call: Any) -> str:
    """Return the result of a client that reads on: the reason, or the code, of an error."""
    try:
        await rest_of(call)
    except grpc.aio.AioRpcError as error:
        return reason_of(error) or error.code().name
    return "OK"


async def put_all(_: Cluster, address: str) -> None:
    """Into memory, which nothing compacts."""
    random = Random(1)
    async with kv_stub(address) as stub:
        for key in KEYS:
            put = kv_pb2.PutRequest(key=key, value=random.randbytes(VALUE_BYTES))
            await stub.Put(put, timeout=CALL_S)


async def load_all(database: Cluster, address: str) -> None:
    """Into the levels, as one file."""
    random = Random(1)
    entries = [Entry(key, 0, Kind.PUT, random.randbytes(VALUE_BYTES)) for key in KEYS]
    info = database.add_file(new_uuid7(), entries, block_bytes=4_096)
    async with admin_stub(address) as admin:
        request = admin_pb2.IngestSstRequest(load_id="all", ssts=[info_message(info)])
        await admin.IngestSst(request, timeout=CALL_S)


async def used_bytes(address: str) -> int:
    async with admin_stub(address) as admin:
        status = await admin.Status(admin_pb2.StatusRequest(), timeout=CALL_S)
    return sum(part.bytes for part in status.memory.parts if part.name in PARTS)


@pytest.mark.parametrize(
    ("fill", "short"), [(put_all, PARTS[0]), (load_all, PARTS[1])], ids=["memory", "levels"]
)
async def test_unread_scans_give_way(
    processes: Processes, tmp_path: Path, fill: Any, short: str
) -> None:
    """With 40 scans that are not read, scans of other clients end well before they would be
    refused, and so does one that is read slowly. A client that reads on too late gets ABORTED with
    STREAM_TOO_SLOW, or CANCELLED still later; a resumable scan of our client continues by itself.
    In the end all memory is free.
    """
    database = Cluster(processes, tmp_path)
    small = (f"--{short.replace('_', '-')}", str(MIB), "--result-stalled-ms", str(STALLED_MS))
    server = await database.serve(*ALONE, *small)
    await fill(database, server.listen)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        ours = await stack.enter_async_context(Client(server.listen))
        resumable = ours.scan(resumable=True)
        keys = [(await anext(resumable)).key]
        slow_stub = await stack.enter_async_context(reader_of(server.listen))
        hurry, pace = asyncio.Event(), Pace()
        measuring = tasks.create_task(pace.measure())
        slow_call = slow_stub.Scan(kv_pb2.ScanRequest(), timeout=CALL_S)
        slow = tasks.create_task(rest_slowly(slow_call, hurry, pace))
        unread = []
        for _ in range(CLIENTS):
            stub = await stack.enter_async_context(reader_of(server.listen))
            unread.append(stub.Scan(kv_pb2.ScanRequest(), timeout=CALL_S))
        # Scans that come too late for the memory are among those that wait for it.
        await asyncio.gather(*(call.read() for call in unread))
        others = [await stack.enter_async_context(reader_of(server.listen)) for _ in range(2)]
        began_s = time.monotonic()
        scans = [stub.Scan(kv_pb2.ScanRequest(), timeout=CALL_S) for stub in others]
        assert await asyncio.gather(*map(rest_of, scans)) == [len(KEYS)] * 2
        assert time.monotonic() - began_s < scaled_timeout_s(WAIT_MS / 2_000)
        hurry.set()
        assert await slow in (len(KEYS), None)
        measuring.cancel()
        outcomes = await asyncio.gather(*map(outcome_of, unread))
        assert set(outcomes) <= {"OK", "STREAM_TOO_SLOW", "CANCELLED"}, outcomes
        assert set(outcomes) & {"STREAM_TOO_SLOW", "CANCELLED"}, outcomes
        keys += [entry.key async for entry in resumable]
        assert keys == KEYS

    async with asyncio.timeout(scaled_timeout_s(CALL_S)):
        while await used_bytes(server.listen):
            await LoopClock().sleep_ms(POLL_MS)
    assert await server.stop() == 0, server.report()
    ended = [line for line in server.lines() if line["event"] == "a stream was ended"]
    assert all(line["peer"] for line in ended), server.report()
    assert len(ended) >= outcomes.count("STREAM_TOO_SLOW")
