"""The distributions of this working copy, and environments in which they are installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
PROJECTS = {"shalekv": ROOT, "shalekv-client": ROOT / "clients" / "python"}


def build(project: Path, folder: Path, target: str) -> None:
    """Build the wheel or the sdist of a project into a folder."""
    words = ["build", "--directory", str(folder), "--target", target]
    argv = [sys.executable, "-m", "hatchling", *words]
    subprocess.run(argv, cwd=project, check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder of packages, which Python sees beside its own library, and nothing else."""

    folder: Path

    def run(self, program: str, *words: str) -> str:
        """Return what a program of Python prints that is started with these words."""
        path = f"import sys; sys.path.append({str(self.folder)!r})\n"
        argv = [sys.executable, "-I", "-S", "-c", path + program, *words]
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of both distributions."""
    folder = tmp_path_factory.mktemp("wheels")
    for project in PROJECTS.values():
        build(project, folder, "wheel")
    return folder


def install(wheels: Path, folder: Path, name: str, *extras: str) -> Environment:
    """Unpack the wheels into a folder, beside links to all installed packages that `name` needs."""
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(folder)
    path = [str(folder), *sys.path]
    todo, done = {(name, extra) for extra in ("", *extras)}, set[tuple[str, str]]()
    while todo - done:
        done.add(each := (todo - done).pop())
        found = next(iter(metadata.Distribution.discover(name=each[0], path=path)))
        todo.update(_required(found, each[1]))
        for entry in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = folder / entry
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(entry))))
    return Environment(folder)


def _required(found: metadata.Distribution, extra: str) -> Iterator[tuple[str, str]]:
    """The distributions that one requires with an extra of it, each with their extras."""
    for needed in map(Requirement, found.requires or ()):
        if needed.marker is None or needed.marker.evaluate({"extra": extra}):
            yield from ((needed.name, each) for each in ("", *needed.extras))
