"""Numbers in sentences."""

from __future__ import annotations


def counted(count: int, thing: str) -> str:
    """``1 row``, ``2 rows``, ``1,000 rows``."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"
