"""What README.md tells a reader to type, command by command, in a folder of its own.

The blocks that start a server are the first terminal, all other shell blocks the second one; what
it shows as text must come out. Few things differ from a reader's terminal: the port is a free one,
make does not look whether the environment is up to date, and the bucket is that of a server on this
machine, which the environment names as the section says.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.processes.child import Child
from tests.kit.processes.processes import SHALEKV, Processes
from tests.servers.object_stores import versitygw

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:7654"
NOT_COPIED = {"data", ".git"}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAKE_RUN = "make run\n"
SERVE = "shalekv serve "
READER = "shalekv reader "
ACTIVATE = ". .venv/bin/activate\n"
TYPED_S = 200  # of which the proof that a store is fit takes most

Starts = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Terminal:
    """What is typed into the second terminal while one server runs, and what must come out."""

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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the repository, without a database."""
    for entry in ROOT.iterdir():
        if entry.name not in NOT_COPIED:
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


def start(processes: Processes, checkout: Path) -> Child:
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
    before, first, second = terminals("Quick start", lambda body: body == MAKE_RUN)
    assert before.commands == ""
    assert "kill -9" in first.commands
    server = start(processes, checkout)
    await server.ready()
    await type_in(processes, checkout, first, env={"SHALEKV_ADDR": server.listen})
    await server.exited()
    server = start(processes, checkout)
    await server.ready()
    again = Terminal(second.server, ACTIVATE + second.commands, second.shown)
    await type_in(processes, checkout, again, env={"SHALEKV_ADDR": server.listen})
    await server.stop()


async def test_bucket_works_as_it_is_written(processes: Processes, checkout: Path) -> None:
    """The bucket is proven fit, then it holds a database that is served and read."""
    before, served = terminals("In a bucket", lambda body: body.startswith(SERVE))
    with versitygw() as s3:
        s3.create_bucket("my-bucket")
        env = s3.environment | {"SHALEKV_STORE__ENDPOINT_URL": s3.endpoint}
        proven = await type_in(processes, checkout, with_shalekv(before), env=env)
        assert "s3://my-bucket/my-database is fit" in proven.stderr()
        free_port = {"SHALEKV_SERVER__LISTEN": "127.0.0.1:0"}
        logs = {"SHALEKV_SERVER__LOG_FORMAT": "json"}
        _, *argv = served.server.split()
        server = processes.start(*argv, env=env | free_port | logs)
        await server.ready()
        env |= {"SHALEKV_ADDR": server.listen}
        typed = await type_in(processes, checkout, with_shalekv(served), env=env)
        assert "writer\twrite\t" in typed.stdout(), typed.report()
        assert await server.stop() == 0, server.report()


async def test_readers_work_as_it_is_written(processes: Processes, checkout: Path) -> None:
    """A reader beside the server of the quick start, and copies of its database."""
    before, beside = terminals("Read from more places", lambda body: body.startswith(READER))
    assert before.commands == ""
    url = f"file://{checkout}/data"
    server = await processes.serve(url)
    flags = [
        part for part in beside.server.split()[1:] if part not in ("--url", '"file://$PWD/data"')
    ]
    listen = flags[flags.index("--listen") + 1]
    flags[flags.index("--listen") + 1] = "127.0.0.1:0"
    reader = processes.start(*flags, "--url", url, "--log-format", "json")
    await reader.ready()
    typed = with_shalekv(beside)
    here = Terminal(typed.server, typed.commands.replace(listen, reader.listen), typed.shown)
    await type_in(processes, checkout, here, env={"SHALEKV_ADDR": server.listen})
    assert await reader.stop() == 0, reader.report()
    assert await server.stop() == 0, server.report()


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
    """Run the commands, one by one until one fails; `env` says where the server is."""
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
