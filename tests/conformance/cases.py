"""The files of cases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.notation import BadCase, Json

FOLDER = Path(__file__).parent
_NAMES_OF_TOPIC = {"about", "settings", "destroys", "cases"}
_NAMES_OF_CASE = {"name", "about", "steps"}


@dataclass(frozen=True, slots=True)
class Case:
    """Steps that show one property."""

    name: str
    steps: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class Topic:
    """One file."""

    name: str
    # settings that the server must be started with: "limits.ttl_ms_max"
    settings: Mapping[str, Any]
    destroys: bool  # deletes keys outside of the prefix of the case
    cases: tuple[Case, ...]

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        """The settings as arguments of a server in this process: by group and name."""
        groups: dict[str, dict[str, Any]] = {}
        for key, value in self.settings.items():
            group, _, name = key.partition(".")
            groups.setdefault(group, {})[name] = value
        return groups


def topics(folder: Path = FOLDER) -> list[Topic]:
    """All files of a folder, in the order of their names."""
    return [topic_of(file) for file in sorted(folder.glob("*.json"))]


def topic_of(file: Path) -> Topic:
    written = json.loads(file.read_text(encoding="utf-8"))
    _refuse_others(written, _NAMES_OF_TOPIC, file.name)
    cases = []
    for case in written["cases"]:
        _refuse_others(case, _NAMES_OF_CASE, f"{file.name}: {case.get('name')}")
        cases.append(Case(case["name"], tuple(case["steps"])))
    return Topic(
        name=file.stem,
        settings=written.get("settings", {}),
        destroys=written.get("destroys", False),
        cases=tuple(cases),
    )


def _refuse_others(written: Json, known: set[str], where: str) -> None:
    if others := set(written) - known:
        raise BadCase(f"{where}: what is {', '.join(sorted(others))}?")
