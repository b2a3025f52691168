"""Peers that servers are measured beside: the newest etcd, and Redis that syncs each write."""

from __future__ import annotations

import csv
import io
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.stage import Target, cpu_s, run, tree
from tests.servers.debian import libraries
from tests.servers.obtain import obtained
from tests.servers.process import Program, free_port, running
from tests.servers.record_stores import etcd_in

SITE = "site"  # the folder of a package that was obtained


@contextmanager
def etcd(folder: Path) -> Iterator[Target]:
    """One member of etcd, as `etcd_in`."""
    with etcd_in(folder) as server:
        yield Target(server.address, _pids_of("etcd/program", str(folder)))


@contextmanager
def redis(folder: Path) -> Iterator[RedisServer]:
    """Redis that syncs its log before it acknowledges a write."""
    usr = obtained("redis") / "usr"
    port = free_port()
    argv = [str(usr / "bin" / "redis-server"), "--port", str(port), "--bind", "127.0.0.1"]
    argv += ["--dir", str(folder), "--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    program = Program(argv, libraries(usr))
    with running(program, folder / "log", _accepts(port)):
        yield RedisServer(usr, port, folder)


class RedisServer:
    """A Redis, which its own load client measures."""

    def __init__(self, usr: Path, port: int, folder: Path) -> None:
        self._usr = usr
        self._port = port
        self._pids = _pids_of(f":{port}", str(usr))
        self.folder = folder

    async def sets(self, in_flight: int, count: int) -> dict[str, float]:
        """Return the figures of SETs of values of 100 bytes."""
        argv = [str(self._usr / "bin" / "redis-benchmark"), "-p", str(self._port), "--csv"]
        argv += ["-t", "set", "-d", "100", "-r", "1000000"]
        argv += ["-c", str(in_flight), "-n", str(count)]
        before = cpu_s(self._pids())
        output = await run(argv, env=libraries(self._usr))
        used_s = cpu_s(self._pids()) - before
        row = next(csv.DictReader(io.StringIO(output)))
        return {
            "calls/s": float(row["rps"]),
            "p50 ms": float(row["p50_latency_ms"]),
            "p99 ms": float(row["p99_latency_ms"]),
            "server CPU us": used_s / count * 1e6,
        }


def _accepts(port: int) -> Callable[[], bool]:
    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return answers


def _pids_of(*parts: str) -> Callable[[], list[int]]:
    """Return processes that descend from this one, and have all of `parts` in their command."""

    def pids() -> list[int]:
        found = []
        for pid in tree(os.getpid()):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if all(part in command for part in parts) and "leash.py" not in command:
                found.append(pid)
        return found

    return pids
