"""Objects as a collector sees them, and what may become of each."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Folder(enum.StrEnum):
    """Where an object is, in the order in which garbage is deleted.

    Manifests first: one that is there never names what is gone. Within a folder by name, so that
    what a crash leaves of the WAL has no hole.
    """

    MANIFEST = "manifest"
    WAL = "wal"
    LEVELS = "levels"


class Reason(enum.StrEnum):
    """Why an object stays, or goes."""

    CURRENT = "current manifest"
    SNAPSHOT = "pinned by snapshot"
    LEASE = "leased"
    PENDING_LOAD = "pending load"
    FENCE = "fence"
    NOT_BELOW_C = "not below c"
    RETAINED = "wal retention"
    YOUNG = "not old enough"
    YOUNG_FOREIGN = "not ours, not old enough"

    INACTIVE = "inactive manifest"
    BELOW_C = "below c"
    UNREACHABLE = "unreachable"
    OLD_FOREIGN = "not ours"


_GOING = frozenset(
    {
        Reason.INACTIVE,
        Reason.BELOW_C,
        Reason.UNREACHABLE,
        Reason.OLD_FOREIGN,
    }
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of an object: `detail` says for whom it stays."""

    reason: Reason
    detail: str = ""

    @property
    def goes(self) -> bool:
        """Whether the object may be deleted."""
        return self.reason in _GOING


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as it was listed. One that has neither number nor SST id is not ours."""

    folder: Folder
    name: str
    size_bytes: int
    modified_ms: int  # by the store's clock
    number: int | None = None  # of a manifest or a WAL object
    sst_id: bytes | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether its name is none that we give."""
        return self.number is None and self.sst_id is None
