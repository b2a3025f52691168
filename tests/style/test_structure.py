"""The structure of the product: whole modules, no cycles, folders of few modules."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from tests.style.imports import cycles, importers, modules

FRAGMENT_LINES_MAX = 120
FOLDER_MODULES_MAX = 20
MODULE_LINES_MEAN_MIN = 180
ATTRIBUTES_MAX = 12

# Folders that hold one module for each of many equal things.
LISTS = frozenset({"server/shalekv/cli/commands"})

# Small modules that their only neighbour imports late: their own imports are slow, or may fail.
DEFERRED: Mapping[str, str] = {
    "shalekv.cli.doctor.stored": "needs shalekv[server], and doctor does not",
}

# Pairs that users import by these names.
PUBLIC_PAIRS = frozenset({("ReadStatus", "ReaderStatus")})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*")
_AGENT_OR_ACTION = re.compile("(ing|er|or|e)$")
WORD_CHARS_MIN = 3  # of what an ending leaves


def test_no_module_is_a_fragment() -> None:
    """A module under 120 lines with a single importer, a neighbour, is part of it."""
    fragments = [
        f"{module.name} ({module.line_count} lines) is imported by {by} alone"
        for module in modules().values()
        if module.line_count < FRAGMENT_LINES_MAX and module.name not in DEFERRED
        for by in importers()[module.name]
        if len(importers()[module.name]) == 1 and modules()[by].folder == module.folder
    ]
    assert fragments == []


def test_imports_have_no_cycles() -> None:
    """No module imports itself through others, not even for types or in a function."""
    graph = {name: sorted(module.imports) for name, module in modules().items()}
    assert list(cycles(graph)) == []


def test_folders_can_be_surveyed() -> None:
    """A folder has at most 20 modules, unless it is a list of equal things."""
    counts = Counter(module.folder for module in modules().values())
    large = {folder: n for folder, n in counts.items() if n > FOLDER_MODULES_MAX}
    assert {folder: n for folder, n in large.items() if folder not in LISTS} == {}


def test_modules_are_whole() -> None:
    """The server is not cut into pieces: its modules have 180 lines on average, or more."""
    lines = [m.line_count for m in modules().values() if m.name.startswith("shalekv.")]
    assert sum(lines) / len(lines) >= MODULE_LINES_MEAN_MIN


def test_classes_have_few_attributes() -> None:
    """An object sets at most 12 attributes of its own: what has more is several things."""
    large = [
        f"{module.name}.{name}: {count}"
        for module in modules().values()
        for name, count in attribute_counts(module.source.tree)
        if count > ATTRIBUTES_MAX
    ]
    assert large == []


def test_names_of_classes_differ_by_more_than_an_ending() -> None:
    """No two names of two words or more differ in -ing, -er or -or alone."""
    names = {
        node.name.lstrip("_")
        for module in modules().values()
        for node in ast.walk(module.source.tree)
        if isinstance(node, ast.ClassDef)
    }
    assert set(similar(names)) - PUBLIC_PAIRS == set()


def test_similar_names_are_found() -> None:
    """Names are similar if one of their words has another ending, and no other word differs."""
    assert list(similar(["ServeSettings", "ServerSettings"])) == [
        ("ServeSettings", "ServerSettings")
    ]
    assert list(similar(["ArchiveSettings", "ArchivingSettings", "ArchiveUrlSettings"])) == [
        ("ArchiveSettings", "ArchivingSettings")
    ]
    assert list(similar(["Read", "Reader", "WriterConfig", "WriterSettings"])) == []


def similar(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The names of at least two words that agree but for the endings of their words."""
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in sorted(names):
        words = _WORD.findall(name)
        if len(words) > 1:
            alike[tuple(map(_without_ending, words))].append(name)
    yield from (tuple(each) for each in alike.values() if len(each) > 1)


def _without_ending(word: str) -> str:
    short = _AGENT_OR_ACTION.sub("", word)
    return short if len(short) >= WORD_CHARS_MIN else word


def attribute_counts(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, len(set(_set_attributes(node)))


def _set_attributes(tree: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def test_a_class_name_has_one_meaning() -> None:
    """No two public classes of the server have the same name."""
    places: dict[str, list[str]] = {}
    for module in modules().values():
        if module.name.startswith("shalekv."):
            for node in module.source.tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(module.name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
