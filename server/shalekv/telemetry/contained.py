"""Decorator for what records calls and commits: its bugs are logged, and fail none of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter_ns
from typing import ParamSpec

import structlog

LOG_PAUSE_NS = 60_000_000_000  # between two lines about one function

P = ParamSpec("P")
_log = structlog.get_logger(__name__)


def contained(record: Callable[P, None]) -> Callable[P, None]:
    """Let a function that records something log its exceptions in place of raising them."""
    quiet_until_ns = 0

    @wraps(record)
    def record_or_log(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal quiet_until_ns
        try:
            record(*args, **kwargs)
        except Exception as bug:  # noqa: BLE001 - of the log or of a call, which go on
            now_ns = perf_counter_ns()
            if now_ns >= quiet_until_ns:
                quiet_until_ns = now_ns + LOG_PAUSE_NS
                _log.error("telemetry has failed", what=record.__qualname__, exc_info=bug)

    return record_or_log
