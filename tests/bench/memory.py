"""Full load on one server for some minutes: is its memory flat, and how long are its pauses?

Puts, batches, gets, scans, watches, failed conditions and refused calls, all at once, on a writer
with its compactor and collector. Its resident memory is read each second.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop

from shalekv.v1 import kv_pb2
from tests.bench import plots, requests
from tests.bench.report import FOLDER, MEMORY, PLOTS, git
from tests.bench.requests import KV
from tests.bench.stage import Load, Stage, Target, cpu_s, held, status
from tests.kit.processes.process_memory import resident_bytes
from tests.kit.processes.processes import Processes
from tests.servers.obtain import obtained

MIB = 1 << 20
KEYS = 200_000
WATCHES = 1_000
STREAMS = 20
SETTLED = 1 / 3  # of the time: caches and the memtable are filled until then
FLAT_PERCENT = 3.0  # growth from there to the end that is still called flat
FLAT_MIB = 16.0
SPARE_MIB = 64.0  # beyond the memory of an idle server and its budget for data
Point = tuple[float, float]


def main(minutes: float, *, writes: bool, is_tiny: bool = False) -> int:
    """Run the load, print and keep what was found; 1 if the memory is not flat, or calls failed."""
    obtained("load")
    with (
        tempfile.TemporaryDirectory(prefix="shalekv-memory-", ignore_cleanup_errors=True) as folder,
        Processes() as processes,
    ):
        stage = Stage(Path(folder), processes, is_tiny=is_tiny)
        found = uvloop.run(measure(stage, minutes))
    keep(found, writes=writes)
    print(shown(found))
    return 0 if found["is_flat"] and not found["unexpected"] else 1


async def measure(stage: Stage, minutes: float) -> dict[str, Any]:
    """Return what was found, with the curves of memory in MiB over minutes."""
    lines = stage.folder / "probe"
    server = await stage.serve_probed(lines, f"file://{stage.new_folder('database')}/db")
    keys = requests.keys(stage.sized(KEYS, 1_000))
    watched = [
        kv_pb2.WatchRequest(
            create=kv_pb2.WatchCreate(watch_id=number, range=kv_pb2.KeyRange(prefix=key))
        ).SerializeToString()
        for number, key in enumerate(keys[: stage.sized(WATCHES, 20)])
    ]
    watching = Load(f"{KV}/Watch", stage.requests(watched), STREAMS, STREAMS)
    curves: dict[str, list[Point]] = {"writer": [], "its children": []}
    began_cpu_s = cpu_s(server.pids())
    idle_mib = resident_bytes(next(iter(server.pids()))) / MIB
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(held(watching, server.address))
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            running = {
                name: tasks.create_task(_run(load, server.address, minutes * 60))
                for name, load in _loads(stage, keys).items()
            }
            while not all(task.done() for task in running.values()):
                await asyncio.sleep(1)
                _add_memory(curves, server, (time.monotonic() - began_s) / 60)
    loads = {name: task.result() for name, task in running.items()}
    told = await status(server.address)
    began_at_s = time.time() - (time.monotonic() - began_s)
    whole, _, _ = lines.read_text().rpartition("\n")  # the server may be writing the next line
    probed = [json.loads(line) for line in whole.splitlines()]
    probed = [line for line in probed if line["at_s"] > began_at_s + 1]
    budget_mib = told.memory.bytes_max / MIB
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "minutes": minutes,
        "loads": loads,
        "unexpected": _unexpected(loads),
        "idle_mib": round(idle_mib, 1),
        "budget_mib": round(budget_mib, 1),
        "is_within": max(y for _, y in curves["writer"]) <= idle_mib + budget_mib + SPARE_MIB,
        "cpu_s": round(cpu_s(server.pids()) - began_cpu_s, 1),
        "pauses": pauses(probed),
        "warnings": _warnings(server),
        **flatness(curves["writer"]),
        "curves": {name: [(round(x, 3), round(y, 1)) for x, y in curve]
                   for name, curve in curves.items()},
    }  # fmt: skip


def _loads(stage: Stage, keys: Sequence[bytes]) -> dict[str, Load]:
    some = list(keys[:2_000])
    conditions = [
        kv_pb2.PutRequest(key=key, value=b"", precondition=kv_pb2.Precondition(seq_equals=1 << 50))
        for key in some
    ]
    refused = [kv_pb2.PutRequest(key=b"", value=b"without a key").SerializeToString()]
    failing = [request.SerializeToString() for request in conditions]
    return {
        "puts": Load(f"{KV}/Put", stage.requests(requests.puts(keys)), 64, 4),
        "batches": Load(f"{KV}/Write", stage.requests(requests.writes(list(keys))), 2),
        "gets": Load(f"{KV}/Get", stage.requests(requests.gets(keys)), 32, 4),
        "scans": Load(f"{KV}/Scan", stage.requests(requests.scans(some, 1_000)), 4, 2),
        "failed conditions": Load(f"{KV}/Put", stage.requests(failing), 8),
        "refused": Load(f"{KV}/Put", stage.requests(refused), 4),
    }


async def _run(load: Load, address: str, seconds: float) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *load.argv(address), "-seconds", str(seconds), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    told: dict[str, Any] = json.loads(output)
    return told


def _warnings(server: Target) -> dict[str, int]:
    """Return the warnings and errors in the log of the server, and how often each came."""
    assert server.child is not None
    return Counter(
        str(line.get("event", line))
        for line in server.child.lines()
        if line.get("level") not in ("debug", "info")
    )


def _unexpected(loads: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the calls that ended in another way than they should, by load."""
    expected = {"failed conditions": {"9", "10"}, "refused": {"3"}}
    found: dict[str, Any] = {}
    for name, told in loads.items():
        others = {
            code: count
            for code, count in told["errors"].items()
            if code not in expected.get(name, set())
        }
        if told["lost"]:
            others["lost"] = told["lost"]
        if others:
            found[name] = others | {"example": told["example"]}
    return found


def _add_memory(curves: dict[str, list[Point]], server: Target, minute: float) -> None:
    writer, *children = server.pids()
    curves["writer"].append((minute, resident_bytes(writer) / MIB))
    taken = 0
    for child in children:
        try:
            taken += resident_bytes(child)
        except (FileNotFoundError, ProcessLookupError, StopIteration):  # it has just ended
            continue
    curves["its children"].append((minute, taken / MIB))


def flatness(curve: Sequence[Point]) -> dict[str, Any]:
    """Judge a curve of MiB over minutes, by a straight line through all but its first third."""
    last = curve[-1][0]
    settled = [point for point in curve if point[0] >= last * SETTLED] or list(curve)
    times, sizes = [x for x, _ in settled], [y for _, y in settled]
    slope = statistics.linear_regression(times, sizes).slope if len(settled) > 1 else 0.0
    growth = slope * (times[-1] - times[0])
    typical = statistics.median(sizes)
    return {
        "slope_mib_per_hour": round(slope * 60, 2),
        "growth_mib": round(growth, 2),
        "median_mib": round(typical, 1),
        "most_mib": round(max(y for _, y in curve), 1),
        "is_flat": growth <= max(FLAT_MIB, typical * FLAT_PERCENT / 100),
    }


def pauses(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the number and the lengths of collections, by generation, and of late turns."""
    found: dict[str, Any] = {}
    for generation in (0, 1, 2):
        took = sorted(ms for line in lines for kind, ms in line["pauses_ms"] if kind == generation)
        if took:
            found[f"generation {generation}"] = {
                "count": len(took),
                "median_ms": round(took[len(took) // 2], 2),
                "p99_ms": round(took[len(took) * 99 // 100], 2),
                "longest_ms": round(took[-1], 2),
            }
    late = sorted(ms for line in lines for ms in line["late_ms"])
    if late:
        found["turns of the loop"] = {
            "count": len(late),
            "median_ms": late[len(late) // 2],
            "p99_ms": late[len(late) * 99 // 100],
            "longest_ms": late[-1],
        }
    return found


def keep(found: dict[str, Any], *, writes: bool) -> None:
    """Keep what was found, and its plot; `writes` updates those of the repository, too."""
    plot = plots.lines("Resident memory under full load", "MiB", found["curves"])
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "memory.json").write_text(json.dumps(found) + "\n")
    (FOLDER / "memory.svg").write_text(plot)
    if writes:
        PLOTS.mkdir(parents=True, exist_ok=True)
        short = {name: value for name, value in found.items() if name != "curves"}
        MEMORY.write_text(json.dumps(short, indent=1) + "\n")
        (PLOTS / "memory.svg").write_text(plot)


def shown(found: dict[str, Any]) -> str:
    """Return what was found, as text."""
    lines = [f"{found['minutes']:g} minutes, {found['cpu_s']:.0f} s of CPU"]
    for name, told in found["loads"].items():
        errors = f"  errors by status: {told['errors']}" if told["errors"] else ""
        lines.append(
            f"  {name:20}{told['calls_per_s']:10,.0f}/s  p50 {told['p50_ms']:7.2f} ms"
            f"  p99.9 {told['p999_ms']:8.2f} ms{errors}"
        )
    for name, told in found["pauses"].items():
        figures = "  ".join(f"{figure} {value:,}" for figure, value in told.items())
        lines.append(f"  {name:20}{figures}")
    verdict = "flat" if found["is_flat"] else "NOT FLAT"
    lines.append(
        f"memory of the writer: {verdict}; median {found['median_mib']} MiB, most "
        f"{found['most_mib']} MiB (idle {found['idle_mib']}, budget for data "
        f"{found['budget_mib']} MiB: {'within' if found['is_within'] else 'BEYOND'}); by the line "
        f"through the last two thirds {found['growth_mib']} MiB more at their end, "
        f"{found['slope_mib_per_hour']} MiB an hour"
    )
    if found["warnings"]:
        lines.append(f"warnings in the log: {dict(found['warnings'])}")
    if found["unexpected"]:
        lines.append(f"UNEXPECTED: {found['unexpected']}")
    return "\n".join(lines)
