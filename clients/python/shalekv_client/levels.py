"""How new a read must be, and when a write counts as done. The numbers are the wire's."""

from __future__ import annotations

import enum


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
