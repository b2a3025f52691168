"""A meter for programs that measure themselves: processor time and real time of an operation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Self


@dataclass(slots=True)
class Meter:
    """Measures a `with` block in which `count` operations are done; the time is of all threads."""

    count: int
    figures: dict[str, float] = field(default_factory=dict)
    _began: tuple[float, float] = (0.0, 0.0)

    def __enter__(self) -> Self:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        wall_s = time.perf_counter() - self._began[0]
        cpu_s = time.process_time() - self._began[1]
        self.figures["us"] = wall_s / self.count * 1e6
        self.figures["CPU us"] = cpu_s / self.count * 1e6
