"""The tree of errors."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shalekv import errors


def branches(kind: type[errors.ShaleError], depth: int = 0) -> Iterator[tuple[int, str]]:
    """The classes of the package below `kind`, each behind that which it is made of."""
    yield depth, kind.__name__
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from branches(below, depth + 1)


def drawn() -> list[tuple[str, int]]:
    """What the docstring shows: each name, and how far to the right it stands."""
    text = errors.__doc__ or ""
    found = re.finditer(r"^((?:[│ ] {3})*(?:[├└]── )?)([A-Z]\w+)(?= {2,}|$)", text, re.MULTILINE)
    return [(each[2], len(each[1]) // 4) for each in found]


def test_the_tree_is_drawn_as_it_is() -> None:
    """Each class stands once in the docstring, below the one that it is made of."""
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
