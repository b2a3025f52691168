"""What is in the object store when all of it must be: compared with what clients know."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from shalekv_client import Client, Durability, RetryPolicy
from tests.kit.processes.child import Child
from tests.kit.processes.history import Fate, History
from tests.kit.processes.load import DEFAULT_RETRY, read_state
from tests.kit.processes.wal_contents import check_wal, read_wal, state_of

PATIENCE_S = 200


async def check_archived(
    folder: Path, writer: Child, history: History, *, retry: RetryPolicy = DEFAULT_RETRY
) -> None:
    """Have everything archived; what clients know, the writer shows and the WAL holds is one.

    `folder` is that of the database; nothing may have been collected. With another `retry` the
    writer may stand by for a while.
    """
    began_s = time.monotonic()
    attempt = history.begin([b"last"])
    async with Client(writer.listen, timeout_ms=PATIENCE_S * 1000, retry=retry) as client:
        value = attempt.changes[b"last"]
        assert value is not None
        commit = await client.put(b"last", value, durability=Durability.ARCHIVED)
    history.acknowledged(attempt, commit)
    archived_s = time.monotonic() - began_s
    state = await read_state(writer.listen, retry=retry)
    wal = read_wal(folder)
    check_wal(wal, history)
    assert state == state_of(wal), f"seed {history.seed}"
    history.check_state(state)
    counts = {fate.value: len(history.of_fate(fate)) for fate in Fate}
    sys.stdout.write(f"{counts}, {len(wal)} objects, archived after {archived_s:.2f} s\n")
