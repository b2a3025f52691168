"""All measures, in the order in which they run."""

from __future__ import annotations

from tests.bench.measures import calls, engine, processes, stores, telemetry
from tests.bench.plan import Measure

MEASURES: tuple[Measure, ...] = (
    *(calls.GET, *calls.PUTS, calls.WRITE, calls.LONE),
    *processes.MEASURES,
    telemetry.MEASURE,
    *stores.MEASURES,
    *engine.MEASURES,
)
