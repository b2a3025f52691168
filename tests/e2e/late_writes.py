"""Writes to writers of which one is too late, and the judgement over all of them."""

from __future__ import annotations

from shalekv_client import Client, Commit, NotApplied, OutcomeUnknown
from tests.kit.processes.child import Child
from tests.kit.processes.history import History
from tests.kit.processes.load import read_state, send
from tests.kit.processes.meanwhile import Meanwhile

WRITES = 6


async def write(history: History, client: Client) -> None:
    """Some writes, one after the other, all of which must be acknowledged."""
    for number in range(WRITES):
        attempt = history.begin([b"shared", b"own/%d" % len(history.attempts)][number % 2 :])
        history.acknowledged(attempt, await send(client, attempt))


async def send_late(history: History, client: Client) -> Commit | None:
    """A write that nobody may acknowledge; None: nobody has."""
    attempt = history.begin([b"shared"])
    try:
        commit = await send(client, attempt)
    except NotApplied as error:
        history.refused(attempt, error.reason)
        return None
    except OutcomeUnknown as error:
        history.lost_sight(attempt, error.reason or error.code)
        return None
    history.acknowledged(attempt, commit)
    return commit


async def check_history(database: Meanwhile, history: History, survivor: Child) -> None:
    """All that was acknowledged is there: at once, after a crash, and in the files."""
    history.check_state(await read_state(survivor.listen))
    await survivor.kill()
    again = await database.serve()
    history.check_state(await read_state(again.listen))
    assert await again.stop() == 0, again.report()
    await database.check()
