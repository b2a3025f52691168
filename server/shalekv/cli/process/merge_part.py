"""Process for one part of a large merge, started by `shalekv compactor`.

standard input    one line of JSON, a `PartTask`; then optionally a line `lift`, which removes the
                  limit on the rate. It stays open: its end means that the compactor has ended
standard output   one line of JSON, a `PartReply`
"""

from __future__ import annotations

import asyncio
import os
import sys
from random import SystemRandom

import uvloop
from pydantic import BaseModel, ConfigDict, Field
from structlog.contextvars import bind_contextvars

from shalekv.cli.process.logs import configure_logs
from shalekv.clock import MachineClock
from shalekv.errors import ShaleError
from shalekv.jobs.compact.pace import TokenBucket
from shalekv.jobs.compact.parts import MergePart, PartResult, run_part
from shalekv.runtime import Runtime, ThreadWorkers
from shalekv.settings import JobTelemetrySettings, ProcessSettings, StoreSettings
from shalekv.store.api import RequestKind
from shalekv.store.cas import CasStore
from shalekv.store.counting import StoreCallCounts
from shalekv.store.opening import open_store
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.process_use import add_process_use

LINE_BYTES_MAX = 1 << 30  # a part of 100,000 SSTs takes about 50 MB
LIFT = b"lift\n"
ROLE = "compactor"  # whose work this is
_ABANDONED = 1  # exit code when the parent is gone, so that none reads it


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64")


class PartTask(_Message):
    """The part to merge, and the store and the settings for it."""

    url: str
    part: MergePart
    store: StoreSettings
    process: ProcessSettings
    telemetry: JobTelemetrySettings


class PartReply(_Message):
    """The result, or the reason of the failure; and what the process has used in either case."""

    result: PartResult | None = None
    reason: str = ""
    problem: str = ""
    sent: dict[RequestKind, int] = Field(default_factory=dict)
    metrics: bytes = b"[]"


async def run_task() -> None:
    """Read the task, run it, and print the reply. Ends the process when the parent ends."""
    stdin = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin.buffer)
    line = await stdin.readline()
    if not line.endswith(b"\n"):
        os._exit(_ABANDONED)
    task = PartTask.model_validate_json(line)
    configure_logs(task.process.log_format, task.process.log_level, role=ROLE)
    bind_contextvars(url=task.url)
    lifted = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_watch(stdin, lifted))
        try:
            reply = await _reply(task, lifted)
        finally:
            watching.cancel()
    sys.stdout.write(reply.model_dump_json() + "\n")
    sys.stdout.flush()


async def _reply(task: PartTask, lifted: asyncio.Event) -> PartReply:
    runtime = Runtime(MachineClock(), SystemRandom(), ThreadWorkers(task.store.threads))
    store = open_store(task.url, runtime, task.store)
    counts = StoreCallCounts(task.telemetry.slow_ms)
    try:
        cas = CasStore(store, runtime, task.store, counts=counts)
        pace = TokenBucket(runtime.clock, task.part.bytes_per_s, lifted.is_set)
        reply = PartReply(result=await run_part(cas, task.part, pace))
    except ShaleError as error:
        reply = PartReply(reason=error.reason, problem=str(error))
    finally:
        await store.close()
    metrics = Metrics()
    add_process_use(metrics, ROLE)
    counts.add_to(metrics, ROLE)
    used = {"sent": dict(store.sent.by_kind), "metrics": metrics.encode()}
    return reply.model_copy(update=used)


async def _watch(stdin: asyncio.StreamReader, lifted: asyncio.Event) -> None:
    while line := await stdin.readline():
        if line == LIFT:
            lifted.set()
    os._exit(_ABANDONED)  # the compactor has ended: nothing that we write will be published


if __name__ == "__main__":
    uvloop.run(run_task())
