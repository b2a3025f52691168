"""What all groups of settings share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


class Settings(BaseModel):
    """What all groups of settings share: they never change, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
