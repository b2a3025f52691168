"""Reads the compose files of docker/ as `docker compose` does, as far as those files go."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE, MINIO, TLS = "compose.yaml", "compose.minio.yaml", "compose.tls.yaml"
OBSERVABILITY = "compose.observability.yaml"
PORT = 7654  # where a writer, or a reader, listens in its container
SAFEKEEPER_PORT = 7655
DOCKERFILE = "docker/Dockerfile"

_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?::([-?])([^}]*))?\}")
_REPLACED = ("command", "entrypoint", "test")  # lists that a later file replaces


class VariableMissing(KeyError):
    """The file asks for a variable that is not set."""


@dataclass(frozen=True, slots=True)
class Service:
    """One service; `text` is its entry in the file."""

    name: str
    text: Mapping[str, Any]

    @property
    def argv(self) -> list[str]:
        """Command line of the first process, if the file states all of it."""
        return [*self.text.get("entrypoint", []), *self.text.get("command", [])]

    @property
    def environment(self) -> Mapping[str, str]:
        return dict(self.text.get("environment", {}))

    @property
    def health(self) -> list[str]:
        """Command of the health check; empty if there is none."""
        how, *argv = self.text.get("healthcheck", {}).get("test", ["NONE"])
        return argv if how == "CMD" else []

    @property
    def depends_on(self) -> Mapping[str, str]:
        return {name: each["condition"] for name, each in self.text.get("depends_on", {}).items()}

    @property
    def dockerfile(self) -> str:
        """Dockerfile of the image; empty if the image is not built here."""
        return str(self.text.get("build", {}).get("dockerfile", ""))

    @property
    def is_ours(self) -> bool:
        return self.dockerfile == DOCKERFILE

    @property
    def volumes(self) -> Mapping[str, str]:
        """The volume of each mount point."""
        return {_mount_point(each): each.split(":")[0] for each in self.text.get("volumes", [])}

    @property
    def written_volumes(self) -> set[str]:
        """The volumes that are not mounted read-only."""
        given = (each.split(":") for each in self.text.get("volumes", []))
        return {name for name, _, *options in given if "ro" not in options}

    @property
    def profiles(self) -> list[str]:
        return list(self.text.get("profiles", []))


def read_compose(variables: Mapping[str, str], *more: str) -> dict[str, Service]:
    """The services of all profiles; `more` are files that change the first.

    Raises `VariableMissing`.
    """
    services = _filled(read_files(*more), variables)["services"]
    return {name: Service(name, each) for name, each in services.items()}


def read_files(*more: str) -> dict[str, Any]:
    """Return compose.yaml merged with these files, before variables are filled in."""
    merged: Any = {}
    for name in (COMPOSE, *more):
        merged = _merged("", merged, yaml.safe_load((DOCKER / name).read_text(encoding="utf-8")))
    return dict(merged)


def variables_of(text: str) -> Iterator[tuple[str, str]]:
    """Each variable that `text` names, with its default; "" for those that have none."""
    for name, kind, default in _VARIABLE.findall(text):
        if name:
            yield name, default if kind == "-" else ""


def _merged(name: str, old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        both = {key: _merged(key, old[key], new[key]) for key in old.keys() & new.keys()}
        return {**old, **new, **both}
    if name == "volumes" and isinstance(old, list):
        points = {_mount_point(each): each for each in [*old, *new]}
        return list(points.values())
    if isinstance(new, list) and isinstance(old, list) and name not in _REPLACED:
        raise ValueError(f"nothing here knows how lists named {name} are merged")
    return new


def _mount_point(volume: str) -> str:
    return volume.split(":")[1]


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
    if name is None:
        return "$"  # $$
    if variables.get(name):
        return variables[name]
    if kind == "-":
        return str(rest)
    raise VariableMissing(f"{name}: {rest}")
