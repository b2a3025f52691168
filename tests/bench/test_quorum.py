"""A commit by a quorum, beside a commit in the object store.

Safekeepers, servers and the replica are processes; the bucket of all of them is a real S3 server
that answers 25 ms late. The log is measured in a writer in this process, called without a
transport. Everything is measured in rounds, in turns. Nothing is asserted about time.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import pytest
import uvloop
from structlog.testing import capture_logs

from shalekv.core.prices import OBJECTS
from shalekv.core.quorum.grouping import Place
from shalekv.core.quorum.record import Record
from shalekv.engine.quorum.proposing.ledger import Ledger
from shalekv.format.wal_record import HEADER_BYTES
from shalekv.roles.database import Quorum, create_database
from shalekv.roles.service import Call
from shalekv.roles.writer import Writer
from shalekv.rpc.safekeeper_links import GrpcLinks
from shalekv.store.opening import open_store
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.bench.interleaved import load
from tests.bench.sizes import sized
from tests.kit.processes.in_process import real_runtime, serve_settings
from tests.kit.processes.processes import Processes
from tests.kit.processes.quorum_cluster import Cluster
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
CALL = Call(peer="bench")
CALL_S = 20.0
DAY_S = 24 * 60 * 60
PRICES = OBJECTS["s3"]

Put = Callable[[int], Awaitable[kv_pb2.PutReply]]


@dataclass(slots=True)
class Commits:
    """What the log of this process has committed."""

    took_ms: list[float] = field(default_factory=list)  # each record
    sizes: list[int] = field(default_factory=list)  # of frames
    _began_s: dict[int, float] = field(default_factory=dict)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Time each record, from when the links are given it to when whoever waits is told."""
        append, wait_committed = Ledger.append, Ledger.wait_committed

        def timed_append(ledger: Ledger, place: Place, payload: bytes) -> Record:
            began_s = time.perf_counter()
            record = append(ledger, place, payload)
            self._began_s[record.lsn] = began_s
            self.sizes.append(len(payload) + HEADER_BYTES)
            return record

        async def timed_wait(ledger: Ledger, lsn: int) -> None:
            await wait_committed(ledger, lsn)
            self.took_ms.append((time.perf_counter() - self._began_s.pop(lsn)) * 1_000)

        monkeypatch.setattr(Ledger, "append", timed_append)
        monkeypatch.setattr(Ledger, "wait_committed", timed_wait)

    def forget(self) -> None:
        self.took_ms.clear()
        self.sizes.clear()


@dataclass(frozen=True, slots=True)
class Ground:
    """Everything that is measured."""

    commits: Commits
    log: Put  # in this process
    served: kv_pb2_grpc.KVStub
    replica: kv_pb2_grpc.KVStub
    in_store: kv_pb2_grpc.KVStub
    proxy: Proxy


class Rounds:
    """What each round has found, by name."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = defaultdict(list)

    def median(self, name: str) -> float:
        return median(self.found[name])

    def ratio(self, name: str, *beside: str) -> str:
        """How many times the sum of others, round by round: the median and the quartiles."""
        sums = map(sum, zip(*(self.found[other] for other in beside), strict=True))
        pairs = zip(self.found[name], sums, strict=True)
        lower, middle, upper = quantiles([own / other for own, other in pairs], method="inclusive")
        return f"{middle:5.2f} ({lower:.2f} to {upper:.2f})"


def test_commits_by_a_quorum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints commit latency, lone commits, visibility and requests, each beside its measure."""
    commits = Commits()
    commits.watch(monkeypatch)

    async def campaign() -> None:
        async with _ground(tmp_path, commits, monkeypatch) as ground:
            sizes = await _warm(ground)
            rounds = Rounds()
            for number in range(ROUNDS):
                await _round(ground, sizes, rounds, is_turned=number % 2 > 0)
            _print_latency(rounds, sizes)
            _print_others(rounds)
            await _print_price(ground)

    with capture_logs():
        uvloop.run(campaign())


@asynccontextmanager
async def _ground(
    folder: Path, commits: Commits, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Ground]:
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
        links = GrpcLinks()
        stack.push_async_callback(links.close)
        writer = await stack.enter_async_context(
            _writing(f"{bucket}/log", cluster.addresses, links, proxy.server.endpoint)
        )
        writes, reads, stored = [
            await stack.enter_async_context(kv_stub(process.listen))
            for process in (served, replica, in_store)
        ]
        yield Ground(commits, _put_here(writer), writes, reads, stored, proxy)


@asynccontextmanager
async def _writing(
    url: str, addresses: Sequence[str], links: GrpcLinks, endpoint: str
) -> AsyncIterator[Writer]:
    """A writer of a new database, in this process."""
    settings = serve_settings(database={"url": url}, store={"endpoint_url": endpoint})
    with real_runtime(threads=2) as runtime:
        store = open_store(url, runtime, settings.store)
        await create_database(store, runtime, settings.store, Quorum(links, addresses))
        writer = await Writer.open(store, settings=settings, runtime=runtime, links=links)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writer.run())
            yield writer
            writer.close()
        await writer.leave()
        await store.close()


def _put_here(writer: Writer) -> Put:
    async def put(number: int) -> kv_pb2.PutReply:
        answer = writer.kv.put(_request(number), CALL)
        return answer if isinstance(answer, kv_pb2.PutReply) else await answer

    return put


def _put_there(stub: kv_pb2_grpc.KVStub) -> Put:
    async def put(number: int) -> kv_pb2.PutReply:
        return await stub.Put(_request(number), timeout=CALL_S)

    return put


def _request(number: int) -> kv_pb2.PutRequest:
    return kv_pb2.PutRequest(key=b"%016d" % number, value=VALUE)


async def _warm(ground: Ground) -> dict[int, int]:
    """Bring everything into the state in which it stays: the bytes of a record, by clients."""
    for stub in (ground.served, ground.in_store):
        await _lone_ms(_put_there(stub), LONE_PUTS_IN_STORE)
    await _put_all(_put_there(ground.served))
    sizes = {}
    for clients in (1, CLIENTS):
        ground.commits.forget()
        await (_lone_ms(ground.log, LONE_PUTS) if clients == 1 else _put_all(ground.log))
        sizes[clients] = round(median(ground.commits.sizes))
    return sizes


async def _round(ground: Ground, sizes: dict[int, int], rounds: Rounds, *, is_turned: bool) -> None:
    """Measure each way once, in an order that turns round each time."""

    async def commit_ms(clients: int) -> float:
        ground.commits.forget()
        await (_lone_ms(ground.log, LONE_PUTS) if clients == 1 else _put_all(ground.log))
        return median(ground.commits.took_ms)

    async def put_ms(clients: int) -> float:
        put = _put_there(ground.served)
        return await (_lone_ms(put, LONE_PUTS) if clients == 1 else _put_all(put))

    ways: dict[str, Awaitable[float]] = {}
    for clients in sizes:
        ways |= {
            f"commit {clients}": commit_ms(clients),
            f"put {clients}": put_ms(clients),
        }
    ways["in store"] = _lone_ms(_put_there(ground.in_store), LONE_PUTS_IN_STORE)
    ways["seen"] = _visible_ms(ground)
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
    """The median of puts by many clients, each of which waits for its reply before the next."""
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


async def _visible_ms(ground: Ground) -> float:
    """From a put to its being seen on the replica, by a read that waits for it there."""
    put = _put_there(ground.served)
    seq = (await put(0)).header.seq
    took_ms = []
    for number in range(VISIBLE):
        header = kv_pb2.RequestHeader(min_seq=seq + 1)
        request = kv_pb2.GetRequest(key=b"%016d" % number, header=header)
        async with asyncio.TaskGroup() as tasks:
            read = tasks.create_task(_get(ground.replica, request))
            await asyncio.sleep(0)  # it is on its way first
            began_s = time.perf_counter()
            seq = (await put(number)).header.seq
            took_ms.append((await read - began_s) * 1_000)
    return median(took_ms)


async def _get(stub: kv_pb2_grpc.KVStub, request: kv_pb2.GetRequest) -> float:
    await stub.Get(request, timeout=CALL_S)
    return time.perf_counter()


def _print_latency(rounds: Rounds, sizes: dict[int, int]) -> None:
    print(f"\n{load()}; medians of {ROUNDS} rounds; quartiles of ratios in brackets")
    print(f"{'clients':42}" + "".join(f"{clients:24}" for clients in sizes))
    print(f"{'bytes of a record':42}" + "".join(f"{size:24}" for size in sizes.values()))
    rows = {
        "commit at the log": "commit",
        "put as a client sees it": "put",
    }
    for title, name in rows.items():
        values = (f"{rounds.median(f'{name} {clients}'):21.3f} ms" for clients in sizes)
        print(f"{title:42}" + "".join(values))


def _print_others(rounds: Rounds) -> None:
    quorum, in_store, seen = (
        rounds.median("put 1"),
        rounds.median("in store"),
        rounds.median("seen"),
    )
    print(
        f"lone client, store of {STORE_MS} ms: {1_000 / quorum:6.0f} commits/s by the quorum, "
        f"{1_000 / in_store:.0f} in the store: {rounds.ratio('in store', 'put 1')} times, "
        "at least 5"
    )
    print(
        f"seen on a replica {seen:.2f} ms after the put began, acknowledged after {quorum:.2f} ms: "
        f"{rounds.ratio('seen', 'put 1')} times, at most 3"
    )


async def _print_price(ground: Ground) -> None:
    """What is written to the archive under load, and what it would be without grouping."""
    ground.commits.forget()
    before = _archived(ground.proxy.seen)
    count, ends_s = 0, time.perf_counter() + BUSY_S
    began_s = time.perf_counter()
    while time.perf_counter() < ends_s:
        await _put_all(ground.log)
        count += CLIENTS * PUTS_PER_CLIENT
    lapsed_s = time.perf_counter() - began_s
    rates = {
        "commits of clients": count / lapsed_s,
        "records (group commits)": len(ground.commits.took_ms) / lapsed_s,
        "PUTs of the archive": (_archived(ground.proxy.seen) - before) / lapsed_s,
    }
    print(f"{CLIENTS} clients at the log; each as a PUT, {PRICES.title}:")
    for name, per_s in rates.items():
        usd = per_s * DAY_S * PRICES.usd_per_1000["write"] / 1_000
        print(f"  {name:26}{per_s:10.1f} /s {usd:12.2f} USD a day")


def _archived(seen: Iterable[str]) -> int:
    return sum(request.startswith(f"PUT /{BUCKET}/log/wal/") for request in seen)
