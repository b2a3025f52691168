"""The children of a server, seen from outside."""

from __future__ import annotations

import asyncio
import os
import select

from tests.kit.processes.child import Child, Line

WITHIN_MS = 120_000


class Watched:
    """A process that is no child of ours: the descriptor means it, and never its successor."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError when there is none."""
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    async def ended(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        found = await asyncio.to_thread(poll.poll, WITHIN_MS)
        os.close(self._descriptor)
        return bool(found)


def is_start_of(role: str, line: Line) -> bool:
    return line.get("event") == "child process started" and line.get("child") == role


async def started(server: Child, role: str, *, after: int = 0) -> Watched:
    """A child that the server has started, another than that with the id `after`."""
    line = await server.line(lambda line: is_start_of(role, line) and line["pid"] != after)
    return Watched(line["pid"])
