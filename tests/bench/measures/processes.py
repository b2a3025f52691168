"""Processes under load: turns of the loop, idle connections, watches, readers, and clients."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from shalekv.clock import LoopClock
from shalekv.v1 import admin_pb2, kv_pb2
from tests.bench import requests
from tests.bench.measures.python_client import python_client
from tests.bench.peers import etcd
from tests.bench.plan import Found, Goal, Measure
from tests.bench.requests import KV
from tests.bench.stage import ALONE, Load, Stage, Target, Way, held, status
from tests.kit.certificates import LOCAL, Authority
from tests.kit.processes.guarded import TokenBook
from tests.kit.processes.process_memory import resident_bytes

WAIT_S = 60.0
CONNECTIONS = 1_000
WARM_CONNECTIONS = 200
LARGEST_BATCH = 10_000
SCANNED_ROWS = 1_000
CLIENT_PUTS = {"session": 20_000, "coalesced": 8_000, "unary": 3_000}
WATCHES, STREAMS = 10_000, 20
SECURED_PUTS = 4_000
PLAIN, SECURED = "plain", "TLS and a token"
ONE, TWO = "one reader process", "two reader processes"


async def loop_turns(stage: Stage, found: Found) -> None:
    """Each load alone, then all at once, with compactor and collector beside the writer."""
    keys = requests.keys(stage.sized(20_000, 200))
    lines = stage.folder / "probe"
    server = await stage.serve_probed(lines, f"file://{stage.new_folder('database')}/db")
    many = stage.sized(LARGEST_BATCH, 100)
    loads = {
        "puts": Load(f"{KV}/Put", stage.requests(requests.puts(keys))),
        "batches": Load(f"{KV}/Write", stage.requests(requests.writes(keys, 100))),
        "largest batches": Load(f"{KV}/Write", stage.requests(requests.writes(keys, many)), 2),
        "gets": Load(f"{KV}/Get", stage.requests(requests.gets(keys))),
        "largest gets": Load(f"{KV}/BatchGet", stage.requests(requests.batch_gets(keys, many)), 2),
        "scans": Load(
            f"{KV}/Scan", stage.requests(requests.scans([b""], 0)), 4, may_be_aborted=True
        ),
    }
    longest, all_late = 0.0, list[float]()
    for name, load in loads.items():
        read = await _lines(lines)
        await stage.put_under_load(server, load, seconds=2.5)
        late = _late((await _lines(lines))[len(read) :])
        found.side(name, _quantiles(late))
        longest, all_late = max(longest, late[-1]), all_late + late
    read = await _lines(lines)
    figures = await asyncio.gather(
        *(stage.put_under_load(server, load, seconds=5.0) for load in loads.values())
    )
    if aborted := sum(each.get("aborted", 0) for each in figures):
        found.notes.append(f"{aborted} scans of all at once were ended for the memory of writes")
    late = _late((await _lines(lines))[len(read) :])
    found.side("all at once", _quantiles(late))
    found.add("longest", max(longest, late[-1]))
    found.add("p999", _quantiles(sorted(all_late + late))["p99.9 ms"])


async def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a probe, once one of them tells of this moment."""
    asked_s = time.time()
    async with asyncio.timeout(WAIT_S):
        while True:
            whole, _, _ = (await asyncio.to_thread(path.read_text)).rpartition("\n")
            found = [json.loads(line) for line in whole.splitlines()]
            if found and found[-1]["at_s"] >= asked_s:
                return found
            await LoopClock().sleep_ms(50)


def _late(lines: list[dict[str, Any]]) -> list[float]:
    return sorted(late for line in lines for late in line["late_ms"]) or [0.0]


def _quantiles(late: list[float]) -> dict[str, float]:
    return {
        "longest ms": late[-1],
        "p99.9 ms": late[int(len(late) * 0.999)],
        "p99 ms": late[int(len(late) * 0.99)],
        "median ms": late[len(late) // 2],
    }


async def commits(stage: Stage, found: Found) -> None:
    """Requests and syncs of the process that writes, for each group commit, lone and of 64."""
    lines = stage.folder / "probe"
    server = await stage.serve_probed(lines, f"file://{stage.new_folder('database')}/db", *ALONE)
    prepared = stage.requests(requests.puts(requests.keys(100)))
    for in_flight in (1, 64):
        read, began = await _lines(lines), await status(server.address)
        load = Load(f"{KV}/Put", prepared, in_flight)
        await stage.put_under_load(server, load, count=stage.sized(1_000, 200))
        ended = await status(server.address)
        syncs = sum(line["syncs"] for line in (await _lines(lines))[len(read) :])
        objects = ended.writer.wal_objects_written - began.writer.wal_objects_written
        creates = _wal_creates(ended) - _wal_creates(began)
        found.add("requests", creates / objects)
        found.add("syncs", syncs / objects)
        found.side(f"{in_flight} in flight", {"puts in a commit": _grouped(began, ended)})


def _wal_creates(told: admin_pb2.StatusReply) -> int:
    return sum(each.requests for each in told.store_requests if each.folder == "wal")


def _grouped(began: admin_pb2.StatusReply, ended: admin_pb2.StatusReply) -> float:
    """Return how many commits of clients are in a group commit."""
    objects = ended.writer.wal_objects_written - began.writer.wal_objects_written
    return (ended.writer.commits - began.writer.commits) / objects


async def idle(stage: Stage, found: Found) -> None:
    """Memory of 1,000 connections without a call, after others have come and gone."""
    count = stage.sized(CONNECTIONS, 50)
    nothing = stage.requests([])
    with etcd(stage.new_folder("etcd")) as peer:
        for number in range(stage.sized(3, 1)):
            ours = await stage.serve(f"file://{stage.new_folder('database')}/db", *ALONE)
            for side, target in (("ShaleKV", ours), ("etcd", peer)):
                pids = list(target.pids())
                warm = Load(f"{KV}/Get", nothing, connections=stage.sized(WARM_CONNECTIONS, 5))
                async with held(warm, target.address):
                    pass
                before = sum(map(resident_bytes, pids))
                load = Load(f"{KV}/Get", nothing, connections=count)
                async with held(load, target.address):
                    each = (sum(map(resident_bytes, pids)) - before) / count / 1024
                if side == "etcd" and number:
                    continue  # its memory was taken by the connections of the first time
                found.side(side, {"KiB a connection": each})
            found.add("memory", found.sides["ShaleKV"]["KiB a connection"][-1])
            await ours.stop()


async def readers(stage: Stage, found: Found) -> None:
    """Scans of 1,000 rows on 32 connections, which the kernel spreads over the processes."""
    url = f"file://{stage.new_folder('database')}/db"
    keys = requests.keys(stage.sized(50_000, 1_000))
    writer = await stage.serve(url, *ALONE)
    filling = requests.writes(keys, 1_000)
    load = Load(f"{KV}/Write", stage.requests(filling), in_flight=4)
    await stage.put_under_load(writer, load, count=len(filling))
    seq = (await status(writer.address)).header.seq
    sides = {ONE: await stage.read(url), TWO: await stage.read(url, "--processes", "2")}
    for reader in sides.values():
        await _until(reader, lambda told: told.header.seq >= seq)
    starts = requests.keys(stage.sized(50_000, 1_000))[:200]
    scans = stage.requests(requests.scans(starts, SCANNED_ROWS))
    ways: dict[str, Way] = {
        name: partial(
            stage.put_under_load, target, Load(f"{KV}/Scan", scans, in_flight=32, connections=32)
        )
        for name, target in sides.items()
    }
    await stage.in_turns(found, ways, stage.sized(5, 1))
    found.ratio("scans", "calls/s", TWO, ONE)
    for side in (ONE, TWO):
        figures = found.sides[side]
        pairs = zip(figures["calls/s"], figures["server CPU us"], strict=True)
        figures["processors"] = [calls * cpu_us / 1e6 for calls, cpu_us in pairs]
    found.ratio("cpu", "server CPU us", TWO, ONE)
    found.ratio("processors", "processors", TWO, ONE)


async def _until(server: Target, is_so: Callable[[admin_pb2.StatusReply], bool]) -> None:
    """Ask a server for its status until it is as wanted."""
    async with asyncio.timeout(WAIT_S):
        while not is_so(await status(server.address)):
            await LoopClock().sleep_ms(50)


async def client(stage: Stage, found: Found) -> None:
    """Durable puts on a server of the same commit; with `--base` beside the commit before."""
    ours = await stage.serve(f"file://{stage.new_folder('database')}/db", *ALONE)
    ways: dict[str, Way] = {}
    counts = {way: stage.sized(puts, 300) for way, puts in CLIENT_PUTS.items()}
    for way, puts in counts.items():
        ways[way] = partial(python_client, sys.executable, ours, way, puts)
    if stage.base is not None:
        before = await stage.serve_base(f"file://{stage.new_folder('before')}/db", *ALONE)
        python = str(stage.base / ".venv" / "bin" / "python")
        for way, puts in counts.items():
            ways[f"{way}, before"] = partial(python_client, python, before, way, puts)
    await stage.in_turns(found, ways, stage.sized(3, 1))
    for way in counts:
        if stage.base is not None:
            found.ratio(way, "calls/s", way, f"{way}, before")
        found.add(f"{way}_rate", *found.sides[way]["calls/s"])
    if stage.base is None:
        found.notes.append("Beside the commit before with `--base DIR`.")


async def secured(stage: Stage, found: Found) -> None:
    """Coalesced puts with TLS, a token and an enforced policy, beside the same without."""
    folder = stage.new_folder("secrets")
    authority, tokens = Authority(), TokenBook(folder, "bench")
    files, shown = authority.issue(*LOCAL).write(folder, "server"), folder / "token"
    ((_, bearer),) = tokens.shown("bench")
    await asyncio.to_thread(shown.write_text, bearer.removeprefix("Bearer "))
    flags = ["--tls-cert", files.certificate, "--tls-key", files.key]
    flags += ["--tokens-file", str(tokens.path), "--admins", "token:bench"]
    plain = await stage.serve(f"file://{stage.new_folder('plain')}/db", *ALONE)
    guarded = await stage.serve(f"file://{stage.new_folder('guarded')}/db", *ALONE, *flags)
    more, puts = (authority.write(folder), str(shown)), stage.sized(SECURED_PUTS, 300)
    ways: dict[str, Way] = {
        PLAIN: partial(python_client, sys.executable, plain, "coalesced", puts),
        SECURED: partial(python_client, sys.executable, guarded, "coalesced", puts, *more),
    }
    await stage.in_turns(found, ways, stage.sized(20, 1))
    for side in ways:
        figures = found.sides[side]
        both = zip(figures["client CPU us"], figures["server CPU us"], strict=True)
        figures["CPU us"] = [client_us + server_us for client_us, server_us in both]
    found.ratio("cpu", "CPU us", SECURED, PLAIN)
    found.ratio("server", "server CPU us", SECURED, PLAIN)
    found.ratio("client", "client CPU us", SECURED, PLAIN)
    found.ratio("calls", "calls/s", SECURED, PLAIN)


async def watches(stage: Stage, found: Found) -> None:
    """Durable puts while nobody watches, and while 10,000 watches do: none matches, or one does."""
    keys = requests.keys(stage.sized(requests.KEYS, 100))
    count = stage.sized(WATCHES, 100)
    load = Load(f"{KV}/Put", stage.requests(requests.puts(keys)))
    server = await stage.serve(f"file://{stage.new_folder('database')}/db", *ALONE)
    others = stage.requests(_watched(b"x%014d" % number for number in range(count)))
    theirs = stage.requests(_watched(sorted(keys)[:count]))
    rows = {"no watch": None, "watches that do not match": others, "one match a put": theirs}
    for _ in range(stage.sized(3, 1)):
        for name, prepared in rows.items():
            if prepared is None:
                found.side(name, await stage.put_under_load(server, load))
                continue
            watching = Load(f"{KV}/Watch", prepared, in_flight=STREAMS, connections=STREAMS)
            async with held(watching, server.address):
                await _until(server, lambda told: told.watches.watches >= count)
                found.side(name, await stage.put_under_load(server, load))
    found.ratio("none", "server CPU us", "watches that do not match", "no watch")
    found.ratio("one", "server CPU us", "one match a put", "no watch")


def _watched(keys: Iterable[bytes]) -> list[bytes]:
    """Return requests to watch these keys."""
    return [
        kv_pb2.WatchRequest(
            create=kv_pb2.WatchCreate(watch_id=number, range=kv_pb2.KeyRange(prefix=key))
        ).SerializeToString()
        for number, key in enumerate(keys)
    ]


MEASURES = (
    Measure(
        "commit",
        "what a group commit on a folder costs",
        (
            Goal("requests", "store requests", at_most=1),
            Goal("syncs", "syncs, of its file and of the folder", at_most=2),
        ),
        commits,
    ),
    Measure(
        "loop",
        "turns of the writer's event loop, under every load",
        (
            Goal("longest", "longest turn", at_most=20, unit=" ms"),
            Goal("p999", "p99.9 of the turns that others wait for", at_most=5, unit=" ms"),
        ),
        loop_turns,
        takes=(
            "A turn is as long as all that is ready in it: a group of 10,000 changes is sorted "
            "(5 ms) and lands (5 ms), each of four scans decodes a window of 1,000 rows (1 to 4 "
            "ms), a view that a scan has kept is freed (1 us an entry where other processes use "
            "the caches). Collections of garbage take 2 ms. It would take a share of each turn for "
            "each kind of call, and memory that is freed without a visit to each entry."
        ),
    ),
    Measure(
        "idle",
        "1,000 idle connections",
        (Goal("memory", "memory of each", at_most=30, stretch=10, unit=" KiB"),),
        idle,
        takes="A connection has a state of HPACK, buffers and windows.",
    ),
    Measure(
        "readers",
        "two reader processes on one port, scans of 1,000 rows",
        (
            Goal("scans", "scans/s, one process = 1", at_least=1.5, stretch=1.8),
            Goal("processors", "processors that it was given, one process = 1"),
            Goal("cpu", "processor time of a scan, one process = 1"),
        ),
        readers,
        takes=(
            "Two processes answer as many scans more as they are given more of the two processors, "
            "which the load client and all other work of the machine share, divided by what a scan "
            "costs more when both are busy. It would take a machine of three processors and no "
            "other work."
        ),
    ),
    Measure(
        "client",
        "durable puts of the Python client, on a server of the same commit",
        (
            Goal("session", "Session, puts/s, the commit before = 1", at_least=2, stretch=3),
            Goal("coalesced", "256 tasks, puts/s, the commit before = 1", at_least=2, stretch=3),
            Goal("unary", "256 tasks without coalescing, puts/s, the commit before = 1"),
            Goal("session_rate", "Session, puts/s"),
            Goal("coalesced_rate", "256 tasks, puts/s"),
            Goal("unary_rate", "256 tasks without coalescing, puts/s"),
        ),
        client,
        takes=(
            "The server takes three quarters of the processor time. Of a put in a session, 31 % "
            "are checks, admission and the commit, 22 % the group and its acknowledgement, 13 % "
            "the operation in its message, 11 % the object, 10 % the result, 7 % the memtable, "
            "3 % the reply. A put of a task has an idempotency key, so that the client may repeat "
            "it, and a deadline: with them it costs the server twice as much, and 30 % of that is "
            "the key and its record. It would take a message with the puts of a session in "
            "columns, as a batch has them, or a commit in compiled code."
        ),
    ),
    Measure(
        "secured",
        "coalesced durable puts of the Python client with TLS and a token, beside plain ones",
        (
            Goal("cpu", "CPU of a put, both sides, plain = 1", at_most=1.15),
            Goal("server", "CPU of the server, plain = 1", at_most=1.15),
            Goal("client", "CPU of the client, plain = 1"),
            Goal("calls", "puts/s, plain = 1"),
        ),
        secured,
    ),
    Measure(
        "watches",
        "durable puts under 10,000 watches on 20 streams",
        (
            Goal("none", "CPU of a put when none matches, without watches = 1"),
            Goal("one", "CPU of a put that one of them matches, without watches = 1"),
        ),
        watches,
    ),
)
