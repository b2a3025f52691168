"""What happens when standard output cannot be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shalekv.cli.exit_codes import ExitCode


@pytest.mark.parametrize("count", [1, 1_000_000])
def test_output_that_fails_ends_with_its_exit_code(tmp_path: Path, count: int) -> None:
    """It is told in one line, whether a write fails or the flush after all of them."""
    script = (
        "from shalekv.cli.output import print_line, printing\n"
        f"with printing():\n    print_line('x' * {count})"
    )
    file = tmp_path / "output"
    file.touch()
    with file.open("rb") as only_to_be_read:
        run = subprocess.run(
            [sys.executable, "-c", script],
            check=False,
            stdout=only_to_be_read,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert run.returncode == ExitCode.OUTPUT
    why = os.strerror(errno.EBADF)
    assert run.stderr.splitlines() == [f"Error: standard output cannot be written: {why}"]
