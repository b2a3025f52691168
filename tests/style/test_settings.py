"""Settings: each has a user, is read by the product, is described, and there are few of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from shalekv import settings
from shalekv.cli.console.settings_flags import settings_of
from shalekv.settings import AnyConfig
from tests.style.sources import ROOT, python_sources

# A higher number is a decision: a setting needs a user who chooses better than we can. TLS and
# access control have 15 that nobody else can know, such as files and an issuer; telemetry has 6.
SETTINGS_MAX = 135
PRODUCT = ("server/shalekv/", "clients/")
MODELS = "server/shalekv/settings/"

# The last word of a number's name, before `_max` or `_min`: its unit, or what it counts.
UNITS = frozenset("ms s bytes bits count percent ratio".split())
COUNTED = frozenset(
    "appends attempts calls connections processes reads streams threads uploads writes".split()
)


def test_settings_are_few() -> None:
    """There are no more settings than were decided."""
    assert len(list(settings_of(AnyConfig))) <= SETTINGS_MAX


def test_settings_have_a_user() -> None:
    """Every setting names the kind of user who would change it."""
    assert [each.toml_key for each in settings_of(AnyConfig) if not each.user] == []


def test_settings_are_read() -> None:
    """The product reads every setting, from its group or from what is called settings.

    It does so outside the models, or through a property of its model.
    """
    read = set(attributes_read())
    unread = [
        each.toml_key
        for each in settings_of(AnyConfig)
        if not read & {("settings", each.name), (each.toml_key.split(".")[0], each.name)}
    ]
    assert unread == []


def test_settings_are_in_the_reference() -> None:
    """The reference has an entry for every setting."""
    page = (ROOT / "server/docs/settings.md").read_text()
    entries = set(re.findall(r"^\| key \| `([\w.]+)` \|$", page, re.MULTILINE))
    assert {each.toml_key for each in settings_of(AnyConfig)} == entries


def attributes_read() -> Iterator[tuple[str, str]]:
    """Attributes that the product reads, each behind the name of what it is read from."""
    for source in python_sources():
        if source.name.startswith(MODELS):
            for node in ast.walk(source.tree):
                if isinstance(node, ast.FunctionDef) and is_property(node):
                    yield from (("settings", name) for _, name in loaded(node))
                elif isinstance(node, ast.FunctionDef) and node in source.tree.body:
                    yield from loaded(node)
        elif source.name.startswith(PRODUCT):
            yield from loaded(source.tree)


def is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)


def loaded(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=of) | ast.Attribute(attr=of), ctx=ast.Load()):
                yield of.strip("_"), node.attr


def test_settings_name_their_units() -> None:
    """A setting that is a number ends in its unit, or in what it counts."""
    unclear = [
        f"{model.__name__}.{name}"
        for model in setting_models()
        for name, field in model.model_fields.items()
        if holds_number(field.annotation)
        and re.sub("_(max|min)$", "", name).split("_")[-1] not in UNITS | COUNTED
    ]
    assert unclear == []


def test_settings_are_described() -> None:
    """Every setting has a description, from which the reference is made."""
    silent = [
        f"{model.__name__}.{name}"
        for model in setting_models()
        for name, field in model.model_fields.items()
        if not field.description and not is_group(field.annotation)
    ]
    assert silent == []


def setting_models() -> Iterable[type[BaseModel]]:
    return [m for m in vars(settings).values() if is_group(m) and m is not BaseModel]


def is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def holds_number(annotation: Any) -> bool:
    if get_origin(annotation) in {Union, UnionType}:
        return any(holds_number(a) for a in get_args(annotation))
    if not isinstance(annotation, type) or issubclass(annotation, bool | Enum):
        return False
    return issubclass(annotation, int | float)
