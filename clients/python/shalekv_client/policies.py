"""What a client may choose: which servers its reads go to, and what they promise together."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ReadPolicy(enum.StrEnum):
    """Which server a read goes to."""

    WRITER = "writer"  # the writer: what it shows is the newest state
    ANY = "any"  # the readers in turn, and the writer when none of them serves
    NEAREST = "nearest"  # whichever answers soonest, the writer included


class Consistency(enum.StrEnum):
    """What the reads of one client promise together."""

    SESSION = "session"  # they see its own writes, and never an older state than one before
    NONE = "none"  # each is a state of its own


class Destination(enum.Enum):
    """Who can answer a call."""

    WRITER = "writer"  # the writer alone
    BY_POLICY = "by policy"  # any server: the policy of the client decides


@dataclass(frozen=True, slots=True)
class Routing:
    """How a client that knows several servers divides its calls between them."""

    reads: ReadPolicy = ReadPolicy.ANY
    hedge_ms: int | None = None  # after so long a read is sent to a second server; None: never
    replica_wait_ms: int = 1_000  # a reader that has not answered by then is passed over
    # A writer that is silent for so long is asked whether it is one still; doubled each time.
    writer_silence_ms: int = 2_000

    def __post_init__(self) -> None:
        """Raises ValueError for times that are none."""
        for name in ("hedge_ms", "replica_wait_ms", "writer_silence_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")


# --- levels
# How new a read must be, and when a write counts as done. The numbers are the wire's.


class ReadLevel(enum.Enum):
    """How new the state must be that a read sees."""

    COMMITTED = 1  # the newest durable state that the server knows; the default
    LINEARIZABLE = 2  # after the server has made sure that no other writer took over
    UNCOMMITTED = 3  # the newest state in memory; may show what a crash takes back


class Durability(enum.Enum):
    """When a write is acknowledged."""

    DURABLE = 1  # when what the database calls durable has it; the default
    MEMORY = 2  # as soon as the writer has ordered it; a crash may lose it
    QUORUM = 3  # when a majority of safekeepers has it on disk; so is DURABLE where there are some
    ARCHIVED = 4  # when it is in the object store, which with safekeepers is later


class Role(enum.Enum):
    """What the process that answered is."""

    WRITER = 1  # the one process that accepts writes
    READER = 2  # a replica that follows it
