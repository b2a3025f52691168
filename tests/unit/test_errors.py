"""Tests of the tree of errors."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shalekv import errors


def branches(kind: type[errors.ShaleError], depth: int = 0) -> Iterator[tuple[int, str]]:
    """Iterate over `kind` and its subclasses in the package, each after its base, with depths."""
    yield depth, kind.__name__
    for subclass in kind.__subclasses__():
        if subclass.__module__ == errors.__name__:
            yield from branches(subclass, depth + 1)


def drawn() -> list[tuple[str, int]]:
    """Return the names in the tree of the module docstring, with their depths."""
    text = errors.__doc__ or ""
    found = re.finditer(r"^((?:[│ ] {3})*(?:[├└]── )?)([A-Z]\w+)(?= {2,}|$)", text, re.MULTILINE)
    return [(each[2], len(each[1]) // 4) for each in found]


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    """Each class is once in the tree of the docstring, below its base class."""
    seen: list[str] = []
    parents = {}
    for name, depth in drawn():
        seen[depth:] = [name]
        parents[name] = seen[depth - 1] if depth else None
    path: list[str] = []
    expected = {}
    for depth, name in branches(errors.ShaleError):
        path[depth:] = [name]
        expected[name] = path[depth - 1] if depth else None
    assert parents == expected
    assert len(drawn()) == len(expected)
