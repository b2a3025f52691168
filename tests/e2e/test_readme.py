"""The commands of README.md, one by one, in a folder of its own.

The blocks that start a server are the first terminal, all other shell blocks the second one; the
outputs in the text must appear. There are few differences from a reader's terminal: the port is a
free one, make does not check whether the environment is up to date, and the bucket is that of a
server on this machine, which the environment names as the section says.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.kit.processes.child import Child
from tests.kit.processes.processes import Processes
from tests.kit.processes.readme import ROOT, SERVE, Terminal, terminals, type_in, with_shalekv
from tests.servers.object_stores import versitygw
from tests.servers.process import free_ports

NOT_COPIED = {"data", ".git"}
MAKE_RUN = "make run\n"
READER = "shalekv reader "
ACTIVATE = ". .venv/bin/activate\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a folder like the repository, without a database."""
    for entry in ROOT.iterdir():
        if entry.name not in NOT_COPIED:
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


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
        assert re.search(r"^writer +write ", typed.stdout(), re.MULTILINE), typed.report()
        assert await server.stop() == 0, server.report()


async def test_security_works_as_it_is_written(processes: Processes, checkout: Path) -> None:
    """Certificates, tokens, a role and a grant, and what clients are allowed by them."""
    before, served = terminals("Security in five minutes", lambda body: body.startswith(SERVE))
    await type_in(processes, checkout, with_shalekv(before), env={})
    _, *flags = served.server.replace("\\\n", "").split()
    flags = [part for part in flags if part not in ("--url", '"file://$PWD/safe"')]
    listen = flags[flags.index("--listen") + 1]
    flags[flags.index("--listen") + 1] = "127.0.0.1:0"
    files = ("tls/server.crt", "tls/server.key", "tokens")
    flags = [f"{checkout}/{part}" if part in files else part for part in flags]
    url = f"file://{checkout}/safe"
    server = processes.start(*flags, "--url", url, "--log-format", "json")
    await server.ready()
    typed = with_shalekv(served)
    here = Terminal(typed.server, typed.commands.replace(listen, server.listen), typed.shown)
    await type_in(processes, checkout, here, env={})
    assert await server.stop() == 0, server.report()


async def test_watching_works_as_it_is_written(processes: Processes, checkout: Path) -> None:
    """A server tells its metrics and its readiness over HTTP."""
    _, watched = terminals("Watch it", lambda body: body.startswith(SERVE))
    _, *flags = watched.server.replace("\\\n", "").split()
    flags = [part for part in flags if part not in ("--url", '"file://$PWD/watched"')]
    at, metrics = flags[flags.index("--listen") + 1], flags[flags.index("--metrics") + 1]
    free, free_metrics = (f"127.0.0.1:{port}" for port in free_ports(2))
    flags = [{at: free, metrics: free_metrics}.get(part, part) for part in flags]
    url = f"file://{checkout}/watched"
    server = processes.start(*flags, "--url", url, "--log-format", "json")
    await server.ready()
    typed = with_shalekv(watched)
    commands = typed.commands.replace(at, free).replace(metrics, free_metrics)
    await type_in(processes, checkout, Terminal(typed.server, commands, typed.shown), env={})
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


@pytest.mark.soak  # it starts seven processes, and other tests start each of them as well
async def test_safekeepers_work_as_it_is_written(processes: Processes, checkout: Path) -> None:
    """Three safekeepers and a server run in the background until they are stopped and removed."""
    (terminal,) = terminals("Commits in milliseconds", lambda _body: False)
    server, *safekeepers = free_ports(4)
    commands = f"port=(0 {' '.join(map(str, safekeepers))})\n" + terminal.commands
    commands = commands.replace(":766$i", ":${port[$i]}").replace(":7660", f":{server}")
    for number, port in enumerate(safekeepers, 7661):
        commands = commands.replace(f":{number}", f":{port}")
    before = names_in(checkout)
    typed = await type_in(
        processes, checkout, with_shalekv(Terminal("", commands, terminal.shown)), env={}
    )
    assert typed.stdout().startswith("SERVING\nseq 1\n"), typed.report()
    assert names_in(checkout) - before == {"commands.sh"}
