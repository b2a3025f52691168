"""How the log of a writer ends well: all is durable, and then in the object store, in time."""

from __future__ import annotations

import asyncio

import structlog

from shalekv.clock import Clock
from shalekv.errors import ShaleError
from shalekv.write.group_commit import GroupCommit
from shalekv.write.wal import LogSlots

log = structlog.get_logger()


async def commit_to_the_end(commits: GroupCommit, slots: LogSlots) -> None:
    """Run the log until it is closed or stopped; if it was closed, until all of it is archived.

    Then whoever reads the object store alone finds all that was acknowledged. Where that cannot be,
    it is logged: safekeepers have it, and the next writer brings it there.
    """
    await commits.run()
    if not commits.is_closing:
        return
    problem = "there was no time left"
    try:
        await slots.archive()
        problem = ""
    except ShaleError as error:
        problem = str(error)
    finally:  # also when cancelled
        if problem:
            log.warning("the end of the log is in the safekeepers alone", problem=problem)


async def bound_the_end(
    commits: GroupCommit, end: asyncio.Task[None], clock: Clock, *, grace_ms: float
) -> None:
    """Cancel `end` when it has not come so long after the log was closed or stopped."""
    await commits.ended.wait()
    await clock.sleep_ms(grace_ms)
    end.cancel()
