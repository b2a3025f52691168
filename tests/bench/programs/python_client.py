"""Puts or gets by the Python client, in a process of its own: prints JSON.

    python_client.py ADDRESS session|session-get|coalesced|unary CALLS [CA TOKEN_FILE]

It uses the public interface alone, so that it measures the client of any commit: of those before
access control, without the last two.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from shalekv_client import Client

VALUE = b"v" * 100
TASKS = 256


async def by_session(client: Client, calls: int, *, gets: bool = False) -> None:
    async with client.session() as session:
        futures: list[asyncio.Future[Any]] = []
        for number in range(calls):
            key = b"k%015d" % number
            futures.append(session.get(key) if gets else session.put(key, VALUE))
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


WAYS: dict[str, Callable[[Client, int], Awaitable[None]]] = {
    "session": by_session,
    "session-get": partial(by_session, gets=True),
    "coalesced": by_tasks,
    "unary": by_tasks,
}


async def measure(address: str, way: str, calls: int, *shown: str) -> dict[str, Any]:
    """Return the rate, and the processor time of this process for a call."""
    more: dict[str, Any] = {}
    if shown:
        from shalekv_client import TlsOptions  # noqa: PLC0415 (new)

        authority, token_file = shown
        more = {"tls": TlsOptions(ca=authority), "access_token_file": token_file}
    async with Client(address, coalesce=way != "unary", **more) as client:
        work = WAYS[way]
        await work(client, calls // 10)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        await work(client, calls)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return {"calls/s": calls / wall_s, "client CPU us": cpu_s / calls * 1e6}


if __name__ == "__main__":
    address, way, calls, *shown = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(address, way, int(calls), *shown))))
