"""Documents: their links lead somewhere, and the files that they name exist."""

from __future__ import annotations

import ast
import re
from pathlib import PurePosixPath

import pytest

from tests.style import diagram
from tests.style.sources import ROOT, file_names, texts

_LINK = re.compile(r"\]\((?P<path>[^)#\s]+)(#[^)]*)?\)")
_FILE = re.compile(r"`(?P<path>[\w./-]+\.(py|md|toml|proto|yaml|txt|sh))`")
_FOLDER = re.compile(r"`(?P<path>(server|clients|protos|docker|tests|examples)/[\w/-]*)`")
_TEST = re.compile(r"`(?:[\w/]*/)?(?P<file>test_\w+\.py)::(?P<name>\w+)")
_STEP = re.compile(r"^\| [^|]+ \| `([\w/]+\.py)` \| `([\w.]+)` \|$", re.MULTILINE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BUILT = ("protos/node_modules", "docker/.env")  # made by tools and users

# Statements about an earlier version are not changed later.
_HISTORY = ("CHANGELOG.md",)

WIRE = ROOT / "server/docs/wire.md"
DOCUMENTS = [name for name, _ in texts() if name.endswith(".md") and name not in _HISTORY]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_exist(name: str) -> None:
    """Relative links have a target; files and folders in code style are in the repository."""
    text = (ROOT / name).read_text()
    folder = (ROOT / name).parent
    broken = [
        link["path"]
        for link in _LINK.finditer(text)
        if "://" not in link["path"] and not (folder / link["path"]).exists()
    ]
    missing = [path["path"] for path in _FILE.finditer(text) if not _is_known(path["path"])]
    missing += [
        path["path"]
        for path in _FOLDER.finditer(text)
        if not (ROOT / path["path"]).exists() and path["path"] not in _BUILT
    ]
    assert broken + missing == []


def test_named_tests_exist() -> None:
    """A test that a document names is in a file of that name."""
    texts_of = {name: (ROOT / name).read_text() for name in file_names() if "/test_" in name}
    missing = [
        f"{document}: {test['file']}::{test['name']}"
        for document in DOCUMENTS
        for test in _TEST.finditer((ROOT / document).read_text())
        if not any(
            name.endswith("/" + test["file"]) and f"def {test['name']}(" in text
            for name, text in texts_of.items()
        )
    ]
    assert missing == []


def test_the_diagram_of_the_architecture_is_that_of_the_imports() -> None:
    """`python -m tests.style.diagram` writes it."""
    assert diagram.drawn() in diagram.PAGE.read_text()


def test_the_paths_of_requests_name_functions() -> None:
    """Each row of architecture.md with a file and a function names a definition that exists."""
    rows = _STEP.findall(diagram.PAGE.read_text())
    assert len(rows) > 20
    assert [(file, name) for file, name in rows if name not in definitions(file)] == []


def test_the_limits_of_the_wire_have_their_names() -> None:
    """Each constant in wire.md is one of the wire, or of the server that uses it."""
    names = re.findall(r"`([A-Z]+(?:_[A-Z]+)*_(?:MAX|BYTES|S|FACTOR|WINDOW))`", WIRE.read_text())
    folders = ("clients/python/shalekv_wire", "server/shalekv/rpc")
    code = "".join(file.read_text() for each in folders for file in (ROOT / each).glob("*.py"))
    assert len(names) > 12
    assert [name for name in names if not re.search(rf"^{name} = ", code, re.MULTILINE)] == []


def definitions(file: str) -> set[str]:
    """The functions and classes of a module of the server, and methods as ``Class.method``."""
    found = set()
    for node in ast.parse((ROOT / "server/shalekv" / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, _FUNCTIONS)]
            found |= {node.name, *(f"{node.name}.{each.name}" for each in methods)}
        elif isinstance(node, _FUNCTIONS):
            found.add(node.name)
    return found


def _is_known(path: str) -> bool:
    """Return whether a file of the repository has this name, with the folders that are given."""
    wanted = PurePosixPath(path.removeprefix("./")).parts
    return any(PurePosixPath(name).parts[-len(wanted) :] == wanted for name in file_names())
