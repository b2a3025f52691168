"""Starts a server, waits until it answers, and ends it; what fails shows the server's log.

The server is held by `leash.py`, so that it ends with this process, however this one ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from tests import workers

START_S = 120.0
END_S = 5.0  # longer than the leash waits before it kills
POLL_S = 0.02
LOG_CHARS = 4_000  # of the end of a log are shown
LEASH = str(Path(__file__).with_name("leash.py"))
HOST = "127.0.0.1"
# Below the ports that the kernel gives to connections of clients: such a connection would block a
# server that restarts, or connect to itself while there is none. Each process has them in another
# order, and uses each once: clients of its last user may still call there. Processes that run tests
# side by side have no ports in common.
_PORTS = range(20_000, 30_000)[workers.number() :: workers.count()]
PORTS = SystemRandom().sample(_PORTS, len(_PORTS))


class ServerFailed(AssertionError):
    """A server could not be started."""


@dataclass(frozen=True, slots=True)
class Program:
    """The command that starts a server, and the signal that ends it."""

    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)  # beside the environment of the tests
    user: str | None = None  # None: the one who runs the tests
    ending: signal.Signals = signal.SIGTERM


@contextmanager
def running(program: Program, log: Path, answers: Callable[[], bool]) -> Iterator[None]:
    """The server runs, and has answered; it writes to `log`."""
    argv = [str(int(program.ending)), program.user or "-", *program.argv]
    with log.open("ab") as output:
        leash = subprocess.Popen(
            [sys.executable, "-I", "-S", LEASH, *argv],
            env=os.environ | dict(program.env),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _wait(leash, program, log, answers)
        yield
    finally:
        _end(leash)


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for the data and the log of a server, which goes with it."""
    with tempfile.TemporaryDirectory(prefix="shalekv-server-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def free_port() -> int:
    """Return a free loopback port; for servers that can't choose one."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = PORTS.pop()
        with socket.socket() as probe, suppress(OSError):  # it is taken
            probe.bind((HOST, port))
            found.append(port)
    return found


def answers_http(url: str) -> Callable[[], bool]:
    """Return whether a GET of `url` gets any HTTP reply but one that means: not yet."""

    def answers() -> bool:
        try:
            with urlopen(url, timeout=5):  # noqa: S310 - the URL is http://127.0.0.1
                return True
        except HTTPError as error:
            error.close()
            return error.code != 503
        except (URLError, OSError):
            return False

    return answers


def _wait(
    leash: subprocess.Popen[bytes], program: Program, log: Path, answers: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + START_S
    while not answers():
        late = time.monotonic() > deadline
        with suppress(subprocess.TimeoutExpired):
            leash.wait(POLL_S)
        if late or leash.returncode is not None:
            what = f"was silent for {START_S} s" if late else f"ended with {leash.returncode}"
            said = log.read_text(errors="replace")[-LOG_CHARS:]
            raise ServerFailed(f"it {what}\n$ {' '.join(program.argv)}\n--- log ---\n{said}")


def _end(leash: subprocess.Popen[bytes]) -> None:
    if leash.stdin is not None:
        leash.stdin.close()
    try:
        leash.wait(END_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(leash.pid, signal.SIGKILL)
        leash.wait()
