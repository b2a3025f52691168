"""Reads docker/compose.yaml as `docker compose` does, as far as that file goes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

DOCKER = Path(__file__).parents[2] / "docker"
PORT = 7654  # where a writer listens in its container

_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


class VariableMissing(KeyError):
    """The file asks for a variable that is not set."""


@dataclass(frozen=True, slots=True)
class Service:
    """One service; `text` has all that the file says of it."""

    name: str
    text: Mapping[str, Any]

    @property
    def argv(self) -> list[str]:
        """What the first process of its container is, where the file says all of it."""
        return [*self.text.get("entrypoint", []), *self.text.get("command", [])]

    @property
    def environment(self) -> Mapping[str, str]:
        return dict(self.text.get("environment", {}))

    @property
    def health(self) -> list[str]:
        """The command that tells whether it is well; empty when there is none."""
        how, *argv = self.text.get("healthcheck", {}).get("test", ["NONE"])
        return argv if how == "CMD" else []

    @property
    def depends_on(self) -> Mapping[str, str]:
        return {name: each["condition"] for name, each in self.text.get("depends_on", {}).items()}

    @property
    def is_ours(self) -> bool:
        return "build" in self.text

    @property
    def profiles(self) -> list[str]:
        return list(self.text.get("profiles", []))


def read_compose(variables: Mapping[str, str]) -> dict[str, Service]:
    """The services of all profiles. Raises `VariableMissing`."""
    text = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    services = _filled(yaml.safe_load(text), variables)["services"]
    return {name: Service(name, each) for name, each in services.items()}


def variables_of(text: str) -> Iterator[tuple[str, str]]:
    """Each variable that `text` names, with its default; "" for those that have none."""
    for name, kind, default in _VARIABLE.findall(text):
        yield name, default if kind == "-" else ""


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(each, variables) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, variables) for each in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: _value(found, variables), value)
    return value


def _value(found: re.Match[str], variables: Mapping[str, str]) -> str:
    name, kind, rest = found.groups()
    if variables.get(name):
        return variables[name]
    if kind == "-":
        return str(rest)
    raise VariableMissing(f"{name}: {rest}")
