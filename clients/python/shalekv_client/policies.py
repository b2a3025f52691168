"""The options of a client and of its calls.

A client chooses to which servers its reads go, and what they guarantee together. A call chooses how
new the state of a read must be, and when a write is acknowledged.
"""

from __future__ import annotations

import enum


class ReadPolicy(enum.StrEnum):
    """The choice of the server for a read."""

    WRITER = "writer"  # the writer, which has the newest state
    ANY = "any"  # the readers in turn, and the writer when no reader serves
    NEAREST = "nearest"  # the server that answers soonest, which may be the writer


class Consistency(enum.StrEnum):
    """The guarantee that the reads of one client give together."""

    SESSION = "session"  # reads see the client's writes, and never an older state than before
    NONE = "none"  # each read may see any state


class Wire(enum.StrEnum):
    """The implementation of gRPC by which a client talks to servers."""

    NATIVE = "native"  # `shalekv_wire`, which is part of this package
    GRPCIO = "grpcio"  # Google's, the fallback: it needs many times the CPU


MESSAGE_BYTES_MAX = 68 * 1024 * 1024  # the server's default
UNANSWERED_BYTES_MAX = 8 * 1024 * 1024  # of one session; the server's default


class Destination(enum.Enum):
    """The servers that can answer a call."""

    WRITER = "writer"  # the writer alone
    BY_POLICY = "by policy"  # any server: the policy of the client decides


class ReadLevel(enum.Enum):
    """The state that a read sees. The numbers are those of the protocol."""

    COMMITTED = 1  # the newest durable state that the server knows; the default
    LINEARIZABLE = 2  # after the server has made sure that no other writer took over
    UNCOMMITTED = 3  # the newest state in memory; a crash may revoke it


class Durability(enum.Enum):
    """The time at which a write is acknowledged. The numbers are those of the protocol."""

    DURABLE = 1  # once it is durable as the database defines it; the default
    MEMORY = 2  # as soon as the writer has ordered it; a crash may lose it
    QUORUM = 3  # once a majority of safekeepers has it on disk; with safekeepers DURABLE means this
    ARCHIVED = 4  # once it is in the object store, which with safekeepers is later


class Role(enum.Enum):
    """The role of a server. The numbers are those of the protocol."""

    WRITER = 1  # the one process that accepts writes
    READER = 2  # a replica that follows it
