"""The pipe from a parent process on standard input, with real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# Prints what it hears, and ends when it is asked to stop.
CHILD = """
import asyncio, sys, uvloop
from shalekv.cli.process.shutdown import parent_pipe
from shalekv.cli.process.shutdown import Shutdown

async def child():
    ending, hurry = Shutdown(), asyncio.Event()
    async with parent_pipe(ending, hurry), asyncio.TaskGroup() as tasks:
        print("ready", flush=True)
        listening = tasks.create_task(listen(hurry))
        await ending.requested.wait()
        listening.cancel()
    print("stopped", flush=True)

async def listen(hurry):
    while True:
        await hurry.wait()
        hurry.clear()
        print("hurry", flush=True)

(uvloop.run if sys.argv[1] == "uvloop" else asyncio.run)(child())
"""
# Starts CHILD, and waits for ever.
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


@contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that is killed at the end of the context."""
    with subprocess.Popen(
        [sys.executable, "-c", *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    """The next line of output; empty once all holders of the output have closed it."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


@LOOPS
def test_the_end_of_the_pipe_asks_to_stop(loop: str) -> None:
    """A child ends in order when its parent closes the pipe."""
    with started(CHILD, loop) as child:
        assert next_line(child) == "ready"
        assert child.stdin is not None
        child.stdin.close()
        assert next_line(child) == "stopped"
        assert child.wait() == 0


@LOOPS
def test_hurry_is_heard_each_time(loop: str) -> None:
    """`hurry` is recognized in pieces, and between lines unknown to this version."""
    with started(CHILD, loop) as child:
        assert next_line(child) == "ready"
        say(child, "hurry\n")
        assert next_line(child) == "hurry"
        say(child, "something newer\nhur")
        say(child, "ry\n")
        assert next_line(child) == "hurry"


def test_standard_input_must_be_a_pipe() -> None:
    """Standard input that cannot report the end of the parent is refused."""
    refused = subprocess.run(
        [sys.executable, "-c", CHILD, "asyncio"],
        stdin=subprocess.DEVNULL,
        check=False,
        capture_output=True,
        text=True,
    )
    assert refused.returncode != 0
    assert "standard input is no pipe" in refused.stderr
