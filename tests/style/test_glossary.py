"""The glossary: its tables can be read, and the words that it replaces name nothing in the code."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from functools import cache
from io import StringIO

from tests.style.sources import ROOT, python_sources

GLOSSARY = ROOT / "server/docs/glossary.md"
PRODUCT = ("server/shalekv/", "clients/")
TERMS_MIN = 60
_ROW = re.compile(
    r"^\| (?P<terms>[^|]+) \| (?P<meaning>[^|]+) \| ?(?P<refused>[^|]*) ?\|$", re.MULTILINE
)


def rows() -> Iterator[re.Match[str]]:
    for row in _ROW.finditer(GLOSSARY.read_text()):
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


def test_every_term_has_a_meaning() -> None:
    """The tables have a sentence for each term, and no term twice."""
    terms = [term.strip() for row in rows() for term in row["terms"].split(",")]
    assert len(terms) >= TERMS_MIN
    assert len(terms) == len(set(terms))
    assert [row["terms"] for row in rows() if not row["meaning"].strip().endswith(".")] == []


def test_replaced_words_name_nothing() -> None:
    """No identifier of the product, and no module, is a word that the glossary replaces."""
    found = []
    for source in python_sources():
        if not source.name.startswith(PRODUCT):
            continue
        stem = source.name.rsplit("/", 1)[-1].removesuffix(".py")
        if stem in refused_words():
            found.append(f"{source.name}: the name of the module")
        found += [
            f"{source.name}:{token.start[0]}: {token.string}"
            for token in tokenize.generate_tokens(StringIO(source.text).readline)
            if token.type == tokenize.NAME and snake(token.string) in refused_words()
        ]
    assert found == []
