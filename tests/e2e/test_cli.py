"""The commands for users, as real processes against a real server."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

from shalekv_client import Client
from tests.e2e.cli import output
from tests.kit.processes.child import EXIT_S
from tests.kit.processes.processes import SHALEKV, Processes


async def test_a_load_can_be_interrupted_while_it_waits(
    processes: Processes, tmp_path: Path
) -> None:
    """Ctrl-C ends a load that waits for input, at once; it reports what is stored, or unknown."""
    server = await processes.serve(f"file://{tmp_path}/db")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    load = processes.start("load", str(pipe), env={"SHALEKV_ADDR": server.listen})
    os.write(writer, b"".join(b"k%d\tv\n" % number for number in range(1_500)))
    async with Client(server.listen) as client:
        while not (await client.status()).view.seq:
            pass
        load.send(signal.SIGINT)
        assert await load.exited() == 130, load.report()
        certain = "Lines 1 to 1,000 are stored"
        unknown = "Possibly nothing was stored; for 1,000 rows it is not known"
        assert load.stderr() in {
            f"Interrupted. {said}. Loading again is safe.\n" for said in (certain, unknown)
        }
        assert [len([entry async for entry in client.scan()])] == [1_000]
    os.close(writer)


async def test_a_reader_that_stops_ends_a_scan(processes: Processes, tmp_path: Path) -> None:
    """`| head` ends the command without an error and without a word."""
    server = await processes.serve(f"file://{tmp_path}/db")
    rows = b"".join(b"%d\t%s\n" % (number, b"x" * 100) for number in range(5_000))
    await output(processes, server, "load", stdin=rows)
    for output_format in ("raw", "json", "table"):
        scan = f"{shlex.quote(SHALEKV)} scan --addr {server.listen} --format {output_format}"
        script = f"set -o pipefail; {scan} | head -n 1"
        shell = await processes.run("-c", script, program="/bin/bash")
        assert (await shell.exited(), shell.stderr()) == (0, ""), shell.report()
        assert len(shell.stdout().splitlines()) == 1


async def test_a_terminal_gets_a_table_that_fits(processes: Processes, tmp_path: Path) -> None:
    """On a terminal the default is a table; no line is wider than it."""
    server = await processes.serve(f"file://{tmp_path}/db")
    await output(processes, server, "put", "k", "v" * 200)
    near, far = os.openpty()
    env = os.environ | {"COLUMNS": "40"}
    argv = [SHALEKV, "scan", "--addr", server.listen]
    await asyncio.to_thread(subprocess.run, argv, stdout=far, env=env, check=True, timeout=EXIT_S)
    os.close(far)
    with os.fdopen(near, "rb") as terminal:
        heading, row = (terminal.readline().decode().rstrip("\r\n") for _ in range(2))
    assert re.findall(r"\w+", re.sub(r"\x1b\[\d*m", "", heading)) == ["key", "value", "seq"]
    assert len(row) <= 40
    assert "\N{HORIZONTAL ELLIPSIS}" in row
