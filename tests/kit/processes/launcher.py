"""Starts `shalekv` processes by forking one that has imported all of it already.

Importing takes ten times as long as forking, and tests start hundreds of processes. Each process
is as real as one that a shell starts: it has a pid, a session, arguments, an environment, and
files of its own, can be killed and stopped, and ends with an exit code. It differs in what
`ps` shows (the launcher's arguments) and in the seed of its hashes.

    test process                       launcher                      process
    Launcher.start() --- request --->  fork ------------------------> main()
      fds of stdin, stdout, stderr,
      and of a pipe for the end        waitpid <--------------------- exit
    Launched.wait() <--- status ----
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tests.kit.constants import set_constants_as_given
from tests.kit.processes.uplink import use_uplink_as_given

_LENGTH = struct.Struct(">I")
_STATUS = struct.Struct(">i")
_FDS = 4  # stdin, stdout, stderr, and the pipe that reports how the process ended
_COMMANDS = ("serve", "reader", "safekeeper", "compactor", "collector", "get", "load")
_ROOT = Path(__file__).parents[3]


class Launched:
    """A process that the launcher has started: what `subprocess.Popen` is for one of our own."""

    def __init__(self, pid: int, status: int, stdin: int, stdout: int, stderr: int) -> None:
        """Ends of pipes: `status` to read its exit code from, `stdin` -1 if there is none."""
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = None if stdin < 0 else os.fdopen(stdin, "wb")
        self.stdout = os.fdopen(stdout, "rb")
        self.stderr = os.fdopen(stderr, "rb")
        self._status = status

    def poll(self) -> int | None:
        """Its exit code, or the negative signal that ended it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            ending = select.poll()  # unlike `select` it takes any number of open files
            ending.register(self._status, select.POLLIN)
            if not ending.poll(None if timeout is None else timeout * 1_000):
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0)
            code = os.read(self._status, _STATUS.size)
            if self.returncode is None:  # another thread may have read it
                if len(code) < _STATUS.size:
                    raise AssertionError("the launcher has ended")
                self.returncode = _STATUS.unpack(code)[0]
                os.close(self._status)
        return self.returncode


class Launcher:
    """The process that forks, as long as the tests of this process run."""

    def __init__(self) -> None:
        """Start it, and wait until it has imported everything."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.kit.processes.launcher", str(theirs.fileno())],
                cwd=_ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = ours
        self._lock = threading.Lock()
        assert _received(ours, 1) == b"R", "the launcher did not start"
        atexit.register(self._close)

    def start(self, argv: Sequence[str], env: Mapping[str, str], *, feeds: bool) -> Launched:
        """Start `shalekv` with these arguments; its standard input is empty unless it `feeds`."""
        stdin, stdin_end = os.pipe() if feeds else (os.open(os.devnull, os.O_RDONLY), -1)
        stdout_end, stdout = os.pipe()
        stderr_end, stderr = os.pipe()
        status_end, status = os.pipe()
        fds = [stdin, stdout, stderr, status]
        request = json.dumps([list(argv), dict(env), str(Path.cwd())]).encode()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        with self._lock:
            self._socket.sendmsg([_LENGTH.pack(len(request))], ancillary)
            self._socket.sendall(request)
            pid = _STATUS.unpack(_received(self._socket, _STATUS.size))[0]
        for fd in fds:
            os.close(fd)
        return Launched(pid, status_end, stdin_end, stdout_end, stderr_end)

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def launcher() -> Launcher:
    return Launcher()


def _received(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            raise EOFError("the other end is closed")
        data += part
    return data


# --- in the launcher ---------------------------------------------------------------------------


def _serve(requests: socket.socket) -> None:
    from shalekv.cli.main import COMMANDS, shalekv  # noqa: PLC0415 - only the launcher needs it

    for command in _COMMANDS:
        importlib.import_module(COMMANDS[command][0].partition(":")[0])
    assert shalekv is not None
    status_of: dict[int, int] = {}  # pipe that reports the end of a process, by its pid
    wake_end, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requests.sendall(b"R")
    while True:
        ready = select.select([requests.fileno(), wake_end], [], [])[0]
        if wake_end in ready:
            os.read(wake_end, 4096)
            _tell_ends(status_of)
        if requests.fileno() in ready:
            header, fds, _, _ = socket.recv_fds(requests, _LENGTH.size, _FDS)
            if not header:
                return
            request = json.loads(_received(requests, _LENGTH.unpack(header)[0]))
            pid = os.fork()
            if pid == 0:
                _become(request, fds, [wake, wake_end, *status_of.values()], requests)
            status_of[pid] = fds[-1]
            for fd in fds[:-1]:
                os.close(fd)


def _tell_ends(status_of: dict[int, int]) -> None:
    while status_of:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        end = status_of.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(end, _STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(end)


def _become(
    request: list[object], fds: Sequence[int], not_its: Sequence[int], requests: socket.socket
) -> NoReturn:
    """Be the process that was asked for, in the child of a fork."""
    from shalekv.cli.main import main  # noqa: PLC0415 - as above

    argv, env, folder = request
    assert isinstance(argv, list)
    assert isinstance(env, dict)
    code: object = 70
    try:
        os.setsid()
        # Not told by the launcher: before it had its session, a signal to that would be lost.
        requests.sendall(_STATUS.pack(os.getpid()))
        requests.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        for fd in {*fds, *not_its} - {0, 1, 2}:
            os.close(fd)
        os.environ.clear()
        os.environ.update(env)
        time.tzset()
        os.chdir(str(folder))
        sys.argv = argv
        set_constants_as_given(os.environ)
        use_uplink_as_given(os.environ)
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - the interpreter would print it and end, too
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
