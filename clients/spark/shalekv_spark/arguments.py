"""Converts arguments that several functions share to the types of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

from pydantic import ValidationError

from shalekv.errors import InvalidSetting
from shalekv.settings.model import Settings
from shalekv.settings.retired import retirement

Key: TypeAlias = bytes | str  # a text is encoded as UTF-8
Chosen = TypeVar("Chosen", bound=Settings)


def key_bytes(key: Key) -> bytes:
    """Return a key as bytes."""
    return key.encode() if isinstance(key, str) else key


def settings_of(
    model: type[Chosen], given: Mapping[str, object] | None, *, prefix: str = ""
) -> Chosen:
    """Return settings given by their names in server/docs/settings.md; others have their default.

    Raises `InvalidSetting`, which names each wrong setting with `prefix` before it.
    """
    try:
        return model.model_validate(dict(given or {}))
    except ValidationError as error:
        problems = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
        raise InvalidSetting(
            "; ".join(
                f"{prefix}{name}{_retirement(name) or f': {text}'}" for name, text in problems
            )
        ) from None


def _retirement(name: str) -> str:
    advice = retirement(name, lambda key: key.partition(".")[2])
    return advice and f" {advice}"
