"""server/docs/pipeline.md has the arguments, options and defaults that the pipeline has."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import shalekv_spark
from shalekv.errors import InvalidSetting
from shalekv_spark.feed.options import FeedOptions
from shalekv_spark.loading.options import LoadOptions, LoadPlan
from shalekv_spark.scanning.source import scan_request
from tests.style.sources import ROOT

REQUIRED = inspect.Parameter.empty
PAGE = (ROOT / "server" / "docs" / "pipeline.md").read_text(encoding="utf-8")
LOADS = {"store", "levels", "value_bytes_max"}  # which the plan of a load has in another form


def documented(heading: str) -> dict[str, str]:
    """Return the first column of a table of the page, each with the column beside it."""
    section = PAGE.split(f"\n### {heading}\n", 1)[1].split("\n#", 1)[0]
    found: dict[str, str] = {}
    for row in re.findall(r"^\| (`.*)$", section, re.MULTILINE):
        names, default, *_ = row.split("|")
        defaults = re.findall(r"`([^`]*)`", default)
        of_each = re.findall(r"`([^`]*)`", names)
        if len(defaults) != len(of_each):
            defaults = (defaults or [""]) * len(of_each)
        found |= dict(zip(of_each, defaults, strict=True))
    return found


def arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Every argument of a function with its default, those of loads in the place of **options."""
    found: dict[str, Any] = {}
    for name, each in inspect.signature(function).parameters.items():
        if each.kind is not inspect.Parameter.VAR_KEYWORD:
            found[name] = each.default
    return found


def of_loads() -> dict[str, Any]:
    fields = LoadPlan.__dataclass_fields__
    return {n: None if n in LOADS else fields[n].default for n in LoadOptions.__annotations__}


def known(read: Callable[[Mapping[str, str]], object]) -> set[str]:
    """Return the options that a source lists when it gets an unknown one."""
    with pytest.raises(InvalidSetting, match="unknown option colour") as failure:
        read({"url": "file:///tmp/fruit", "colour": "red"})
    listed = str(failure.value).split("known are ")[1].split(", and store.<setting>")[0]
    return {*listed.split(", ")} - {"path"}


@pytest.mark.parametrize(
    "name",
    ["scan", "stats", "export_parquet", "bulk_load", "import_parquet", "write_stream", "compact"],
)
def test_arguments_are_documented_with_their_defaults(name: str) -> None:
    """Each function has a table of exactly its arguments."""
    expected = arguments(getattr(shalekv_spark, name))
    if name == "bulk_load":
        expected |= of_loads()
    found = documented(name)
    assert found.keys() == expected.keys()
    for argument, text in found.items():
        default = ast.literal_eval(text) if text else REQUIRED
        assert default == expected[argument], argument


def test_all_functions_are_documented() -> None:
    """No public function is left out."""
    functions = {n for n in shalekv_spark.__all__ if inspect.isfunction(getattr(shalekv_spark, n))}
    assert [n for n in sorted(functions) if f"`{n}" not in PAGE and f"### {n}\n" not in PAGE] == []


def test_options_of_scans_are_documented() -> None:
    """The format "shalekv" has a table of exactly its options, and their defaults are taken."""
    found = documented("Options of `shalekv`")
    assert found.keys() == known(scan_request) | {"store.<setting>"}
    given = {name: text for name, text in found.items() if text}
    plain = {"url": "file:///tmp/fruit"}
    assert scan_request(plain | given) == scan_request(plain)


def test_options_of_the_feed_are_documented() -> None:
    """The format "shalekv.changes" has a table of exactly its options, and so have its defaults."""
    found = documented("Options of `shalekv.changes`")
    assert found.keys() == known(FeedOptions.of) | {"store.<setting>"}
    given = {name: text for name, text in found.items() if text}
    plain = {"url": "file:///tmp/fruit"}
    assert FeedOptions.of(plain | given) == FeedOptions.of(plain)
