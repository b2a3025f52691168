"""The requests that a process has sent to a store, by the classes in which stores charge for them.

Whoever talks to a store counts here what goes over the wire: the pages of a list, the parts of an
upload, and every attempt of a request that is repeated.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

REFUSALS_MS = 1_000.0


class RequestKind(enum.StrEnum):
    """What a request is charged as."""

    WRITE = "write"  # put, copy, part of an upload, its beginning and its end
    LIST = "list"  # one page
    READ = "read"  # get, ranged get, head
    DELETE = "delete"  # of one object or of a batch
    RECORD_WRITE = "record_write"  # insert, update or delete in a transactional store
    RECORD_READ = "record_read"


class RequestCounts:
    """A number for each kind, which only grows."""

    def __init__(self) -> None:
        """Nothing was sent yet."""
        self._counts = dict.fromkeys(RequestKind, 0)
        self._total: RequestCounts | None = None
        self.was_accepted = False  # the store has answered a request of this process with success
        self.refusals_ms = REFUSALS_MS  # so long a refused request is sent again, if it was

    def add(self, kind: RequestKind, count: int = 1) -> None:
        """Count `count` requests more."""
        self._counts[kind] += count
        if self._total is not None:
            self._total.add(kind, count)

    def add_up_in(self, total: RequestCounts) -> None:
        """Whatever is counted from now on is counted in `total`, too."""
        self._total = total

    @property
    def by_kind(self) -> Mapping[RequestKind, int]:
        """All kinds, those that were never sent included. It follows what is counted later."""
        return MappingProxyType(self._counts)

    @property
    def total(self) -> int:
        """Requests of all kinds."""
        return sum(self._counts.values())
