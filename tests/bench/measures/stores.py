"""Durable puts in a store of objects that answers 25 ms late, and a quorum of safekeepers."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

from tests.bench import requests
from tests.bench.bare_s3 import BareS3, bare_s3
from tests.bench.peers import SITE
from tests.bench.plan import Found, Goal, Measure
from tests.bench.requests import KV
from tests.bench.stage import ALONE, ROOT, Load, Stage, Target, Way, status, timed_ms
from tests.kit.processes.cluster import Cluster
from tests.servers.object_stores import versitygw
from tests.servers.obtain import obtained
from tests.servers.proxy import Proxy, proxy_before

BUCKET = "bench"
STORE_MS = 25
OBJECT_BYTES = 4096
OUR_WAL = re.compile(r"PUT /bench/(lone|many|defaults|paced)/wal/")
SAFEKEEPERS = 3
RECORD_BYTES = 256
BARE = "bare PUT"
LONE, MANY, DEFAULTS = "lone put", "64, 4 in flight, 10 ms", "64, defaults"
PACED, SLATEDB = "64, an object each 100 ms", "64, SlateDB's binding (100 ms)"
TRIP, SYNC = "round trip", "sync of a record by a majority"
QUORUM_LONE, QUORUM_MANY = "lone put, quorum", "64, quorum"


@asynccontextmanager
async def late_store() -> AsyncIterator[tuple[Proxy, Mapping[str, str], BareS3]]:
    """An S3 server behind a proxy that passes each request on 25 ms late."""
    with versitygw() as server:
        server.create_bucket(BUCKET)
        async with proxy_before(server) as proxy, bare_s3(proxy.server, BUCKET) as bare:
            proxy.delay(STORE_MS / 1_000)
            names = {"SHALEKV_STORE__ENDPOINT_URL": proxy.server.endpoint}
            yield proxy, dict(server.environment) | names, bare


async def late(stage: Stage, found: Found) -> None:
    """Puts of a lone client, and of 64, in units of a bare PUT to the same store."""
    prepared = stage.requests(requests.puts(requests.keys(stage.sized(requests.KEYS, 400))))
    seconds = stage.sized(2.0, 0.3)
    async with late_store() as (proxy, env, bare):

        async def serve(name: str, *flags: str) -> Target:
            return await stage.serve(f"s3://{BUCKET}/{name}", *ALONE, *flags, env=env)

        started = await asyncio.gather(
            serve("lone", "--flush-interval-ms", "0"),
            serve("many", "--flush-interval-ms", "10", "--max-parallel-writes", "4"),
            serve("defaults"),
            serve("paced", "--flush-interval-ms", "100"),
        )
        names = (LONE, MANY, DEFAULTS, PACED)
        ours = dict(zip(names, zip(started, (1, 64, 64, 64), strict=True), strict=True))
        ways: dict[str, Way] = {
            name: partial(
                stage.put_under_load,
                target,
                Load(f"{KV}/Put", prepared, in_flight),
                seconds=seconds,
            )
            for name, (target, in_flight) in ours.items()
        }
        ways[BARE] = partial(_puts, bare, stage.sized(40, 4))
        ways[SLATEDB] = partial(_slatedb_puts, stage, env, seconds)
        before = [await status(target.address) for target, _ in ours.values()]
        sent_before = _wal_puts(proxy)
        await stage.in_turns(found, ways, stage.sized(5, 1))
        after = [await status(target.address) for target, _ in ours.values()]
        commits = sum(each.writer.wal_objects_written for each in after) - sum(
            each.writer.wal_objects_written for each in before
        )
        found.add("requests", (_wal_puts(proxy) - sent_before) / commits)
    for key, side in (("lone", LONE), ("many", MANY), ("defaults", DEFAULTS)):
        found.ratio(key, "p50 ms", side, BARE)
    found.ratio("peer", "p50 ms", PACED, SLATEDB)


async def _slatedb_puts(
    stage: Stage, env: Mapping[str, str], seconds: float
) -> Mapping[str, float]:
    names = {
        "CLOUD_PROVIDER": "aws",
        "AWS_BUCKET": BUCKET,
        "AWS_ENDPOINT": env["SHALEKV_STORE__ENDPOINT_URL"],
        "AWS_ALLOW_HTTP": "true",
        "PYTHONPATH": f"{ROOT}:{obtained('slatedb') / SITE}",
    }
    name = f"slatedb-{next(stage.numbers)}"
    told: dict[str, float] = await stage.program(
        "slatedb_puts", name, "64", str(seconds), env=dict(env) | names
    )
    return told


def _wal_puts(proxy: Proxy) -> int:
    return sum(bool(OUR_WAL.match(seen)) for seen in proxy.seen)


async def _puts(bare: BareS3, count: int) -> Mapping[str, float]:
    took_ms = []
    for _ in range(count):
        began_s = time.perf_counter()
        await bare.create(f"bare/{os.urandom(8).hex()}", bytes(OBJECT_BYTES))
        took_ms.append((time.perf_counter() - began_s) * 1_000)
    return {"p50 ms": statistics.median(took_ms)}


async def quorum(stage: Stage, found: Found) -> None:
    """Puts committed by three safekeepers, in units of a round trip and a sync."""
    prepared = stage.requests(requests.puts(requests.keys(stage.sized(requests.KEYS, 400))))
    folder = stage.new_folder("quorum")
    cluster = Cluster(stage.processes, folder, count=SAFEKEEPERS)
    await cluster.start()
    ours = stage.target(await cluster.serve(*ALONE))
    with echo() as peer:
        ways: dict[str, Way] = {
            QUORUM_LONE: partial(
                stage.put_under_load, ours, Load(f"{KV}/Put", prepared, in_flight=1)
            ),
            QUORUM_MANY: partial(
                stage.put_under_load, ours, Load(f"{KV}/Put", prepared, in_flight=64)
            ),
            TRIP: partial(_trips, peer, stage.sized(500, 10)),
            SYNC: partial(_syncs, stage.new_folder("synced"), stage.sized(300, 10)),
        }
        await stage.in_turns(found, ways, stage.sized(5, 1))
    units = [
        sum(pair)
        for pair in zip(found.sides[TRIP]["p50 ms"], found.sides[SYNC]["p50 ms"], strict=True)
    ]
    for key, side in (("lone", QUORUM_LONE), ("many", QUORUM_MANY)):
        taken = found.sides[side]["p50 ms"]
        found.add(key, *(own / unit for own, unit in zip(taken, units, strict=True)))


@contextmanager
def echo() -> Iterator[socket.socket]:
    """A connection to a thread that sends back what it receives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            near, _ = listener.accept()
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with near:
                while data := near.recv(RECORD_BYTES):
                    near.sendall(data)

        thread = threading.Thread(target=answer)
        thread.start()
        with socket.create_connection(listener.getsockname()) as far:
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield far
        thread.join()


async def _trips(peer: socket.socket, count: int) -> Mapping[str, float]:
    def trip() -> None:
        peer.sendall(bytes(RECORD_BYTES))
        left = RECORD_BYTES
        while left:
            left -= len(peer.recv(left))

    return {"p50 ms": statistics.median(timed_ms(trip, count))}


async def _syncs(folder: Path, count: int) -> Mapping[str, float]:
    """Return the median until a majority of files on this disk has a record, synced at once."""

    def append(name: int) -> None:
        with (folder / str(name)).open("ab", buffering=0) as file:
            file.write(bytes(RECORD_BYTES))
            os.fdatasync(file.fileno())

    took_ms = []
    with ThreadPoolExecutor(SAFEKEEPERS) as pool:
        for _ in range(count):
            began_s = time.perf_counter()
            syncs = as_completed(pool.submit(append, name) for name in range(SAFEKEEPERS))
            for _ in range(SAFEKEEPERS // 2 + 1):
                next(syncs).result()
            took_ms.append((time.perf_counter() - began_s) * 1_000)
            for rest in syncs:
                rest.result()
    return {"p50 ms": statistics.median(took_ms)}


LATE = Measure(
    "late-store",
    f"durable put in a store that answers after {STORE_MS} ms",
    (
        Goal("lone", "lone client, median, bare PUT = 1", at_most=1.2),
        Goal("many", "64 clients, 4 in flight and 10 ms apart, median, bare PUT = 1", at_most=1.6),
        Goal("defaults", "64 clients at defaults, median, bare PUT = 1", at_most=2.2),
        Goal(
            "peer", "64 clients, an object each 100 ms, median, SlateDB's binding = 1", at_most=1.05
        ),
        Goal("requests", "PUTs for a group commit", at_most=1.0),
    ),
    late,
    takes="A put that comes just after a flush waits for the next one.",
)
QUORUM = Measure(
    "quorum",
    "commit by a quorum of three safekeepers",
    (
        Goal("lone", "lone client, median, round trip + sync = 1", at_most=2, stretch=1.5),
        Goal("many", "64 clients, median, round trip + sync = 1", at_most=2.5, stretch=2.0),
    ),
    quorum,
    takes=(
        "It is processor time, and not waits: on a busy machine a lone put takes 1.4 ms of it at "
        "the writer, and 0.7 to 0.9 at each safekeeper, and five processes share two processors. "
        "An append and its answer take 0.23 ms where nothing else runs, both sides included. On "
        "the way of a put are 7 turns of the writer's loop, 8 of a safekeeper's, a thread and "
        "back, and one sync; beside it two further safekeepers, and three messages with the "
        "commit point if no record follows within 1 ms. One group is in flight at a time. It "
        "would take a safekeeper in compiled code."
    ),
)
MEASURES = (LATE, QUORUM)
