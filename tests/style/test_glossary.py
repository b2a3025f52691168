"""The glossary: its terms are in the code, and the words that it replaces name nothing."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from io import StringIO

from tests.style.imports import modules
from tests.style.sources import ROOT, Source, file_names, python_sources, texts

GLOSSARY = "server/docs/glossary.md"
ITSELF = (GLOSSARY, "tests/style/test_glossary.py", "CHANGELOG.md")
TERMS_MIN = 60
_ROW = re.compile(
    r"^\| (?P<terms>[^|]+) \| (?P<meaning>[^|]+) \| ?(?P<code>[^|]*) ?\| ?(?P<refused>[^|]*) ?\|$",
    re.MULTILINE,
)
_CODE = re.compile(r"`([^`]+)`")
_WORD = re.compile(r"[A-Za-z_]\w*")
_CALLABLE = ast.FunctionDef | ast.AsyncFunctionDef


def rows() -> Iterator[re.Match[str]]:
    for row in _ROW.finditer((ROOT / GLOSSARY).read_text()):
        if row["terms"] != "term" and not set(row["terms"]) <= set("-"):
            yield row


@cache
def refused_words() -> frozenset[str]:
    return frozenset(
        word.strip() for row in rows() for word in row["refused"].split(",") if word.strip()
    )


def snake(name: str) -> str:
    """``HeldTree`` and ``_held_tree`` as ``held_tree``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


@cache
def is_refused(name: str) -> bool:
    """Return whether the glossary replaces this name.

    ``Tree`` refuses classes, ``tree`` every name.
    """
    return name.strip("_") in refused_words() or snake(name) in refused_words()


@cache
def definitions() -> frozenset[str]:
    """The classes and functions of the product, and methods as ``Class.method``."""
    found = set()
    for module in modules().values():
        for node in module.source.tree.body:
            if isinstance(node, ast.ClassDef):
                methods = [each.name for each in node.body if isinstance(each, _CALLABLE)]
                found |= {node.name, *(f"{node.name}.{name}" for name in methods)}
            elif isinstance(node, _CALLABLE):
                found.add(node.name)
    return frozenset(found)


def is_in_repository(path: str) -> bool:
    """Return whether a file or a folder has this path, from the root or from that of the server."""
    places = (path, f"server/shalekv/{path}")
    return any(
        name == each or name.startswith(each + "/") for name in file_names() for each in places
    )


def test_every_term_has_a_meaning() -> None:
    """The tables have a sentence for each term, and no term twice."""
    terms = [term.strip() for row in rows() for term in row["terms"].split(",")]
    assert len(terms) >= TERMS_MIN
    assert len(terms) == len(set(terms))
    assert [row["terms"] for row in rows() if not row["meaning"].strip().endswith(".")] == []


def test_every_term_is_in_the_code() -> None:
    """Names in the column for code are defined in the code."""
    named = [name for row in rows() for name in _CODE.findall(row["code"])]
    assert len(named) >= TERMS_MIN
    assert [
        name for name in named if name not in definitions() and not is_in_repository(name)
    ] == []


def test_replaced_words_name_nothing() -> None:
    """No identifier, and no module, is a word that the glossary replaces."""
    assert [found for source in python_sources() for found in _refused_names(source)] == []


def _refused_names(source: Source) -> Iterator[str]:
    file = source.name.rsplit("/", 1)[-1]
    if file in refused_words() or is_refused(file.removesuffix(".py")):
        yield f"{source.name}: the name of the module"
    if not any(map(is_refused, set(_WORD.findall(source.text)))):
        return  # reading tokens takes far longer
    for token in tokenize.generate_tokens(StringIO(source.text).readline):
        if token.type == tokenize.NAME and is_refused(token.string):
            yield f"{source.name}:{token.start[0]}: {token.string}"


def test_replaced_words_are_in_no_text() -> None:
    """No comment, message or document has a replaced word that can only be meant as a name."""
    words = [word for word in refused_words() if "_" in word or re.search("[a-z][A-Z]", word)]
    replaced = re.compile(rf"\b({'|'.join(map(re.escape, sorted(words)))})\b")
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts()
        if name not in ITSELF and not name.endswith((".json", ".svg"))
        for number, line in enumerate(text.splitlines(), 1)
        if replaced.search(line)
    ]
    assert found == []
