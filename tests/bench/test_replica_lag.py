"""How long after its acknowledgement a write is seen at a reader, beside what polling explains.

Writer and reader are processes on versitygw, which runs on the same processors. Nothing is asserted
about time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from statistics import median, quantiles

import pytest

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.bench.sizes import sized
from tests.kit.processes.processes import Processes
from tests.kit.processes.stubs import kv_stub
from tests.servers.fixtures import BUCKET
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.timeout(600)

WRITES = sized(120, 4)
APART_POLLS = 3  # at most, between two writes: else they would keep step with the polls
KEY = b"key"
CALL_S = 20.0
SETTLE_S = 1.0


@asynccontextmanager
async def following(
    server: S3Server, poll_ms: int
) -> AsyncIterator[tuple[kv_pb2_grpc.KVStub, kv_pb2_grpc.KVStub]]:
    """A writer, and a reader that asks so often."""
    env = server.environment | {"SHALEKV_STORE__ENDPOINT_URL": server.endpoint}
    url = f"s3://{BUCKET}/poll-{poll_ms}"
    with Processes() as processes:
        writer = await processes.serve(url, "--flush-interval-ms", "0", env=env)
        reader = await processes.read(url, "--poll-interval-ms", str(poll_ms), env=env)
        async with kv_stub(writer.listen) as writes, kv_stub(reader.listen) as reads:
            yield writes, reads


async def seen_at(reads: kv_pb2_grpc.KVStub, seq: int) -> float:
    """The moment at which a read that demands nothing shows the commit, in seconds."""
    while True:
        reply = await reads.Get(kv_pb2.GetRequest(key=KEY), timeout=CALL_S)
        if reply.header.seq >= seq:
            return time.monotonic()


@pytest.mark.parametrize("poll_ms", [50, 250])
async def test_time_from_acknowledgement_to_a_reader(s3_server: S3Server, poll_ms: int) -> None:
    """The median is to be at most half a poll interval and two round trips to the store."""
    random = Random(poll_ms)
    lags_ms, puts_ms = [], []
    async with following(s3_server, poll_ms) as (writes, reads):
        await asyncio.sleep(SETTLE_S)
        for number in range(WRITES):
            began = time.monotonic()
            request = kv_pb2.PutRequest(key=KEY, value=b"%d" % number)
            reply = await writes.Put(request, timeout=CALL_S)
            acknowledged = time.monotonic()
            puts_ms.append(1_000 * (acknowledged - began))
            lags_ms.append(1_000 * (await seen_at(reads, reply.header.seq) - acknowledged))
            await asyncio.sleep(random.uniform(0, APART_POLLS * poll_ms) / 1_000)
    trip_ms = median(puts_ms)  # a lone durable put is one request to the store
    bound_ms = poll_ms / 2 + 2 * trip_ms
    found_ms = median(lags_ms)
    worst_ms = quantiles(lags_ms, n=100)[98]
    print(
        f"\npoll {poll_ms} ms: lag median {found_ms:.1f} ms, p99 {worst_ms:.1f} ms; "
        f"bound {bound_ms:.1f} ms ({trip_ms:.1f} ms a round trip): {found_ms / bound_ms:.2f} of it"
    )
