"""Failing standard output, the bar that counts rows, and shell completion."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.console.output import RowsWritten, rows_progress
from shalekv.cli.console.progress import rows_bar
from shalekv.cli.main import COMMANDS


@pytest.mark.parametrize("count", [1, 1_000_000])
def test_output_that_fails_ends_with_its_exit_code(tmp_path: Path, count: int) -> None:
    """Failing output is reported in one line, for a write and for the final flush."""
    script = (
        "from shalekv.cli.console.output import print_line, printing\n"
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


def test_the_bar_shows_rows_bytes_and_rates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar counts rows and bytes; `rows_progress` shows it only on a terminal, for files."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    reported = RowsWritten(rows=1_234, bytes=5 << 20)
    with rows_bar(reported):
        pass
    drawn = capsys.readouterr().err
    assert "1,234 rows, 5.0 MiB, " in drawn
    assert "rows/s" in drawn
    with rows_progress(reported, to_file=True):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with rows_progress(reported, to_file=True):
        pass
    assert "1,234 rows" in capsys.readouterr().err


ONLY_FOR_COMMANDS = ("grpc", "pydantic", "shalekv_client")


def asked(words: str, number: int) -> list[str]:
    """The completions in bash for word `number` of `words`, and the imported modules."""
    script = (
        "import sys\nfrom shalekv.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    )
    typed = {"COMP_WORDS": words, "COMP_CWORD": str(number)}
    run = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"_SHALEKV_COMPLETE": "bash_complete"} | typed,
    )
    offered = [line.partition(",")[2] for line in run.stdout.splitlines()]
    return [*offered, *(m for m in run.stderr.split() if m in ONLY_FOR_COMMANDS)]


def test_commands_are_completed_without_importing_them() -> None:
    """All commands with the typed prefix are offered, without importing them."""
    assert asked("shalekv ", 1) == list(COMMANDS)
    assert asked("shalekv sc", 1) == ["scan"]
    assert asked("shalekv --ver", 1) == ["--version"]
