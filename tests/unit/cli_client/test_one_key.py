"""`shalekv get`, `put` and `delete`: what they send, print, and how they end."""

from __future__ import annotations

import asyncio
import signal
import sys

import grpc
import pytest

from shalekv.cli.delete import delete
from shalekv.cli.get import get
from shalekv.cli.put import put
from shalekv.errors import Fenced, QueueFull
from shalekv_client import Durability, ReadLevel
from tests.kit.serving.dict_server import DictServer, Failure, bare, refusing, silent
from tests.unit.cli_client.conftest import Run

UNAVAILABLE, UNIMPLEMENTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED


async def test_levels_are_sent(run: Run, server: DictServer) -> None:
    """--durability and --read-level reach the server."""
    await run(put, "k", "v", "--durability", "memory")
    await run(delete, "k", "--durability", "archived")
    await run(get, "k", "--read-level", "linearizable")
    first, second, third = server.state.requests
    assert Durability(first.durability) is Durability.MEMORY
    assert Durability(second.durability) is Durability.ARCHIVED
    assert ReadLevel(third.header.read_level) is ReadLevel.LINEARIZABLE


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        (refusing(Fenced("another took over", own_epoch=1, newer_epoch=2)), 4, "another took over"),
        (bare(UNIMPLEMENTED, "nobody knows Put"), 2, "nobody knows Put"),
        (refusing(QueueFull("full", retry_after_ms=60_000)), 10, "Nothing was changed"),
        (bare(UNAVAILABLE, "gone"), 11, "is not known"),
    ],
    ids=["fenced", "absent", "full", "unknown"],
)
async def test_failures_tell_what_is_certain(
    run: Run, server: DictServer, how: Failure, code: int, words: str
) -> None:
    """The exit code and the last line say whether the write may have been applied."""
    server.state.failures.extend([how] * 10)
    result = await run(put, "k", "v")
    assert result.exit_code == code
    assert words in result.stderr
    assert result.stdout == ""


async def test_timeouts_are_kept(run: Run, server: DictServer) -> None:
    """--timeout-ms ends the wait for a server that does not answer."""
    server.state.failures.append(silent())
    result = await run(get, "k", "--timeout-ms", "50")
    assert result.exit_code == 11


async def test_interrupts_have_an_exit_code(server: DictServer) -> None:
    """Ctrl-C ends a command that waits for an answer, with code 130 and without a traceback."""
    server.state.failures.append(silent())
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shalekv.cli.main", "get", "k", "--addr", server.address),
        stderr=asyncio.subprocess.PIPE,
    )
    await server.state.begun.wait()
    command.send_signal(signal.SIGINT)
    _, said = await command.communicate()
    assert (command.returncode, said) == (130, b"Interrupted.\n")
