"""The diagram of the layers in server/docs/architecture.md.

`python -m tests.style.diagram` writes it. An arrow leads from a package to one that it imports;
what follows from other arrows is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.style.imports import modules
from tests.style.sources import ROOT

PAGE = ROOT / "server/docs/architecture.md"
_NOT_DRAWN = ("shalekv.v1",)  # generated code
_BLOCK = re.compile(r"```mermaid\n.*?```\n", re.DOTALL)


def package_of(module: str) -> str:
    """``shalekv.write.quorum.wal`` as ``write``; a client is one node, and what all import."""
    root, _, path = module.partition(".")
    if root != "shalekv":
        return root
    package, _, rest = path.partition(".")
    return package if rest and package != "settings" else "foundations"


def packages() -> Mapping[str, frozenset[str]]:
    """Each package with those that it imports."""
    graph: dict[str, set[str]] = {}
    for module in modules().values():
        own = package_of(module.name)
        imports = (name for name in module.imports if name not in _NOT_DRAWN)
        graph.setdefault(own, set()).update({package_of(name) for name in imports} - {own})
    return {name: frozenset(found) for name, found in graph.items()}


def drawn() -> str:
    """The diagram, as a code block of Markdown."""
    graph = packages()
    lines = [
        f"    {name} --> {other}"
        for name in sorted(graph)
        for other in sorted(graph[name])
        if not any(other in _reached(graph, between) for between in graph[name] - {other})
    ]
    return "```mermaid\nflowchart TD\n" + "\n".join(lines) + "\n```\n"


def _reached(graph: Mapping[str, frozenset[str]], start: str) -> set[str]:
    reached: set[str] = set()
    todo = [start]
    while todo:
        for other in graph.get(todo.pop(), ()):
            if other not in reached:
                reached.add(other)
                todo.append(other)
    return reached


if __name__ == "__main__":
    PAGE.write_text(_BLOCK.sub(lambda _: drawn(), PAGE.read_text(), count=1))
