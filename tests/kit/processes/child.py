"""A process that a test started: its log lines, and the ways to end it.

Every wait has a deadline, and its failure shows the output of the child. Waiting happens in
threads, so that the event loop of the test runs on and tests without a loop can use `Child` as
well.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from shalekv.cli.console.exit_codes import ExitCode
from tests.kit.processes.launcher import Launched, launcher

READY_S = 120.0
EXIT_S = 120.0

Line = dict[str, Any]


class ChildFailed(AssertionError):
    """A child ended, or was silent, where the test needed something else of it."""


class Child:
    """One process, what it wrote, and the ways to end it."""

    def __init__(self, argv: list[str], *, env: Mapping[str, str], stdin: bytes | None) -> None:
        """Start `argv`; `stdin` is written whole and closed.

        `shalekv` is forked from a process that has imported it (`tests.kit.processes.launcher`);
        `python -m shalekv.cli.main` is started as a shell does it.
        """
        self.argv = argv
        self._process: subprocess.Popen[bytes] | Launched
        if Path(argv[0]).name == "shalekv":
            self._process = launcher().start(argv, env, feeds=stdin is not None)
        else:
            self._process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._changed = threading.Condition()
        self._stdout: list[bytes] = []
        self._stderr: list[bytes] = []
        self._readers = [
            self._in_thread(self._read, self._process.stdout, self._stdout),
            self._in_thread(self._read, self._process.stderr, self._stderr),
        ]
        if stdin is not None:
            self._in_thread(self._feed, stdin)
        self._listen: str | None = None

    @property
    def pid(self) -> int:
        """Its process id, which is that of its session as well."""
        return self._process.pid

    @property
    def listen(self) -> str:
        """HOST:PORT on which it serves; known once it was ready."""
        if self._listen is None:
            raise ChildFailed(f"not known to listen\n{self.report()}")
        return self._listen

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stdout(self) -> str:
        with self._changed:
            return b"".join(self._stdout).decode(errors="replace")

    def stderr(self) -> str:
        with self._changed:
            return b"".join(self._stderr).decode(errors="replace")

    def lines(self) -> list[Line]:
        """Log lines up to now; a line that is not JSON has the key ``text`` alone."""
        return [_parsed(line) for line in self.stderr().splitlines()]

    def report(self) -> str:
        return (
            f"$ {' '.join(self.argv)}\n(pid {self.pid}, exit code {self._process.poll()})\n"
            f"--- stdout ---\n{self.stdout()}\n--- stderr ---\n{self.stderr()}"
        )

    def send(self, number: int) -> None:
        """Send a signal to it and to its children; nothing when it has ended."""
        if self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def pause(self) -> None:
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def wait_for_line(self, accept: Callable[[Line], bool], *, within_s: float = READY_S) -> Line:
        """The first log line that is accepted; blocks the thread."""
        deadline = time.monotonic() + within_s
        seen = 0
        while True:
            ended = not any(reader.is_alive() for reader in self._readers)
            lines = self.lines()
            for line in lines[seen:]:
                if accept(line):
                    return line
            # The last line may have been read in part: read it again.
            seen = max(0, len(lines) - 1)
            left_s = deadline - time.monotonic()
            if ended or left_s <= 0:
                what = "ended" if ended else f"was silent for {within_s} s"
                raise ChildFailed(f"it {what} without the line\n{self.report()}")
            with self._changed:
                self._changed.wait(min(left_s, 0.1))

    def wait_until_ready(self, *, within_s: float = READY_S) -> str:
        """HOST:PORT, from the log line that has ``listen``; blocks the thread."""
        line = self.wait_for_line(lambda line: "listen" in line, within_s=within_s)
        self._listen = str(line["listen"])
        return self._listen

    def wait_for_exit(self, *, within_s: float = EXIT_S) -> int:
        """Its exit code, once all it wrote was read; blocks the thread."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"it did not end within {within_s} s\n{self.report()}") from None
        for reader in self._readers:
            reader.join(within_s)
        return code

    async def line(self, accept: Callable[[Line], bool], *, within_s: float = READY_S) -> Line:
        return await asyncio.to_thread(self.wait_for_line, accept, within_s=within_s)

    async def ready(self, *, within_s: float = READY_S) -> str:
        """HOST:PORT on which it serves, as soon as it does."""
        return await asyncio.to_thread(self.wait_until_ready, within_s=within_s)

    async def exited(self, *, within_s: float = EXIT_S) -> int:
        """Its exit code; that of a process ended by a signal is the negative signal."""
        return await asyncio.to_thread(self.wait_for_exit, within_s=within_s)

    async def stop(self, *, within_s: float = EXIT_S) -> int:
        self.send(signal.SIGTERM)
        return await self.exited(within_s=within_s)

    async def kill(self) -> int:
        """End it on the spot (SIGKILL), as a crash does; its exit code."""
        self.send(signal.SIGKILL)
        return await self.exited()

    def close(self) -> None:
        """End it and its children, whatever they do; block the thread for a moment."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # its children outlive it in its session
        self.wait_for_exit()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _in_thread(self, function: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=function, args=args, daemon=True)
        thread.start()
        return thread

    def _read(self, pipe: IO[bytes], into: list[bytes]) -> None:
        with pipe:  # a test may start thousands of processes
            for line in pipe:
                with self._changed:
                    into.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _feed(self, data: bytes) -> None:
        pipe = self._process.stdin
        if pipe is not None:
            with suppress(BrokenPipeError), pipe:
                pipe.write(data)


def _parsed(text: str) -> Line:
    try:
        value = json.loads(text)
    except ValueError:
        return {"text": text}
    return value if isinstance(value, dict) else {"text": text}


def event(name: str) -> Callable[[Line], bool]:
    return lambda line: line.get("event") == name


is_epoch_won = event("epoch won")


def epoch_of(writer: Child) -> int:
    """The epoch that a writer has won first; 0 when it was ended before."""
    won = [int(line["epoch"]) for line in writer.lines() if is_epoch_won(line)]
    return won[0] if won else 0


async def fenced_end(writer: Child) -> Line:
    """The last log line of a writer that must end, and end as fenced."""
    assert await writer.exited() == ExitCode.FENCED, writer.report()
    last = writer.lines()[-1]
    assert last["event"] == "ended by an error", writer.report()
    assert (last["reason"], last["exit_code"]) == ("FENCED", ExitCode.FENCED)
    assert "Another writer has taken over the database" in last["problem"]
    return last
