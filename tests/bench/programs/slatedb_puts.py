"""Measurement of durable puts by SlateDB's binding, in a process of its own: prints JSON.

    slatedb_puts.py NAME CALLERS SECONDS

The store is that of the environment (`CLOUD_PROVIDER`, `AWS_*`); each caller waits until its put is
durable. The site of the package is on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time

import uvloop
from slatedb import uniffi as slatedb

VALUE = b"v" * 100


async def measure(name: str, callers: int, seconds: float) -> dict[str, float]:
    """Return the median and the rate, at default settings."""
    db = await slatedb.DbBuilder(name, slatedb.ObjectStore.from_env(None)).build()
    took_ms: list[float] = []
    ends_s = time.perf_counter() + seconds

    async def caller(number: int) -> None:
        count = 0
        while (began_s := time.perf_counter()) < ends_s or count == 0:
            handle = await db.put(b"k%07d%08d" % (number, count), VALUE)
            await handle.await_durable()
            took_ms.append((time.perf_counter() - began_s) * 1_000)
            count += 1

    await asyncio.gather(*(caller(number) for number in range(callers)))
    await db.shutdown()
    return {"p50 ms": statistics.median(took_ms), "calls/s": len(took_ms) / seconds}


if __name__ == "__main__":
    print(json.dumps(uvloop.run(measure(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))))
