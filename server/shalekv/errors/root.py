"""What all errors are."""

from __future__ import annotations

from typing import ClassVar


class ShaleError(Exception):
    """Says what happened, to which object, and what the caller can do."""

    reason: ClassVar[str] = "INTERNAL"
