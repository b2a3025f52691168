"""Runs commands of the user against a server that a test has started."""

from __future__ import annotations

from tests.kit.processes.child import Child
from tests.kit.processes.processes import Processes


async def run(processes: Processes, server: Child, *argv: str, stdin: bytes = b"") -> Child:
    """Run a command that talks to `server`, to its end."""
    return await processes.run(*argv, env={"SHALEKV_ADDR": server.listen}, stdin=stdin)


async def output(processes: Processes, server: Child, *argv: str, stdin: bytes = b"") -> str:
    command = await run(processes, server, *argv, stdin=stdin)
    assert await command.exited() == 0, command.report()
    return command.stdout()
