"""What the wheels say and hold, and that each source distribution builds its wheel."""

from __future__ import annotations

import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.unit.distributions.conftest import PROJECTS, build

ROOTS = {
    "shalekv": {"shalekv", "shalekv_spark"},
    "shalekv-client": {"shalekv", "shalekv_client", "shalekv_wire"},
}
LINKS = ["Homepage", "Documentation", "Source", "Issues", "Changelog"]
each_distribution = pytest.mark.parametrize("name", PROJECTS)


def wheel_of(name: str, folder: Path) -> zipfile.ZipFile:
    [path] = folder.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    return zipfile.ZipFile(path)


def code_in(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    [name] = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


@each_distribution
def test_a_wheel_describes_itself(wheels: Path, name: str) -> None:
    """A wheel has its page, its licence, links, and the Pythons that the tests run with."""
    wheel = wheel_of(name, wheels)
    found = metadata_of(wheel)
    folder = PROJECTS[name]
    assert (found["Name"], found["License-Expression"]) == (name, "Apache-2.0")
    assert any(file.endswith(".dist-info/licenses/LICENSE") for file in wheel.namelist())
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (folder / "README.md").read_text()
    assert [link.split(",")[0] for link in found.get_all("Project-URL", [])] == LINKS
    classifiers = found.get_all("Classifier", [])
    assert {f"Programming Language :: Python :: 3.{n}" for n in (11, 12, 13)} <= {*classifiers}
    assert "Typing :: Typed" in classifiers


@each_distribution
def test_a_wheel_has_its_own_packages_alone(wheels: Path, name: str) -> None:
    """The client has no module of a server, the server none of the client, and both are typed."""
    code = code_in(wheel_of(name, wheels))
    assert {file.split("/")[0] for file in code} == ROOTS[name]
    generated = {file for file in code if file.startswith("shalekv/v1/")}
    shared = {file for file in code if file.startswith("shalekv/")}
    assert (generated == shared) if name == "shalekv-client" else not generated
    assert "shalekv/__init__.py" not in code
    typed = {"shalekv/v1" if name == "shalekv-client" else "shalekv", *ROOTS[name] - {"shalekv"}}
    assert {file.removesuffix("/py.typed") for file in code if file.endswith("py.typed")} == typed


@pytest.mark.parametrize(
    "name", [pytest.param("shalekv", marks=pytest.mark.soak), "shalekv-client"]
)
def test_a_source_distribution_builds_its_wheel(wheels: Path, name: str, tmp_path: Path) -> None:
    """The wheel of the unpacked source distribution is that of the working copy."""
    build(PROJECTS[name], tmp_path, "sdist")
    [packed] = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as files:
        files.extractall(tmp_path, filter="data")
    build(packed.with_name(packed.name.removesuffix(".tar.gz")), tmp_path, "wheel")
    again, first = wheel_of(name, tmp_path), wheel_of(name, wheels)
    assert {file: again.read(file) for file in again.namelist()} == {
        file: first.read(file) for file in first.namelist()
    }
