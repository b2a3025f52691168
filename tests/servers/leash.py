"""Runs a program that ends when the standard input of this one does: `leash.py SIGNAL USER ARGV`.

A test holds the other end of that pipe, and the kernel closes it however the test ends, kill -9
included. The program then gets SIGNAL, and SIGKILL if it does not end. USER is `-` for the same
one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

GRACE_S = 2.0


def main() -> int:
    number, user, *argv = sys.argv[1:]
    if user == "-":
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    else:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, user=user, extra_groups=[])
    threading.Thread(target=_end_with_input, args=(child, int(number)), daemon=True).start()
    return child.wait()


def _end_with_input(child: subprocess.Popen[bytes], number: int) -> None:
    with open(0, "rb", buffering=0, closefd=False) as pipe:
        while pipe.read(1024):
            pass
    child.send_signal(number)
    with suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)
        return
    os.killpg(0, signal.SIGKILL)  # this process as well: the group is that of the leash


if __name__ == "__main__":
    sys.exit(main())
