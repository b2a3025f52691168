"""The files of the repository, as the tidy tests read them."""

from __future__ import annotations

import ast
import gc
import io
import os
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Made by tools; and at the root, what running and building leave there. The rest is ours.
_NOT_OURS = re.compile(r"\.(git|venv|cache|hypothesis|\w+_cache)|__pycache__|node_modules")
_NOT_OURS_AT_ROOT = frozenset({"data", "dist"})
_GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
_LOCKS = re.compile(r"(^requirements/\w+\.lock|/package-lock\.json)$")


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file: its name from the root, its text, its syntax tree."""

    name: str
    text: str
    tree: ast.Module
    comments: Mapping[int, str]  # line -> the comment on it

    @classmethod
    def parse(cls, name: str, text: str) -> Source:
        """The source of a file `name` that holds `text`."""
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}
        return cls(name, text, ast.parse(text, name), comments)

    def at(self, line: int, what: str) -> str:
        return f"{self.name}:{line}: {what}"


@cache
def file_names() -> tuple[str, ...]:
    """Every file that belongs to the repository, generated ones included, sorted."""
    names = []
    for folder, subfolders, files in os.walk(ROOT):
        at_root = _NOT_OURS_AT_ROOT if Path(folder) == ROOT else frozenset()
        subfolders[:] = [s for s in subfolders if not _NOT_OURS.fullmatch(s) and s not in at_root]
        names += [(Path(folder) / file).relative_to(ROOT).as_posix() for file in files]
    return tuple(sorted(names))


@cache
def python_sources() -> tuple[Source, ...]:
    """Every Python file that is written by hand.

    The collector of garbage is spared the millions of nodes, now and in all tests that come after.
    """
    names = [n for n in file_names() if n.endswith(".py") and not _GENERATED.search(n)]
    gc.disable()
    try:
        sources = tuple(Source.parse(n, (ROOT / n).read_text()) for n in names)
        gc.freeze()
    finally:
        gc.enable()
    return sources


def lock_files() -> Iterator[tuple[str, str]]:
    for name in file_names():
        if _LOCKS.search(name):
            yield name, (ROOT / name).read_text()


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of each file that is written by hand and is text, Python included."""
    for name in file_names():
        if _GENERATED.search(name) or _LOCKS.search(name):
            continue
        try:
            yield name, (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue  # a golden file, an image
