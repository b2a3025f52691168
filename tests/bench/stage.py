"""Stage of a benchmark: servers and peers, the load on them, and the processor time of each.

Everything that a measure starts ends with it. `Stage.sized` chooses between a measurement and a
tiny run, which shows only that the program works.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import grpc

from shalekv.v1 import admin_pb2
from tests.bench.plan import Found
from tests.kit.processes.child import Child
from tests.kit.processes.processes import Processes
from tests.servers.obtain import obtained

T = TypeVar("T")
Way = Callable[[], Awaitable[Mapping[str, float]]]

ROOT = Path(__file__).parents[2]
ALONE = ("--no-with-compactor", "--no-with-collector")
CALL_S = 20.0
TINY_COUNT = 128  # calls of a load where a measure only shows that it works
RUN_S = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """Calls of one method with prepared requests, over and over."""

    method: str  # such as "shalekv.v1.KV/Get"
    requests: Path
    in_flight: int = 64
    connections: int = 1
    may_be_aborted: bool = False  # a server that has more to do than it can ends the longest scans

    def argv(self, address: str) -> list[str]:
        return [
            str(obtained("load") / "program"),
            *("-address", address, "-method", f"/{self.method}", "-requests", str(self.requests)),
            *("-in-flight", str(self.in_flight), "-connections", str(self.connections)),
        ]


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load."""

    address: str
    pids: Callable[[], Iterable[int]]  # of the processes whose time counts
    store_requests: Callable[[], Awaitable[int]] | None = None
    child: Child | None = None  # if it is one of our own

    async def stop(self) -> None:
        assert self.child is not None
        assert await self.child.stop() == 0, self.child.report()


@dataclass(slots=True)
class Stage:
    """Tools of a measure: its folder, processes, servers and load client."""

    folder: Path
    processes: Processes
    is_tiny: bool
    base: Path | None = None  # a working copy of the commit before
    flags: tuple[str, ...] = ()  # more flags of our servers
    numbers: count[int] = field(default_factory=count)

    @property
    def line_s(self) -> float:
        """Time between two lines of a probe."""
        return self.sized(1.0, 0.2)

    def sized(self, full: T, tiny: T) -> T:
        return tiny if self.is_tiny else full

    def new_folder(self, name: str) -> Path:
        made = self.folder / f"{name}-{next(self.numbers)}"
        made.mkdir()
        return made

    def requests(self, messages: Iterable[bytes]) -> Path:
        """Write messages as the load client reads them."""
        path = self.folder / f"requests-{next(self.numbers)}"
        data = b"".join(len(each).to_bytes(4, "big") + each for each in messages)
        path.write_bytes(data)
        return path

    async def serve(self, url: str, *flags: str, env: Mapping[str, str] | None = None) -> Target:
        """Start a writer as a shell does, and return it once it serves."""
        child = await self._start("serve", "--create", *flags, url=url, env=env)
        return self.target(child)

    async def read(self, url: str, *flags: str, env: Mapping[str, str] | None = None) -> Target:
        """Start a reader, likewise."""
        return self.target(await self._start("reader", *flags, url=url, env=env))

    def target(self, child: Child) -> Target:
        address = child.listen

        async def requests() -> int:
            return sum(each.requests for each in (await status(address)).store_requests)

        return Target(address, lambda: tree(child.pid), requests, child)

    async def _start(
        self,
        command: str,
        *flags: str,
        url: str,
        env: Mapping[str, str] | None,
        program: str = sys.executable,
    ) -> Child:
        argv = ["-m", "shalekv.cli.main", command, "--url", url, "--listen", "127.0.0.1:0"]
        argv += ["--log-format", "json", *self.flags, *flags]
        child = self.processes.start(*argv, program=program, env=env)
        await child.ready()
        return child

    async def serve_probed(self, lines: Path, url: str, *flags: str) -> Target:
        """Start a writer that writes a line each `line_s`: see `tests.bench.programs.probed`."""
        await asyncio.to_thread(lines.touch)
        argv = ["-m", "tests.bench.programs.probed", str(lines), str(self.line_s), "serve"]
        argv += ["--create", "--url", url]
        argv += ["--listen", "127.0.0.1:0", "--log-format", "json", *self.flags, *flags]
        env = {"PYTHONPATH": str(ROOT)}
        child = self.processes.start(*argv, program=sys.executable, env=env)
        await child.ready()
        return self.target(child)

    async def serve_base(self, url: str, *flags: str) -> Target:
        """Start a writer of the commit before."""
        assert self.base is not None
        program = str(self.base / ".venv" / "bin" / "python")
        flags = ("--create", *flags)
        return self.target(await self._start("serve", *flags, url=url, env=None, program=program))

    async def put_under_load(
        self, target: Target, load: Load, *, seconds: float | None = None, count: int = 0
    ) -> dict[str, float]:
        """Return the figures of a load, with the processor time of both sides for a call."""
        seconds = seconds if seconds is not None else 1.25
        count = count or self.sized(0, TINY_COUNT)  # a busy machine may do no call in a short time
        argv = load.argv(target.address)
        argv += ["-count", str(count)] if count else ["-seconds", str(seconds)]
        before = await asyncio.to_thread(cpu_s, target.pids())
        began_requests = await target.store_requests() if target.store_requests else 0
        output = await run(argv)
        after = await asyncio.to_thread(cpu_s, target.pids())
        told = json.loads(output)
        calls = max(1, int(told["calls"]))
        errors = dict(told["errors"] or {})
        aborted = errors.pop(str(grpc.StatusCode.ABORTED.value[0]), 0) if load.may_be_aborted else 0
        if errors or told["lost"] or not told["calls"]:
            raise AssertionError(f"calls of {load.method} failed: {output}")
        figures = {
            "calls/s": told["calls_per_s"],
            "p50 ms": told["p50_ms"],
            "p99 ms": told["p99_ms"],
            "p99.9 ms": told["p999_ms"],
            "server CPU us": (after - before) / calls * 1e6,
            "client CPU us": told["cpu_us"],
        }
        if aborted:
            figures["aborted"] = aborted
        if target.store_requests:
            sent = await target.store_requests() - began_requests
            figures["store requests"] = sent / calls
        if told["messages"] > calls:
            figures["messages/s"] = told["messages"] / told["seconds"]
        figures["MB/s"] = told["bytes"] / told["seconds"] / 1e6
        return figures

    async def in_turns(self, found: Found, ways: Mapping[str, Way], rounds: int) -> None:
        """Add the figures of each way to `found`, in an order that turns round each time.

        The first round, which brings connections and caches into their state, does not count; a
        tiny run has none.
        """
        for name in ways:
            found.side(name, {})
        for number in range(0 if self.is_tiny else -1, rounds):
            for name in list(ways) if number % 2 else reversed(list(ways)):
                figures = await ways[name]()
                if number >= 0:
                    found.side(name, figures)

    async def program(
        self,
        module: str,
        *argv: str,
        env: Mapping[str, str] | None = None,
        within_s: float = RUN_S,
    ) -> dict[str, Any]:
        """Run a module of `tests.bench.programs` to its end; its last line is JSON."""
        command = [sys.executable, "-m", f"tests.bench.programs.{module}", *argv]
        paths = {"PYTHONPATH": str(ROOT)}
        output = await run(command, env=paths | dict(env or {}), within_s=within_s)
        told: dict[str, Any] = json.loads(output.splitlines()[-1])
        return told


async def run(
    argv: list[str], *, env: Mapping[str, str] | None = None, within_s: float = RUN_S
) -> str:
    """Run a program to its end, and return its output."""

    def wait() -> str:
        done = subprocess.run(
            argv,
            env=os.environ | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
            cwd=ROOT,
        )
        if done.returncode:
            raise AssertionError(f"$ {' '.join(argv)}\n{done.stdout}{done.stderr}")
        return done.stdout

    return await asyncio.to_thread(wait)


@asynccontextmanager
async def held(load: Load, address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Hold connections and streams open, all of which are there when this begins."""
    process = await asyncio.create_subprocess_exec(
        *load.argv(address),
        "-hold",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(CALL_S):
            assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.stdin.close()
        async with asyncio.timeout(CALL_S):
            await process.wait()


async def status(address: str) -> admin_pb2.StatusReply:
    """Ask a server for its status."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/shalekv.v1.Admin/Status",
            request_serializer=admin_pb2.StatusRequest.SerializeToString,
            response_deserializer=admin_pb2.StatusReply.FromString,
        )
        reply: admin_pb2.StatusReply = await call(admin_pb2.StatusRequest(), timeout=CALL_S)
        return reply


def cpu_s(pids: Iterable[int]) -> float:
    """Return the processor time of these processes, in seconds.

    From the clocks of the kernel, which count nanoseconds: /proc/PID/stat has ticks of 10 ms, so a
    short load would often take none.
    """
    total = 0.0
    for pid in pids:
        with suppress(OSError):  # the process has ended
            total += time.clock_gettime(_clock(pid))
    return total


def _clock(pid: int) -> int:
    """Return the clock of a process, as clock_getcpuclockid(3) of Linux does."""
    of_all_threads = 2
    return (~pid << 3) | of_all_threads


def tree(pid: int) -> list[int]:
    """Return this process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parent = int(text.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def timed_ms(work: Callable[[], object], times: int, *, within_s: float = 1.0) -> list[float]:
    """Return the milliseconds of calls, one after the other: of so many, or in so much time; of one
    at least.
    """
    took: list[float] = []
    ends_s = time.perf_counter() + within_s
    while len(took) < times and ((began_s := time.perf_counter()) < ends_s or not took):
        work()
        took.append((time.perf_counter() - began_s) * 1_000)
    return took
