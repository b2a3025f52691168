"""Settings of requests to the object store."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import Settings


class StoreSettings(Settings):
    """Requests to the object store."""

    retry_initial_ms: int = Field(
        default=50, ge=1, le=60_000, description="First delay before a request is repeated."
    )
    retry_max_ms: int = Field(
        default=2_000, ge=1, le=600_000, description="Longest delay between repeated requests."
    )
    read_attempts: int = Field(
        default=8,
        ge=1,
        le=1_000,
        description="How often a read or a list is sent before its error is reported.",
    )
    threads: int = Field(
        default=8, ge=1, le=256, description="Threads for calls that block, such as file I/O."
    )
