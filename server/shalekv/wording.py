"""Numbers and moments in sentences."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def counted(count: int, thing: str) -> str:
    """``1 row``, ``2 rows``, ``1,000 rows``."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def moment(time_ms: int) -> str:
    """``2026-05-01T12:30:00Z``, of milliseconds since the epoch; a number past year 9999."""
    try:
        at = _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
