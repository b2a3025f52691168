"""No decoder is left out: whatever takes apart what somebody else has made is fuzzed."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from tests.fuzz.decoders.registry import DECODERS
from tests.style.sources import ROOT

FORMAT = "shalekv.format."
FOLDERS = ("server/shalekv", "clients/python/shalekv_client")
GENERATED = "shalekv.v1."

# By its name everywhere; in the format of objects by more names, and by what it is given.
DECODES = re.compile(r"(decode|parse)(_\w+)?")
READS = re.compile(r"(open|read|records)_\w+|plain|unseal|\w+_of|needed_\w+|told_\w+|is_backup_\w+")

# What has such a name and takes nothing apart, or nothing that another has made.
NONE = {
    "shalekv.format.block_frame.codec_of": "looks at a block that `plain` has taken",
    "shalekv.format.columns.columns_of": "is given entries, not bytes",
    "shalekv.format.wal_record.header_of": "encodes",
}


@cache
def covered() -> frozenset[str]:
    """The functions that are fuzzed, by module and name."""
    covers = (cover for decoder in DECODERS for cover in decoder.covers)
    return frozenset(f"{cover.__module__}.{cover.__qualname__}" for cover in covers)


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """All public functions and class methods, by the names that importers know."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to((ROOT / folder).parent).with_suffix("")
            module = ".".join(relative.parts)
            if not module.startswith(GENERATED):
                yield from _of_module(module, ast.parse(path.read_text()))


def _of_module(module: str, tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield f"{module}.{node.name}", node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                decorators = getattr(method, "decorator_list", ())
                if isinstance(method, ast.FunctionDef) and any(
                    ast.unparse(each) == "classmethod" for each in decorators
                ):
                    yield f"{module}.{node.name}.{method.name}", method


def looks_like_a_decoder(place: str, node: ast.FunctionDef) -> bool:
    """By its name, or because it is given what stood on the wire."""
    if DECODES.fullmatch(node.name):
        return True
    if not place.startswith(FORMAT) or node.name.startswith("_"):
        return False
    given = [ast.unparse(each.annotation) for each in node.args.args if each.annotation]
    return READS.fullmatch(node.name) is not None or any("wire." in each for each in given)


def test_every_decoder_is_fuzzed() -> None:
    """A new one is missed here, until it is registered."""
    found = {place for place, node in functions() if looks_like_a_decoder(place, node)}
    assert found - covered() == {*NONE}


def test_what_is_covered_is_there() -> None:
    """What is registered is a public function of the product."""
    for place in covered():
        module, _, name = place.rpartition(".")
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            outer, _, kind = module.rpartition(".")
            owner = getattr(importlib.import_module(outer), kind)
        assert callable(getattr(owner, name))
        assert not name.startswith("_")


def test_decoders_have_names_of_their_own() -> None:
    """A failure names one decoder."""
    names = [decoder.name for decoder in DECODERS]
    assert len({*names}) == len(names)
