"""Shell completion: the scripts, and what they are told when a shell asks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from shalekv.cli.main import COMMANDS, shalekv

ONLY_FOR_COMMANDS = ("grpc", "pydantic", "shalekv_client")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_ask_this_program(shell: str) -> None:
    """The script of each shell names the program and the variable by which it asks."""
    result = CliRunner().invoke(shalekv, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert "_SHALEKV_COMPLETE" in result.stdout
    assert "shalekv" in result.stdout


def test_other_shells_are_refused() -> None:
    """What there is, is said."""
    result = CliRunner().invoke(shalekv, ["completion", "tcsh"])
    assert result.exit_code == 2
    assert "fish" in result.stderr


def asked(words: str, number: int) -> list[str]:
    """What bash would be told to offer for word `number` of `words`, and what was imported."""
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
    """All that begin with what was typed, at once."""
    assert asked("shalekv ", 1) == list(COMMANDS)
    assert asked("shalekv sc", 1) == ["scan"]
    assert asked("shalekv --ver", 1) == ["--version"]


def test_options_and_choices_are_completed() -> None:
    """Those of the command that was typed."""
    assert "--page-token" in asked("shalekv scan --p", 2)
    assert {"table", "json", "raw"} <= set(asked("shalekv scan --format ", 3))
    assert {"bash", "zsh", "fish"} <= set(asked("shalekv completion ", 2))
