"""The quick start of README.md, command by command, in a folder of its own.

Its `make run` blocks are the first terminal, all other shell blocks the second one; what it shows
as text must come out. Two things differ from a reader's terminal: the port is a free one, and make
does not look whether the environment is up to date.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.child import Child
from tests.e2e.processes import Processes

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:7654"
NOT_COPIED = {"data", ".git"}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
START = "make run\n"
ACTIVATE = ". .venv/bin/activate\n"


@dataclass(frozen=True, slots=True)
class Terminal:
    """What is typed into the second terminal while one server runs, and what must come out."""

    commands: str
    shown: tuple[str, ...]


def quick_start() -> list[Terminal]:
    """The quick start, cut at each start of the server."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Quick start", 1)[1].split("\n## ", 1)[0]
    terminals: list[Terminal] = []
    commands: list[str] = []
    shown: list[str] = []
    for language, body in [*BLOCK.findall(section), ("sh", START)]:
        if body == START:
            terminals.append(Terminal("".join(commands), tuple(shown)))
            commands, shown = [], []
        elif language == "sh":
            commands.append(body)
        else:
            shown += body.splitlines()
    return terminals[1:]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the repository, without a database."""
    for entry in ROOT.iterdir():
        if entry.name not in NOT_COPIED:
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


def start(processes: Processes, checkout: Path) -> Child:
    """`make run`, on a free port."""
    make = shutil.which("make")
    assert make is not None
    return processes.start(
        "--directory",
        str(checkout),
        "--old-file=.venv/run.stamp",
        "run",
        "ARGS=--listen 127.0.0.1:0 --log-format json",
        program=make,
    )


async def test_quick_start_works_as_it_is_written(processes: Processes, checkout: Path) -> None:
    """Every command succeeds and prints what the README shows, before and after the kill."""
    first, second = quick_start()
    assert "kill -9" in first.commands
    server = start(processes, checkout)
    await server.ready()
    await type_in(processes, checkout, server, first)
    await server.exited()
    server = start(processes, checkout)
    await server.ready()
    await type_in(processes, checkout, server, Terminal(ACTIVATE + second.commands, second.shown))
    await server.stop()


async def type_in(processes: Processes, checkout: Path, server: Child, terminal: Terminal) -> None:
    """Run the commands, one by one until one fails, against the server that runs now."""
    script = checkout / "commands.sh"
    script.write_text(
        f"set -e -o pipefail\ncd '{checkout}'\n"
        + terminal.commands.replace(ADDRESS, server.listen),
        encoding="utf-8",
    )
    bash = shutil.which("bash")
    assert bash is not None
    shell = await processes.run(
        str(script),
        program=bash,
        env={
            "PATH": f"{ROOT / '.cache' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "SHALEKV_ADDR": server.listen,
        },
    )
    assert await shell.exited() == 0, shell.report()
    printed = shell.stdout().splitlines()
    for line in terminal.shown:
        assert line in printed, shell.report()
        printed = printed[printed.index(line) + 1 :]
