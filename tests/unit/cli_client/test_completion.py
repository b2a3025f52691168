"""Shell completion: the scripts, and what they are told when a shell asks."""

from __future__ import annotations

import os
import subprocess
import sys

from shalekv.cli.main import COMMANDS

ONLY_FOR_COMMANDS = ("grpc", "pydantic", "shalekv_client")


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
