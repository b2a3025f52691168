"""The wheels on the Pythons of this machine that `make test` does not use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = (ROOT, ROOT / "clients" / "python")
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
# All modules alone, and a server, commands and clients as processes.
TESTED = ("tests/unit", "tests/e2e/test_server_surface.py")
WORKERS = ("-n", "2", "--dist", "loadfile")


def python_of(version: str) -> Path | None:
    """The program of a version; a name on the path may be a shim that runs nothing."""
    name = f"python{version}"
    on_path = shutil.which(name)
    named = [Path(on_path)] if on_path else []
    for program in (*named, *sorted(PYENV.glob(f"{version}.*/bin/{name}"))):
        done = subprocess.run([program, "-c", ""], check=False, capture_output=True)
        if done.returncode == 0:
            return program
    return None


def run(*argv: str | Path) -> None:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}\n{done.stdout[-20_000:]}{done.stderr[-5_000:]}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_another_python_runs_the_wheels(version: str, tmp_path: Path) -> None:
    """With a newer Python, the wheels pass the unit tests, a server and clients of them talk."""
    program = python_of(version)
    if program is None:
        pytest.skip(f"this machine has no Python {version}: neither on the path nor in pyenv")
    build = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    run(*build, "--wheel-dir", tmp_path, *PROJECTS)
    run(program, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    lock = ROOT / "requirements" / "dev.lock"
    uv = (Path(sys.executable).with_name("uv"), "pip", "install", "--python", python, "--no-deps")
    run(*uv, "--require-hashes", "--requirement", lock)
    run(*uv, "--no-index", *tmp_path.glob("*.whl"))
    cache = f"cache_dir={tmp_path / 'cache'}"
    run(python, "-m", "pytest", "-q", "-o", cache, *WORKERS, *TESTED)
