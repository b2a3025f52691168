"""The graph of imports of the product, whenever they are made: also in functions and for types."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from tests.style.sources import Source, python_sources

ROOTS = ("server/", "clients/python/", "clients/spark/")
PACKAGES = ("shalekv", "shalekv_client", "shalekv_spark", "shalekv_wire")


@dataclass(frozen=True, slots=True)
class Module:
    """One module: its dotted name, its source, and the modules of the product it imports."""

    name: str
    source: Source
    imports: frozenset[str]

    @property
    def folder(self) -> str:
        return self.source.name.rsplit("/", 1)[0]

    @property
    def line_count(self) -> int:
        return self.source.text.count("\n")


@cache
def modules() -> Mapping[str, Module]:
    """Every module of the product by name, without generated ones and packages without code."""
    named = {name: source for source in python_sources() if (name := module_name(source.name))}
    known = named.keys()
    return {
        name: Module(name, source, frozenset(_imported(source.tree, known)) - {name})
        for name, source in named.items()
        if not _is_bare_package(source)
    }


@cache
def importers() -> Mapping[str, frozenset[str]]:
    """Return the importers of each module."""
    found: dict[str, set[str]] = {name: set() for name in modules()}
    for module in modules().values():
        for imported in module.imports & found.keys():
            found[imported].add(module.name)
    return {name: frozenset(by) for name, by in found.items()}


def module_name(file: str) -> str:
    """``server/shalekv/write/wal.py`` as ``shalekv.write.wal``; empty: not of the product."""
    for root in ROOTS:
        path = file.removeprefix(root)
        if path != file and path.split("/", 1)[0] in PACKAGES:
            return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return ""


def cycles(graph: Mapping[str, Iterable[str]]) -> Iterator[list[str]]:
    """The strongly connected components of more than one node (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in graph:
                continue
            if other not in index:
                yield from visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            start = stack.index(node)
            component = stack[start:]
            del stack[start:]
            if len(component) > 1:
                yield sorted(component)

    for node in graph:
        if node not in index:
            yield from visit(node)


def _is_bare_package(source: Source) -> bool:
    is_package = source.name.endswith("/__init__.py")
    return is_package and all(isinstance(node, ast.Expr) for node in source.tree.body)


def _imported(tree: ast.Module, known: Iterable[str]) -> Iterator[str]:
    names = frozenset(known)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in names:
                    yield full
                elif node.module in names:
                    yield node.module
