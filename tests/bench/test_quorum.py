"""A commit by a quorum, beside a commit in the object store.

Safekeepers, servers and the replica are processes; the bucket of all of them is a real S3 server
that answers 25 ms late. Everything is measured in rounds, in turns. Nothing is asserted about time.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import pytest
import uvloop
from structlog.testing import capture_logs

from shalekv.cli.commands.admin_stats import OBJECTS
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.bench.interleaved import load
from tests.bench.sizes import sized
from tests.kit.processes.cluster import Cluster
from tests.kit.processes.processes import Processes
from tests.kit.processes.stubs import kv_stub
from tests.servers.object_stores import versitygw
from tests.servers.proxy import Proxy, proxy_before

pytestmark = pytest.mark.timeout(600)

BUCKET = "bench"
STORE_MS = 25
SAFEKEEPERS = 3
ROUNDS = sized(15, 2)
LONE_PUTS = sized(40, 4)
LONE_PUTS_IN_STORE = sized(6, 2)
CLIENTS = sized(64, 8)
PUTS_PER_CLIENT = sized(8, 2)
VISIBLE = sized(20, 2)
BUSY_S = sized(4.0, 0.1)
VALUE = bytes(100)
CALL_S = 20.0
DAY_S = 24 * 60 * 60
PRICES = OBJECTS["s3"]

Put = Callable[[int], Awaitable[kv_pb2.PutReply]]


@dataclass(frozen=True, slots=True)
class Servers:
    """Everything that is measured."""

    served: kv_pb2_grpc.KVStub
    replica: kv_pb2_grpc.KVStub
    in_store: kv_pb2_grpc.KVStub
    proxy: Proxy


class Rounds:
    """Results of each round, by name."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = defaultdict(list)

    def median(self, name: str) -> float:
        return median(self.found[name])

    def ratio(self, name: str, beside: str) -> str:
        """The ratio to another, round by round: the median and the quartiles."""
        pairs = zip(self.found[name], self.found[beside], strict=True)
        lower, middle, upper = quantiles([own / other for own, other in pairs], method="inclusive")
        return f"{middle:5.2f} ({lower:.2f} to {upper:.2f})"


def test_commits_by_a_quorum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints latency of puts, lone commits, visibility and requests, each beside its measure."""

    async def campaign() -> None:
        async with _started(tmp_path, monkeypatch) as servers:
            for stub in (servers.served, servers.in_store):
                await _lone_ms(_put_there(stub), LONE_PUTS_IN_STORE)
            await _put_all(_put_there(servers.served))
            rounds = Rounds()
            for number in range(ROUNDS):
                await _round(servers, rounds, is_turned=number % 2 > 0)
            _print_times(rounds)
            await _print_price(servers)

    with capture_logs():
        uvloop.run(campaign())


@asynccontextmanager
async def _started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        server = stack.enter_context(versitygw())
        await asyncio.to_thread(server.create_bucket, BUCKET)
        proxy = await stack.enter_async_context(proxy_before(server))
        proxy.delay(STORE_MS / 1_000)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        environment = {"SHALEKV_STORE__ENDPOINT_URL": proxy.server.endpoint}
        processes = stack.enter_context(Processes())
        bucket = f"s3://{BUCKET}"
        cluster = Cluster(processes, folder, count=SAFEKEEPERS, bucket=bucket, env=environment)
        await cluster.start()
        served = await cluster.serve()
        replica = await cluster.read()
        in_store = await processes.serve(
            f"{bucket}/in_store", "--flush-interval-ms", "0", env=environment
        )
        writes, reads, stored = [
            await stack.enter_async_context(kv_stub(process.listen))
            for process in (served, replica, in_store)
        ]
        yield Servers(writes, reads, stored, proxy)


def _put_there(stub: kv_pb2_grpc.KVStub) -> Put:
    async def put(number: int) -> kv_pb2.PutReply:
        return await stub.Put(_request(number), timeout=CALL_S)

    return put


def _request(number: int) -> kv_pb2.PutRequest:
    return kv_pb2.PutRequest(key=b"%016d" % number, value=VALUE)


async def _round(servers: Servers, rounds: Rounds, *, is_turned: bool) -> None:
    """Measure each way once, in an order that turns round each time."""
    put = _put_there(servers.served)
    ways: dict[str, Awaitable[float]] = {
        "alone": _lone_ms(put, LONE_PUTS),
        "together": _put_all(put),
        "in store": _lone_ms(_put_there(servers.in_store), LONE_PUTS_IN_STORE),
        "seen": _visible_ms(servers),
    }
    for name in reversed(list(ways)) if is_turned else list(ways):
        rounds.found[name].append(await ways[name])


async def _lone_ms(put: Put, count: int) -> float:
    took_ms = []
    for number in range(count):
        began_s = time.perf_counter()
        await put(number)
        took_ms.append((time.perf_counter() - began_s) * 1_000)
    return median(took_ms)


async def _put_all(put: Put) -> float:
    """Return the median of puts by many clients, each with one put in flight."""
    took_ms: list[float] = []

    async def client(number: int) -> None:
        for n in range(PUTS_PER_CLIENT):
            began_s = time.perf_counter()
            await put(number * PUTS_PER_CLIENT + n)
            took_ms.append((time.perf_counter() - began_s) * 1_000)

    async with asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(client(number))
    return median(took_ms)


async def _visible_ms(servers: Servers) -> float:
    """From a put to its being seen on the replica, by a read that waits for it there."""
    put = _put_there(servers.served)
    seq = (await put(0)).header.seq
    took_ms = []
    for number in range(VISIBLE):
        header = kv_pb2.RequestHeader(min_seq=seq + 1)
        request = kv_pb2.GetRequest(key=b"%016d" % number, header=header)
        async with asyncio.TaskGroup() as tasks:
            read = tasks.create_task(_get(servers.replica, request))
            await asyncio.sleep(0)  # it is on its way first
            began_s = time.perf_counter()
            seq = (await put(number)).header.seq
            took_ms.append((await read - began_s) * 1_000)
    return median(took_ms)


async def _get(stub: kv_pb2_grpc.KVStub, request: kv_pb2.GetRequest) -> float:
    await stub.Get(request, timeout=CALL_S)
    return time.perf_counter()


def _print_times(rounds: Rounds) -> None:
    print(f"\n{load()}; medians of {ROUNDS} rounds; quartiles of ratios in brackets")
    alone, together, in_store, seen = map(rounds.median, ("alone", "together", "in store", "seen"))
    print(f"put of a lone client {alone:.3f} ms, of {CLIENTS} clients {together:.3f} ms")
    print(
        f"lone client, store of {STORE_MS} ms: {1_000 / alone:6.0f} commits/s by the quorum, "
        f"{1_000 / in_store:.0f} in the store: {rounds.ratio('in store', 'alone')} times, "
        "at least 5"
    )
    print(
        f"seen on a replica {seen:.2f} ms after the put began, acknowledged after {alone:.2f} ms: "
        f"{rounds.ratio('seen', 'alone')} times, at most 3"
    )


async def _print_price(servers: Servers) -> None:
    """Print the archive's requests under load, and what they would be without grouping."""
    before = _archived(servers.proxy.seen)
    count, began_s = 0, time.perf_counter()
    while time.perf_counter() < began_s + BUSY_S:
        await _put_all(_put_there(servers.served))
        count += CLIENTS * PUTS_PER_CLIENT
    lapsed_s = time.perf_counter() - began_s
    rates = {
        "commits of clients": count / lapsed_s,
        "PUTs of the archive": (_archived(servers.proxy.seen) - before) / lapsed_s,
    }
    print(f"{CLIENTS} clients; each as a PUT, {PRICES.title}:")
    for name, per_s in rates.items():
        usd = per_s * DAY_S * PRICES.usd_per_1000["write"] / 1_000
        print(f"  {name:26}{per_s:10.1f} /s {usd:12.2f} USD a day")


def _archived(seen: Iterable[str]) -> int:
    return sum(request.startswith(f"PUT /{BUCKET}/db/wal/") for request in seen)
