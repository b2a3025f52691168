"""Parts of a merge in processes: their requests are counted for any outcome."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from random import Random

import pytest

from shalekv.cli.commands.compactor import ProcessParts
from shalekv.cli.process.merge_part import PartReply
from shalekv.clock import LoopClock
from shalekv.errors import PartFailed, ShaleError, StoreUnavailable
from shalekv.jobs.compact.parts import PartResult
from shalekv.runtime import Runtime
from shalekv.settings import CompactorConfig, StoreSettings
from shalekv.store.api import RequestKind
from shalekv.store.cas import CasStore
from shalekv.store.memory import MemoryStore
from shalekv.telemetry.metrics import Metrics
from tests.kit.engine.compaction import whole_part
from tests.kit.inline_runtime import InlineWorkers
from tests.kit.timeouts import scaled_timeout_s

# Reads the task, and prints the given reply.
REPLIES = "import sys; sys.stdin.readline(); print(sys.argv[1])"
# The first that makes the folder never replies; the others do.
FIRST_HANGS = """
import os, sys, time
sys.stdin.readline()
try:
    os.mkdir({folder!r})
    time.sleep(3600)
except FileExistsError:
    print(sys.argv[1])
"""
HANG_S = 30
SENT = {RequestKind.WRITE: 3, RequestKind.READ: 4}
PART = whole_part([])


def parts(reply: PartReply, program: str = REPLIES) -> tuple[ProcessParts, CasStore]:
    """A runner whose processes all give this reply, and the store whose requests it counts."""
    runtime = Runtime(LoopClock(), Random(0), InlineWorkers())
    store = CasStore(MemoryStore(lambda: 0), runtime, StoreSettings())
    settings = CompactorConfig()
    return ProcessParts(
        store, settings, [sys.executable, "-c", program, reply.model_dump_json()]
    ), store


async def test_requests_of_parts_are_those_of_the_compactor() -> None:
    """What all parts have used is added to what the compactor has; their memory is free again."""
    result = PartResult(outputs=(), read_bytes=1, written_bytes=2)
    used = Metrics()
    used.add("process_cpu_seconds", 2, "compactor")
    used.add("process_resident_bytes", 9, "compactor")
    runner, store = parts(PartReply(result=result, sent=SENT, metrics=used.encode()))
    store.sent.add(RequestKind.WRITE)
    results = await runner.run([PART, PART], lambda: False)
    assert [each.written_bytes for each in results] == [2, 2]
    assert store.sent.by_kind[RequestKind.WRITE] == 7
    assert store.sent.by_kind[RequestKind.READ] == 8
    assert runner.done.get("process_cpu_seconds", "compactor") == 4
    assert runner.done.get("process_resident_bytes", "compactor") is None


@pytest.mark.parametrize(
    ("reason", "error"),
    [(StoreUnavailable.reason, StoreUnavailable), ("BAD_CHECKSUM", PartFailed)],
)
async def test_requests_of_a_part_that_failed_are_counted(
    reason: str, error: type[ShaleError]
) -> None:
    """The requests of a failed part are counted, since they are paid for."""
    runner, store = parts(PartReply(reason=reason, problem="made up", sent=SENT))
    with pytest.raises(error, match="made up"):
        await runner.run([PART, PART], lambda: False)
    assert store.sent.by_kind[RequestKind.READ] in {4, 8}  # the other one may have been ended


async def test_a_part_without_a_reply_fails() -> None:
    """A part that ends without a reply is a failure, and its requests are unknown."""
    runner, store = parts(PartReply(), program="import sys; sys.stdin.readline()")
    with pytest.raises(PartFailed, match="no result"):
        await runner.run([PART, PART], lambda: False)
    assert store.sent.total == 0


async def test_a_part_that_fails_ends_the_others(tmp_path: Path) -> None:
    """A failed part ends the merge at once: a part that would run for an hour is killed."""
    program = FIRST_HANGS.format(folder=str(tmp_path / "hangs"))
    runner, _ = parts(PartReply(reason="BAD_CHECKSUM", problem="made up"), program)
    async with asyncio.timeout(scaled_timeout_s(HANG_S)):
        with pytest.raises(PartFailed, match="made up"):
            await runner.run([PART] * 3, lambda: False)
