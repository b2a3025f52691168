"""The options and the mark that choose the seeds of simulation tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = "from tests.sim.conftest import *"
TESTS = """
import pytest

def test_default(seed):
    assert seed != 6

@pytest.mark.seeds(3)
def test_few(seed):
    pass
"""


@pytest.mark.parametrize(
    ("options", "passed", "failed"),
    [
        ([], 22, 1),
        (["--sim-seeds", "5"], 10, 0),
        (["--sim-seed", "6"], 1, 1),
        (["--sim-seed", "1234", "-k", "seed1234"], 2, 0),
    ],
)
def test_seeds_are_chosen(tmp_path: Path, options: list[str], passed: int, failed: int) -> None:
    """A test runs once per seed: 20, as many as its mark says, or those of the command line."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_seeds.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, str(tmp_path), *options]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    failures = f"{failed} failed, " if failed else ""
    assert f"{failures}{passed} passed" in done.stdout
