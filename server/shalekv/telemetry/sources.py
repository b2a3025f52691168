"""The parts of a process that tell metrics, each asked when somebody wants to know."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from shalekv.telemetry.metrics import Metrics

# Adds its samples, from counters that it has anyway: no requests to the store, no waiting.
Source: TypeAlias = Callable[[Metrics], Awaitable[None] | None]


class MetricSources:
    """The sources of one process. What is gone leaves no samples behind."""

    def __init__(self) -> None:
        """Begin without sources."""
        self._sources: dict[Source, None] = {}

    def add(self, source: Source) -> None:
        """Ask `source` from now on, as long as the process lives."""
        self._sources[source] = None

    @contextmanager
    def including(self, *sources: Source) -> Iterator[None]:
        """Ask these sources as well, while entered."""
        for source in sources:
            self.add(source)
        try:
            yield
        finally:
            for source in sources:
                self._sources.pop(source, None)

    async def collect(self) -> Metrics:
        """Ask all sources; other tasks have their turn in between."""
        metrics = Metrics()
        for source in [*self._sources]:
            added = source(metrics)
            if added is not None:
                await added
            await asyncio.sleep(0)
        return metrics
