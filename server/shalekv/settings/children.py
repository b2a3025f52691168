"""Settings of the child processes of `serve`."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import Settings


class ChildrenSettings(Settings):
    """The child processes of `serve`: its compactor and its collector."""

    with_compactor: bool = Field(
        default=True,
        description="Run a compactor of this database as a child process. Switch it off where "
        "another machine runs it. Never for memory://, which no other process can read.",
    )
    with_collector: bool = Field(
        default=True,
        description="Run a collector of this database as a child process. Never for memory://.",
    )
    child_restart_initial_ms: int = Field(
        default=500,
        ge=1,
        le=3_600_000,
        description="Delay before a child process that has ended is started again. It doubles "
        "with each end until the process has run for as long as the longest delay.",
    )
    child_restart_max_ms: int = Field(
        default=60_000,
        ge=1,
        le=86_400_000,
        description="Longest delay before a child process is started again.",
    )
    child_takeover_ms: int = Field(
        default=30_000,
        ge=50,
        le=86_400_000,
        description="A compactor that another one has taken over from is started again when writes "
        "have been held back for so long: then the other one does not compact.",
    )
    child_grace_ms: int = Field(
        default=5_000,
        ge=0,
        le=600_000,
        description="How long a shutdown waits for a child process that was told to end, before "
        "it sends SIGTERM; after a further such time it sends SIGKILL.",
    )
