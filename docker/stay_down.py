"""Runs `shalekv` with the arguments given, and ends with 0 if it must not be started again.

Docker starts a container again by `restart: on-failure` whatever its exit code says. A writer that
was fenced would take over from its successor, which would take over from it in turn, for ever. So
where `shalekv` ends with the code of a fenced process, this one ends with 0, and says so.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType

SIGNALLED = 128  # as a shell has it: this plus the number of the signal that ended the process


def main() -> int:
    """Run it to its end; the exit code for Docker."""
    running: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if running:
            running[0].send_signal(number)
        else:
            early.append(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    running.append(subprocess.Popen(["shalekv", *sys.argv[1:]]))  # noqa: S603, S607 - ours, by PATH
    for number in early:
        running[0].send_signal(number)
    code = running[0].wait()
    return SIGNALLED - code if code < 0 else _told(code)


def _told(code: int) -> int:
    # Imported here: this process waits for days, and needs nothing of it until then.
    from shalekv.cli.console.exit_codes import MEANING, ExitCode  # noqa: PLC0415

    if code != ExitCode.FENCED:
        return code
    sys.stderr.write(f"this container stays down: {MEANING[ExitCode.FENCED]}\n")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
