"""The compactor and the collector of a server: they live as long as it does, and no longer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.constants import variables
from tests.kit.processes.child import Line
from tests.kit.processes.child_processes import is_start_of, started
from tests.kit.processes.processes import Processes

ROLES = ("compactor", "collector")
SUPERVISOR = "shalekv.cli.process.supervisor"
QUICK = variables({f"{SUPERVISOR}:RESTART_INITIAL_MS": 1, f"{SUPERVISOR}:RESTART_MAX_MS": 100})
PATIENT = variables({f"{SUPERVISOR}:GRACE_MS": 60_000})  # a child that ends late is not warned of


def is_reported_by(role: str) -> Callable[[Line], bool]:
    """Accept lines of this child; each begins with the line that it has begun to work."""
    return lambda line: line.get("role") == role


def arguments(pid: int) -> str:
    """With which a process was started, with spaces between them."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


async def test_children_end_when_their_parent_is_killed(
    processes: Processes, tmp_path: Path
) -> None:
    """Only the parent gets the SIGKILL, and no process of it is left."""
    server = await processes.serve(f"file://{tmp_path}/db")
    children = [await started(server, role) for role in ROLES]
    for role in ROLES:
        await server.line(is_reported_by(role))
    os.kill(server.pid, signal.SIGKILL)
    assert [await child.ended() for child in children] == [True, True], server.report()
    assert await server.exited() == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_all(
    processes: Processes, tmp_path: Path, number: signal.Signals
) -> None:
    """A signal to the group, like Ctrl-C in a terminal, ends the server with 0, after both
    children, which log it.
    """
    server = await processes.serve(f"file://{tmp_path}/db", env=PATIENT)
    children = [await started(server, role) for role in ROLES]
    for role in ROLES:
        await server.line(is_reported_by(role))
    server.send(number)
    assert await server.exited() == 0, server.report()
    assert [await child.ended() for child in children] == [True, True]
    stopped = [line.get("role") for line in server.lines() if line.get("event") == "stopped"]
    assert sorted(stopped[:2], key=str) == sorted(ROLES)
    assert stopped[2] is None  # the server itself, at last
    assert not any(line.get("level") == "warning" for line in server.lines()), server.report()


async def test_a_compactor_elsewhere_is_not_fought(processes: Processes, tmp_path: Path) -> None:
    """The child is superseded; the server logs that once, starts none, and continues to serve."""
    url = f"file://{tmp_path}/db"
    server = await processes.serve(url, env=QUICK)
    child = await started(server, "compactor")
    await server.line(is_reported_by("compactor"))
    other = processes.start("compactor", "--url", url, "--log-format", "json")
    down = await server.line(lambda line: line.get("event") == "child process stays down")
    assert down["exit_code"] == 4
    assert await child.ended()
    await processes.run("put", "k", "v", env={"SHALEKV_ADDR": server.listen}, code=0)
    assert await server.stop() == 0, server.report()
    assert sum(is_start_of("compactor", line) for line in server.lines()) == 1
    assert await other.stop() == 0, other.report()


async def test_settings_reach_children_from_wherever_they_come(
    processes: Processes, tmp_path: Path
) -> None:
    """Flags, environment and file are read by the server, and its children use them."""
    config = tmp_path / "shalekv.toml"
    config.write_text("[collector]\ncollect_interval_ms = 4321\n")
    env = {"SHALEKV_COMPACTOR__COMPACTOR_IDLE_POLL_MS": "321", "SHALEKV_CONFIG": str(config)}
    server = await processes.serve(f"file://{tmp_path}/db", "--l0-trigger-count", "21", env=env)
    flags = {role: arguments((await started(server, role)).pid) for role in ROLES}
    for role in ROLES:
        await server.line(is_reported_by(role))  # it understands them
    assert await server.stop() == 0, server.report()
    assert "--collect-interval-ms 4321" in flags["collector"]
    assert "--compactor-idle-poll-ms 321" in flags["compactor"]
    assert "--l0-trigger-count 21" in flags["compactor"]
