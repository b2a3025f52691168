"""Settings of the memory of a serving process."""

from __future__ import annotations

from pydantic import Field

from shalekv.settings.model import GIB, MIB, Settings


class MemorySettings(Settings):
    """Memory of the serving process, divided in `settings.budget`."""

    memory_bytes: int = Field(
        default=512 * MIB,
        ge=16 * MIB,
        le=4096 * GIB,
        description="Memory of the serving process for data, beyond the 100 MiB or so that it "
        "takes idle: memtable, queues, caches and results. Settings that are not set share what "
        "those that are set leave of it.",
    )
