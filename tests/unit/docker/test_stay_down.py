"""docker/stay_down.py around a stand-in for `shalekv`: exit codes and signals. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shalekv.cli.console.exit_codes import ExitCode

SCRIPT = Path(__file__).parents[3] / "docker" / "stay_down.py"
WAIT_S = 120
ENDS = "raise SystemExit({code})"
SERVES = """
import signal, sys
def stop(*_):
    print("stopping", flush=True)
    sys.exit(0)
signal.signal(signal.{name}, stop)
print("serving", sys.argv[1:], flush=True)
signal.pause()
"""
IS_KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@contextmanager
def started(folder: Path, program: str) -> Iterator[subprocess.Popen[str]]:
    """The script, with `program` as what `shalekv` is on its PATH."""
    stand_in = folder / "shalekv"
    stand_in.write_text(f"#!{sys.executable}\n{program}")
    stand_in.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "serve", "--insecure"],
        env=os.environ | {"PATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        with process:
            yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("code", ExitCode)
def test_the_exit_code_is_that_of_shalekv(tmp_path: Path, code: ExitCode) -> None:
    """Docker starts the container again unless it is 0, as it is after a fence; the log says why,
    and nothing else is added to it.
    """
    with started(tmp_path, ENDS.format(code=code.value)) as process:
        _, log = process.communicate(timeout=WAIT_S)
    if code is ExitCode.FENCED:
        assert process.returncode == 0
        reported = "this container stays down: another writer, or compactor, has taken over"
        assert log.startswith(reported)
    else:
        assert (process.returncode, log) == (code, "")


def test_what_was_killed_is_started_again(tmp_path: Path) -> None:
    """By the exit code that a shell would give it, as when memory ran out."""
    with started(tmp_path, IS_KILLED) as process:
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_shalekv(tmp_path: Path, number: signal.Signals) -> None:
    """Docker sends it to the first process of a container alone, which hands it on."""
    with started(tmp_path, SERVES.format(name=number.name)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving ['serve', '--insecure']\n"
        process.send_signal(number)
        reported, _ = process.communicate(timeout=WAIT_S)
    assert (process.returncode, reported) == (0, "stopping\n")
