"""The commands that README.md has for its readers."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.kit.processes.child import Child
from tests.kit.processes.processes import SHALEKV, Processes

ROOT = Path(__file__).parents[3]
ADDRESS = "127.0.0.1:7654"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVE = "shalekv serve "
TYPED_S = 200  # most of it for the check of the store
Starts = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Terminal:
    """Commands for the second terminal while one server runs, and lines that they must print."""

    server: str  # the block that started it; empty before the first one
    commands: str
    shown: tuple[str, ...]


def terminals(title: str, starts: Starts) -> list[Terminal]:
    """A section, cut at each start of a server."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    found: list[Terminal] = []
    server, commands, shown = "", "", ()
    for language, body in BLOCK.findall(section):
        if language != "sh":
            shown += tuple(body.splitlines())
        elif starts(body):
            found.append(Terminal(server, commands, shown))
            server, commands, shown = body, "", ()
        else:
            commands += body
    return [*found, Terminal(server, commands, shown)]


def with_shalekv(terminal: Terminal) -> Terminal:
    """A terminal in which the environment of this test is active."""
    path = f"export PATH='{Path(SHALEKV).parent}':$PATH\n"
    return Terminal(terminal.server, path + terminal.commands, terminal.shown)


async def type_in(
    processes: Processes,
    checkout: Path,
    terminal: Terminal,
    *,
    env: Mapping[str, str],
    within_s: float = TYPED_S,
) -> Child:
    """Run the commands until one fails; `env` has the address of the server."""
    script = checkout / "commands.sh"
    address = env.get("SHALEKV_ADDR", ADDRESS)
    script.write_text(
        f"set -e -o pipefail\ncd '{checkout}'\n" + terminal.commands.replace(ADDRESS, address),
        encoding="utf-8",
    )
    bash = shutil.which("bash")
    assert bash is not None
    path = f"{ROOT / '.cache' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    shell = await processes.run(
        str(script), program=bash, env={"PATH": path, **env}, within_s=within_s
    )
    assert await shell.exited() == 0, shell.report()
    printed = shell.stdout().splitlines()
    for line in terminal.shown:
        assert line in printed, shell.report()
        printed = printed[printed.index(line) + 1 :]
    return shell
