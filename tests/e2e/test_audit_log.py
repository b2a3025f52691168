"""The audit log of real processes: one file for all of them, rotated while they serve.

Secrets are not in it, and nowhere else that others can read.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shalekv.server.access.audit import REFUSALS_SHOWN
from shalekv_client import Client, RetryPolicy, ShaleKVError
from tests.kit.processes.child import Child, event
from tests.kit.processes.child_processes import started
from tests.kit.processes.processes import Processes

ROTATIONS = 2
CALLS = 60  # of each kind, before a rotation and during it
AT_ONCE = 20
TOKEN_VARIABLE = "SHALEKV_TOKEN"
FORGED = "shalekv_forged_token_of_nobody"
VALUE = "a value that nobody else may see"
STRANGERS = 3 * REFUSALS_SHOWN
CHANGES = 3
SET = "Admin.SetAccessPolicy"


def lines_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def opened_again(process: Child) -> int:
    return sum(map(event("audit log opened again"), process.lines()))


async def call_on(writer: Client, reader: Client, first: int) -> None:
    """Put and get keys, each of which is used once."""
    for start in range(first, first + CALLS, AT_ONCE):
        numbers = range(start, start + AT_ONCE)
        puts = (writer.put(b"put %d" % number, VALUE.encode()) for number in numbers)
        gets = (reader.get(b"get %d" % number) for number in numbers)
        await asyncio.gather(*puts, *gets)


async def rotate(path: Path, to: Path, writer: Child, reader: Child) -> None:
    """Rotate the file as `logrotate` does; returns when all three processes have noticed."""
    before = opened_again(writer), opened_again(reader)
    os.rename(path, to)  # noqa: PTH104 (a moment)
    for process in (writer, reader):
        os.kill(process.pid, signal.SIGHUP)
    await writer.line(lambda _: opened_again(writer) > before[0])
    await reader.line(lambda _: opened_again(reader) >= before[1] + 2)


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, and those in turn."""
    parents = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(each.parent.name)] = int(each.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found


def read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")


async def be_refused(address: str) -> None:
    async with Client(address, access_token=FORGED, insecure_token=True) as stranger:
        with pytest.raises(ShaleKVError) as refused:
            await stranger.get(b"key")
    assert FORGED not in f"{refused.value} {refused.value!r}"


async def check_processes(token: str, *servers: Child, count: int) -> None:
    found = [[*descendants(server.pid)] for server in servers]
    assert sum(map(len, found)) == count
    for pid in (pid for pids in found for pid in pids):
        assert token not in read(pid, "cmdline")
    for pid in (pid for _, *children in found for pid in children):
        assert token not in read(pid, "environ")


async def test_a_shared_log_has_all_lines_and_no_secrets(
    processes: Processes, tmp_path: Path
) -> None:
    """Each operation has one whole line, in the old file or in the new one, of three processes.

    Tokens and values are not in it, nor in logs, errors, `--help` and what `ps` shows of any
    process; those that a server starts do not get its token.
    """
    path, tokens = tmp_path / "audit.log", tmp_path / "tokens"
    created = await processes.run("token", "create", "alice", "--file", str(tokens), code=0)
    token = created.stdout().strip()
    flags = f"--tokens-file {tokens} --admins token:alice --log-level debug"
    flags += f" --audit-log {path} --audit-level all --audit-keys plain"
    env = {TOKEN_VARIABLE: token}
    server = await processes.serve(f"file://{tmp_path}/db", *flags.split(), env=env)
    url = f"file://{tmp_path}/db"
    shared = await processes.read(url, "--processes", "2", *flags.split(), env=env)
    told = [await processes.run("serve", "--help", env=env, code=0)]
    for variable, code in ((token, 0), (FORGED, 14)):
        argv = ("put", "--address", server.listen, "from a command", VALUE)
        told.append(await processes.run(*argv, env={TOKEN_VARIABLE: variable}, code=code))
    rotated = [tmp_path / f"audit.log.{number}" for number in range(ROTATIONS)]
    async with (
        Client(server.listen, access_token=token, insecure_token=True) as writer,
        Client(shared.listen, access_token=token, insecure_token=True) as reader,
    ):
        for number, to in enumerate(rotated):
            await call_on(writer, reader, 2 * number * CALLS)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(call_on(writer, reader, (2 * number + 1) * CALLS))
                await rotate(path, to, server, shared)
        sizes = [to.stat().st_size for to in rotated]
        await call_on(writer, reader, 2 * ROTATIONS * CALLS)
    await be_refused(server.listen)
    for role in ("compactor", "collector"):
        await started(server, role)
    await check_processes(token, server, shared, count=6)
    assert await shared.stop() == 0, shared.report()
    assert await server.stop() == 0, server.report()
    assert sizes == [to.stat().st_size for to in rotated]  # nobody writes to them any more
    check_lines([line for each in (*rotated, path) for line in lines_of(each)])
    shown = [each.stdout() + each.stderr() for each in (server, shared, *told)]
    shown += [each.read_text() for each in (*rotated, path, tokens)]
    for secret in (token, FORGED, VALUE, "Bearer"):
        assert not any(secret in text for text in shown), secret


def check_lines(lines: list[dict[str, Any]]) -> None:
    """Each call has one line, and a call with a forged token as well."""
    allowed = [line for line in lines if line["principal"] == "token:alice"]
    keys = Counter(key for line in allowed for key in line.get("keys", ()))
    total = (2 * ROTATIONS + 1) * CALLS
    called = [f"{kind} {n}" for n in range(total) for kind in ("put", "get")]
    assert keys == Counter([*called, "from a command"])
    assert {line["role"] for line in allowed} == {"writer", "reader"}
    assert {line["epoch"] for line in allowed} == {1}
    others = [line for line in lines if line not in allowed]
    assert {line["outcome"] for line in others} == {"unauthenticated"}


async def test_refusals_are_counted_when_a_server_stops(
    processes: Processes, tmp_path: Path
) -> None:
    """A stranger gets a few lines and a count; the lines of an administrator are complete."""
    path, tokens = tmp_path / "audit.log", tmp_path / "tokens"
    created = await processes.run("token", "create", "ann", "--file", str(tokens), code=0)
    flags = ("--tokens-file", str(tokens), "--admins", "token:ann", "--audit-log", str(path))
    server = await processes.serve(f"file://{tmp_path}/db", *flags)
    retry = RetryPolicy(attempts_max=1)
    async with Client(server.listen, retry=retry) as stranger:
        for _ in range(STRANGERS):
            with pytest.raises(ShaleKVError):
                await stranger.get(b"key")
    env = {TOKEN_VARIABLE: created.stdout().strip()}
    for number in range(CHANGES):
        argv = ("role", "set", f"role-{number}", "--allow", "read:prefix=a")
        await processes.run(*argv, "--address", server.listen, env=env, code=0)
    assert await server.stop() == 0, server.report()
    lines = lines_of(path)
    stored = [line for line in lines if line.get("method") == SET]
    assert [line["outcome"] for line in stored] == ["ok"] * CHANGES
    refused = [line for line in lines if not line["principal"]]
    assert len(refused) == REFUSALS_SHOWN + 1
    assert refused[-1]["outcome"] == "left_out"
    assert refused[-1]["count"] == STRANGERS - REFUSALS_SHOWN
