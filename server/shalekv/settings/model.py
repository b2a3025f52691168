"""The base class of all groups of settings, and units of bytes."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_SIZES = {"KiB": KIB, "MiB": MIB, "GiB": GIB}
_SIZE = re.compile(r"(\d{1,12}) ?(KiB|MiB|GiB)", re.ASCII)


class Settings(BaseModel):
    """The base class of groups of settings: immutable, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _with_unit(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert bytes with a unit, such as ``512MiB``, to a number."""
        if not isinstance(value, str) or "_bytes" not in (info.field_name or ""):
            return value
        found = _SIZE.fullmatch(value)
        return value if found is None else int(found[1]) * _SIZES[found[2]]
