"""Attacks on a real server: it holds no more memory than is stated, and serves its other clients.

The latency of a get before and during an attack is printed (`-s` shows it), and not judged.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from shalekv.rpc.native_server import HELD_BYTES_MAX
from shalekv.settings import MIB
from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.kit.certificates import LOCAL, Authority
from tests.kit.processes.child import Child
from tests.kit.processes.process_memory import most_resident_bytes, resident_bytes
from tests.kit.processes.processes import Processes
from tests.kit.processes.stubs import kv_stub
from tests.kit.seeds import run_seed
from tests.wire.attackers import ATTACKS, LARGE_KEY
from tests.wire.strangers import STRANGERS

MEMORY_BYTES = 128 * MIB
# What clients make a server hold: messages that are incomplete or unread, replies that wait, and
# what these leave unusable between them.
GROWTH_BYTES = 2 * HELD_BYTES_MAX + 96 * MIB
CONNECTION_BYTES = 32 * 1024  # of each connection that has made a call
CALL_S = 60.0
SHORT_S, LONG_S = 0.4, 10.0


@dataclass(frozen=True, slots=True)
class Victim:
    """A server, and how much memory it had before an attack."""

    server: Child
    kv: kv_pb2_grpc.KVStub
    idle_bytes: int

    @property
    def growth_bytes(self) -> int:
        """The most that it has taken beyond that."""
        return most_resident_bytes(self.server.pid) - self.idle_bytes


async def attacked(
    processes: Processes,
    folder: Path,
    names: str,
    seconds: float,
    *more: str,
    program: str = "tests.wire.attackers",
    tls: Authority | None = None,
) -> tuple[Victim, dict[str, int]]:
    """Attack a server while another client reads; returns it, and the connections it has ended.

    `more` are further arguments of the `program` that attacks. The certificate is of `tls`.
    """
    flags = ["--memory-bytes", str(MEMORY_BYTES), "--shutdown-grace-ms", "1000"]
    if tls is not None:
        files = tls.issue(*LOCAL).write(folder, "server")
        flags += ["--tls-cert", files.certificate, "--tls-key", files.key]
    server = await processes.serve(f"file://{folder}/db", *flags)
    async with kv_stub(server.listen, b"" if tls is None else tls.certificate) as kv:
        await kv.Put(kv_pb2.PutRequest(key=LARGE_KEY, value=os.urandom(MIB)))
        await kv.Put(kv_pb2.PutRequest(key=b"small", value=b"v"))
        before = await latencies(kv, lambda count: count < 100)
        victim = Victim(server, kv, resident_bytes(server.pid))
        module = ("-m", program, names, server.listen, str(seconds), *more)
        attacker = processes.start(*module, program=sys.executable)
        during = await latencies(kv, lambda _: attacker.running)
        assert await attacker.exited() == 0, attacker.report()
        sys.stdout.write(f"\n{names}: get before {shown(before)}, during {shown(during)}, ")
        sys.stdout.write(f"{victim.growth_bytes / MIB:.0f} MiB more\n")
        assert (await kv.Get(kv_pb2.GetRequest(key=b"small"), timeout=CALL_S)).value == b"v"
    return victim, json.loads(attacker.stdout())


async def latencies(kv: kv_pb2_grpc.KVStub, more: Callable[[int], bool]) -> list[float]:
    """Get a small value again and again; the seconds that each get took."""
    took: list[float] = []
    while more(len(took)):
        began_s = time.perf_counter()
        reply = await kv.Get(kv_pb2.GetRequest(key=b"small"), timeout=CALL_S)
        took.append(time.perf_counter() - began_s)
        assert reply.value == b"v"
    return took


def shown(took: list[float]) -> str:
    return f"{statistics.median(took) * 1e3:.1f} ms (at most {max(took) * 1e3:.0f} ms)"


async def stopped(server: Child) -> None:
    """Stop the server, which has met nothing that it did not expect."""
    assert await server.stop() == 0, server.report()
    levels = {line.get("level") for line in server.lines()}
    assert levels <= {"info", "warning"}, server.report()


async def test_attacks_one_after_the_other(processes: Processes, tmp_path: Path) -> None:
    """Floods, bombs, drips and clients that read nothing, a moment of each."""
    names = ",".join(name for name in ATTACKS if name != "connections")
    victim, ended = await attacked(processes, tmp_path, names, SHORT_S)
    assert victim.growth_bytes <= GROWTH_BYTES, victim.server.report()
    assert sum(ended.values()) > 0  # the server has ended some of them itself
    await stopped(victim.server)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "connections"])
async def test_an_attack(processes: Processes, tmp_path: Path, name: str) -> None:
    """Each attack for as long as it takes to fill what can be filled."""
    victim, _ = await attacked(processes, tmp_path, name, LONG_S)
    assert victim.growth_bytes <= GROWTH_BYTES, victim.server.report()
    await stopped(victim.server)


@pytest.mark.soak
async def test_thousands_of_connections(processes: Processes, tmp_path: Path) -> None:
    """5,000 connections that have made a call and are idle take 32 KiB each, or less."""
    victim, _ = await attacked(processes, tmp_path, "connections", LONG_S)
    assert victim.growth_bytes <= 5_000 * CONNECTION_BYTES, victim.server.report()
    await stopped(victim.server)


async def visited(
    processes: Processes, folder: Path, names: str, seconds: float, *, has_tls: bool
) -> Victim:
    """Have strangers at the port of a server while another client reads."""
    victim, _ = await attacked(
        *(processes, folder, names, seconds, str(run_seed())),
        program="tests.wire.strangers",
        tls=Authority() if has_tls else None,
    )
    return victim


WITH_AND_WITHOUT_TLS = pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
ALONE = [name for name in STRANGERS if name != "crowds"]


@WITH_AND_WITHOUT_TLS
async def test_strangers_one_after_the_other(
    processes: Processes, tmp_path: Path, *, has_tls: bool
) -> None:
    """Whoever speaks something else is disconnected, a moment of each."""
    victim = await visited(processes, tmp_path, ",".join(ALONE), SHORT_S / 2, has_tls=has_tls)
    assert victim.growth_bytes <= GROWTH_BYTES, victim.server.report()
    await stopped(victim.server)


@pytest.mark.soak
@WITH_AND_WITHOUT_TLS
@pytest.mark.parametrize("name", ALONE)
async def test_a_stranger(
    processes: Processes, tmp_path: Path, name: str, *, has_tls: bool
) -> None:
    """Each stranger for longer than a handshake may take."""
    victim = await visited(processes, tmp_path, name, 1.5 * LONG_S, has_tls=has_tls)
    assert victim.growth_bytes <= GROWTH_BYTES, victim.server.report()
    await stopped(victim.server)


@pytest.mark.soak
async def test_thousands_of_strangers(processes: Processes, tmp_path: Path) -> None:
    """5,000 connections, a quarter of them with TLS, are closed or take little each."""
    victim = await visited(processes, tmp_path, "crowds", LONG_S, has_tls=True)
    assert victim.growth_bytes <= 5_000 * CONNECTION_BYTES, victim.server.report()
    await stopped(victim.server)
