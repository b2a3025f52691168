"""The servers that clients know of: which processes, from when to when, and as which writer."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.e2e.crashes.moments import now_us
from tests.kit.processes.child import Child


@dataclass(slots=True, eq=False)
class Serving:
    """One process that serves, or has served."""

    child: Child
    epoch: int = 0  # of a writer
    began_us: int = field(default_factory=now_us)
    ended_us: int | None = None

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self.child.listen

    @property
    def is_gone(self) -> bool:
        """Whether it certainly answers nothing any more."""
        return self.ended_us is not None

    def end(self) -> None:
        """It has ended."""
        if self.ended_us is None:
            self.ended_us = now_us()


@dataclass(slots=True)
class Servers:
    """All writers that ever served, oldest first, and the readers that are there now."""

    writers: list[Serving] = field(default_factory=list)
    readers: list[Serving] = field(default_factory=list)

    @property
    def writer(self) -> Serving:
        """The newest writer."""
        return self.writers[-1]
