"""Puts by the Python client, in a process of its own: prints JSON.

    python_client.py ADDRESS session|coalesced|unary PUTS [CA TOKEN_FILE]

It uses the public interface alone, so that it measures the client of any commit: of those before
access control, without the last two.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from shalekv_client import Client

VALUE = b"v" * 100
TASKS = 256


async def by_session(client: Client, puts: int) -> None:
    async with client.session() as session:
        futures = []
        for number in range(puts):
            futures.append(session.put(b"k%015d" % number, VALUE))
            await session.ready()
        await session.drain()
    assert all(future.exception() is None for future in futures)


async def by_tasks(client: Client, puts: int) -> None:
    """Puts of 256 tasks, each with one in flight."""
    numbers = iter(range(puts))

    async def work() -> None:
        for number in numbers:
            await client.put(b"k%015d" % number, VALUE)

    await asyncio.gather(*(work() for _ in range(TASKS)))


async def measure(address: str, way: str, puts: int, *shown: str) -> dict[str, Any]:
    """Return the rate, and the processor time of this process for a put."""
    more: dict[str, Any] = {}
    if shown:
        from shalekv_client import TlsOptions  # noqa: PLC0415 (new)

        authority, token_file = shown
        more = {"tls": TlsOptions(ca=authority), "access_token_file": token_file}
    async with Client(address, coalesce=way != "unary", **more) as client:
        work = by_session if way == "session" else by_tasks
        await work(client, puts // 10)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        await work(client, puts)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return {"calls/s": puts / wall_s, "client CPU us": cpu_s / puts * 1e6}


if __name__ == "__main__":
    address, way, puts, *shown = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(address, way, int(puts), *shown))))
