"""`shalekv watch` as a process against real servers, some of which are killed."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

from shalekv_client import Client
from tests.kit.processes.child import EXIT_S, Child
from tests.kit.processes.processes import Processes
from tests.servers.process import free_port

COUNT = 40


def reported(watch: Child) -> list[dict[str, Any]]:
    text = watch.stdout()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


async def until_reported(watch: Child, count: int, address: str) -> list[dict[str, Any]]:
    """Wait until this many commits are printed, while the server at `address` answers."""
    async with asyncio.timeout(EXIT_S), Client(address) as client:
        while len(found := reported(watch)) < count:
            assert watch.running, watch.report()
            await client.status()
    return found


async def test_another_server_goes_on_when_the_writer_is_killed(
    processes: Processes, tmp_path: Path
) -> None:
    """Every commit is printed once, and in order, across the kill of the server."""
    url = f"file://{tmp_path}/db"
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    server = await processes.serve(url, "--listen", addresses[0])
    argv = ["watch", "--from-seq", "1", "--format", "json"]
    watch = processes.start(*argv, "--address", ",".join(addresses))
    async with Client(addresses) as client:
        for number in range(COUNT):
            await client.put(b"%d" % number, b"v")
            if number == COUNT // 2:
                await until_reported(watch, 1, server.listen)
                await server.kill()
                server = await processes.serve(url, "--listen", addresses[1], create=False)
    found = await until_reported(watch, COUNT, server.listen)
    watch.send(signal.SIGINT)
    assert await watch.exited() == 0, watch.report()
    assert [commit["changes"][0]["key"] for commit in found] == [str(n) for n in range(COUNT)]
    numbers = [commit["seq"] for commit in found]
    assert numbers == sorted(set(numbers))
