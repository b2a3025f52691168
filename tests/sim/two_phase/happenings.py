"""All that happened to objects and records of a two-phase database, and what creates were told."""

from __future__ import annotations

import enum
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeAlias

from shalekv.core.two_phase import Record


class Change(enum.Enum):
    """What became of an object."""

    PUT = "put"
    COPIED = "copied"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class ObjectChanged:
    """An object was put, overwritten by a copy, or deleted; `data` is what it holds then."""

    node: str  # the label of whoever asked for it
    change: Change
    name: str
    data: bytes = b""


class RecordChange(enum.Enum):
    """What became of a record."""

    INSERTED = "inserted"
    COMMITTED = "committed"
    TAKEN_OVER = "taken over"
    WITHDRAWN = "withdrawn"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class RecordChanged:
    """A change of a record took effect."""

    node: str
    change: RecordChange
    before: Record | None
    after: Record | None

    @property
    def name(self) -> str:
        """The name of the destination."""
        either = self.before or self.after
        return either.destination.name if either is not None else ""


@dataclass(slots=True, eq=False)
class Call:
    """One `create`, on its way: the temporary objects that it has put so far."""

    sources: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Told:
    """A `create` ended. `outcome` is the name of the type that it returned or raised."""

    node: str
    name: str
    data: bytes
    outcome: str
    sources: tuple[str, ...]


Happening: TypeAlias = ObjectChanged | RecordChanged | Told

# The create for which the current task makes its requests.
CALL: ContextVar[Call] = ContextVar("tests.sim.two_phase.call")
