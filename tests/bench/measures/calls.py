"""Calls beside those of etcd and Redis: gets, durable puts, batches, and the lone put."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from shalekv.settings import StoreSettings
from shalekv.store.opening import open_store
from tests.bench import requests
from tests.bench.peers import etcd, redis
from tests.bench.plan import Found, Goal, Measure
from tests.bench.requests import ETCD_KV, KV
from tests.bench.stage import ALONE, Load, Stage, Target, Way, status, timed_ms
from tests.kit.processes.in_process import real_runtime

OURS, ETCD, SERIALIZABLE, REDIS = "ShaleKV", "etcd", "etcd, serializable", "Redis"
CREATE, CREATE_HERE = "bare create of the store", "the same system calls, alone"
OBJECT_BYTES = 4096
CREATES_MAX = 300
CREATE_S = 1.0
ROUNDS = 5
WRITTEN_BYTES = "2147483648"  # the memtable, a third of it, holds what all turns write


@asynccontextmanager
async def both(stage: Stage, *flags: str) -> AsyncIterator[tuple[Target, Target]]:
    """A writer on a folder, with these flags, and an etcd, both with the same keys."""
    with ExitStack() as stack:
        peer = stack.enter_context(etcd(stage.new_folder("etcd")))
        ours = await stage.serve(f"file://{stage.new_folder('database')}/db", *ALONE, *flags)
        keys = requests.keys(stage.sized(requests.KEYS, 400))
        filling = {
            KV: (ours, "Write", requests.writes(keys)),
            ETCD_KV: (peer, "Txn", requests.etcd_txns(keys)),
        }
        for service, (target, method, messages) in filling.items():
            load = Load(f"{service}/{method}", stage.requests(messages), in_flight=4)
            await stage.put_under_load(target, load, count=len(messages))
        yield ours, peer


async def get(stage: Stage, found: Found) -> None:
    """Gets of random keys that are in the memtable, and in etcd's store."""
    async with both(stage) as (ours, peer):
        keys = requests.keys(stage.sized(requests.KEYS, 400))
        linearizable = stage.requests(requests.etcd_gets(keys, is_serializable=False))
        serializable = stage.requests(requests.etcd_gets(keys, is_serializable=True))
        own, many = stage.requests(requests.gets(keys)), stage.requests(requests.batch_gets(keys))
        ways: dict[str, Way] = {
            OURS: _loaded(stage, ours, f"{KV}/Get", own),
            ETCD: _loaded(stage, peer, f"{ETCD_KV}/Range", linearizable),
            SERIALIZABLE: _loaded(stage, peer, f"{ETCD_KV}/Range", serializable),
            f"{OURS}, 100 keys": _loaded(stage, ours, f"{KV}/BatchGet", many),
        }
        await stage.in_turns(found, ways, stage.sized(ROUNDS, 1))
    found.ratio("calls", "calls/s", OURS, ETCD)
    found.ratio("cpu", "server CPU us", OURS, ETCD)
    found.ratio("calls_serializable", "calls/s", OURS, SERIALIZABLE)
    found.ratio("cpu_serializable", "server CPU us", OURS, SERIALIZABLE)
    found.ratio("keys", "calls/s", f"{OURS}, 100 keys", SERIALIZABLE)
    found.samples["keys"] = [100 * each for each in found.samples["keys"]]


async def put(stage: Stage, found: Found, *, in_flight: int) -> None:
    """Durable puts of keys in no order."""
    async with both(stage) as (ours, peer):
        keys = requests.keys(stage.sized(requests.KEYS, 400))
        own, theirs = (
            stage.requests(requests.puts(keys)),
            stage.requests(requests.etcd_puts(keys)),
        )
        with redis(stage.new_folder("redis")) as other:
            ways: dict[str, Way] = {
                OURS: _loaded(stage, ours, f"{KV}/Put", own, in_flight),
                ETCD: _loaded(stage, peer, f"{ETCD_KV}/Put", theirs, in_flight),
                REDIS: partial(other.sets, in_flight, stage.sized(15_000, 500)),
            }
            began = await status(ours.address)
            await stage.in_turns(found, ways, stage.sized(ROUNDS, 1))
            ended = await status(ours.address)
    found.ratio("calls", "calls/s", OURS, ETCD)
    found.ratio("cpu", "server CPU us", OURS, ETCD)
    found.ratio("calls_redis", "calls/s", OURS, REDIS)
    commits = ended.writer.wal_objects_written - began.writer.wal_objects_written
    found.add("grouped", (ended.writer.commits - began.writer.commits) / commits)


async def write(stage: Stage, found: Found) -> None:
    """100 puts at once, 64 times in flight."""
    async with both(stage, "--memory-bytes", WRITTEN_BYTES) as (ours, peer):
        keys = requests.keys(stage.sized(requests.KEYS, 400))
        ways: dict[str, Way] = {
            OURS: _loaded(stage, ours, f"{KV}/Write", stage.requests(requests.writes(keys))),
            ETCD: _loaded(stage, peer, f"{ETCD_KV}/Txn", stage.requests(requests.etcd_txns(keys))),
        }
        await stage.in_turns(found, ways, stage.sized(ROUNDS, 1))
    found.ratio("calls", "calls/s", OURS, ETCD)
    found.ratio("cpu", "server CPU us", OURS, ETCD)


async def lone_put(stage: Stage, found: Found) -> None:
    """One durable put after the other, beside creates of the store it is in, and beside etcd."""
    keys = requests.keys(stage.sized(1_000, 50))
    async with both(stage) as (ours, peer):
        own, theirs = (
            stage.requests(requests.puts(keys)),
            stage.requests(requests.etcd_puts(keys)),
        )
        ways: dict[str, Way] = {
            OURS: _loaded(stage, ours, f"{KV}/Put", own, 1),
            ETCD: _loaded(stage, peer, f"{ETCD_KV}/Put", theirs, 1),
            CREATE: partial(creates, stage, stage.new_folder("bare")),
            CREATE_HERE: partial(_creates_here, stage, stage.new_folder("here")),
        }
        await stage.in_turns(found, ways, stage.sized(ROUNDS, 1))
    found.ratio("creates", "p50 ms", OURS, CREATE)
    found.ratio("cpu", "server CPU us", OURS, ETCD)
    found.ratio("latency", "p50 ms", OURS, ETCD)
    found.ratio("calls_here", "p50 ms", OURS, CREATE_HERE)


async def creates(stage: Stage, folder: Path) -> Mapping[str, float]:
    """Return the median of creates of small objects by the store of a folder, one at a time."""
    took_ms: list[float] = []
    with real_runtime() as runtime:
        store = open_store(f"file://{folder}", runtime, StoreSettings())
        ends_s = time.perf_counter() + stage.sized(CREATE_S, 0.1)
        for number in range(CREATES_MAX):
            began_s = time.perf_counter()
            if began_s > ends_s and took_ms:
                break
            await store.create(f"wal/{next(stage.numbers)}-{number}", bytes(OBJECT_BYTES))
            took_ms.append((time.perf_counter() - began_s) * 1_000)
        await store.close()
    return {"p50 ms": statistics.median(took_ms)}


async def _creates_here(stage: Stage, folder: Path) -> Mapping[str, float]:
    """Return the median of what a create has to do: write, sync, link, sync the folder."""
    kept = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    data = bytes(OBJECT_BYTES)

    def create() -> None:
        name = f"{folder}/{next(stage.numbers)}"
        file = os.open(f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(file, data)
        os.fdatasync(file)
        os.close(file)
        os.link(f"{name}.new", name)
        Path(f"{name}.new").unlink()
        os.fsync(kept)

    took_ms = timed_ms(create, CREATES_MAX, within_s=stage.sized(CREATE_S, 0.1))
    os.close(kept)
    return {"p50 ms": statistics.median(took_ms)}


def _loaded(stage: Stage, target: Target, method: str, prepared: Path, in_flight: int = 64) -> Way:
    return partial(stage.put_under_load, target, Load(method, prepared, in_flight))


GET = Measure(
    "get",
    "get, 64 in flight",
    (
        Goal("calls", "calls/s, etcd = 1", at_least=2, stretch=3),
        Goal("cpu", "server CPU a call, etcd = 1", at_most=0.5, stretch=0.3),
        Goal("calls_serializable", "calls/s, etcd serializable = 1", at_least=1),
        Goal("cpu_serializable", "server CPU a call, etcd serializable = 1"),
        Goal("keys", "keys/s in gets of 100, etcd serializable = 1", at_least=30),
    ),
    get,
    takes=(
        "A key of a get of 100 costs 0.6 us in the server, and a call of 11 KB 35 us of the wire: "
        "two thirds of a key are pieces of its result, written one by one by Python. Both "
        "processors are shared with the load client here. It would take a reply of stored bytes."
    ),
)
PUTS = tuple(
    Measure(
        f"put-{in_flight}",
        f"durable put, {in_flight} in flight",
        (
            Goal("calls", "calls/s, etcd = 1", at_least=1.2, stretch=1.5),
            Goal("cpu", "server CPU a call, etcd = 1", at_most=0.8, stretch=0.5),
            Goal("calls_redis", "calls/s, Redis with appendfsync always = 1"),
            Goal("grouped", "puts in a group commit"),
        ),
        partial(put, in_flight=in_flight),
        takes=(
            "A group commit creates a file, and syncs it and its folder: the journal of the file "
            "system takes part twice. etcd appends to a file that is there, and syncs its data "
            "only. On ext4 a create takes 0.70 ms, one with a spare file that has its space 0.29 "
            "ms, and an append with fdatasync 0.09 ms. It would take one log file in place of an "
            "object for each commit, as safekeepers have it."
        ),
    )
    for in_flight in (64, 256)
)
WRITE = Measure(
    "write-100",
    "Write of 100 puts beside Txn of 100, 64 in flight",
    (
        Goal("calls", "calls/s, etcd = 1", at_least=1.5, stretch=2.5),
        Goal("cpu", "server CPU a call, etcd = 1"),
    ),
    write,
    takes=(
        "A change costs 4 us in the engine. Of that, taking key and value out of protobuf's "
        "objects is 30 %, the columns of the WAL object 25 %, merges of runs 15 %, sorting a group "
        "10 %, landing in the memtable 8 %, pending writes 7 %, the entry itself 5 %. The "
        "transport and the file are another 2 us. Half of a processor is idle meanwhile: with one "
        "object in flight (`max_parallel_writes`), a group waits until the one before it is "
        "synced. It would take compiled code for request and memtable, and two objects in flight."
    ),
)
LONE = Measure(
    "put-lone",
    "lone durable put on a folder",
    (
        Goal("creates", "median, bare create of the same store = 1", at_most=1.3, stretch=1.1),
        Goal("cpu", "server CPU a call, etcd = 1", at_most=1.5, stretch=1.0),
        Goal("latency", "median, etcd = 1"),
        Goal("calls_here", "median, bare system calls of a create = 1"),
    ),
    lone_put,
    takes=(
        "A commit of one pays alone for all that a group shares. Of its CPU, 48 % is the kernel: "
        "creating the file 22 % (ext4 passes over inodes that were deleted lately), two syncs 12 "
        "%, link and unlink 3 %, waking threads and the loop 5 %, TCP 2 %. The rest is 480 calls "
        "of Python functions, at caches that are cold after each wait: encoding the object 12 %, "
        "its landing and the reply 14 %, the request 12 %. It would take a commit in compiled "
        "code, and fewer names of files than the promise of a folder needs."
    ),
)
