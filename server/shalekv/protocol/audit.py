"""What a check of a database finds."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FindingKind(enum.StrEnum):
    """What is wrong. The first ones are the errors of the format (`shalekv.errors`)."""

    BAD_MAGIC = "bad_magic"
    UNSUPPORTED_VERSION = "unsupported_version"
    TRUNCATED = "truncated"
    BAD_CHECKSUM = "bad_checksum"
    WRONG_OBJECT = "wrong_object"
    BAD_STRUCTURE = "bad_structure"
    MISSING = "missing"  # it was written, and is not there
    UNREADABLE = "unreadable"  # the store does not give it
    MANIFEST_FIELD = "manifest_field"  # fields of one manifest contradict each other
    MANIFEST_ORDER = "manifest_order"  # what never goes down went down (I5)
    SST_ROW = "sst_row"  # what the manifest says of an SST cannot be
    SST_MISMATCH = "sst_mismatch"  # the SST is not as the manifest says
    LEVEL_OVERLAP = "level_overlap"  # two SSTs of one sorted run overlap
    LEVEL_SEQUENCE = "level_sequence"  # sources that overlap are not ordered by sequence number
    LEVEL_SECTION = "level_section"  # entries that have no place in this level
    REPEATED_KEY = "repeated_key"  # two versions of a key in one SST of the levels
    STALE_VERSION = "stale_version"  # a version above an equal or newer one
    WAL_SEQUENCE = "wal_sequence"  # slot order is not sequence order (I4)
    WAL_EPOCH = "wal_epoch"  # a slot of a writer that cannot have written it (I3)
    WAL_BOUNDARY = "wal_boundary"  # a slot is on the other side of c than its numbers
    LOAD = "load"  # a load is committed, and its files are not protected
    ORIGIN = "origin"  # another database does not keep the SSTs that both share
    SNAPSHOT_CHECKSUM = "snapshot_checksum"  # a snapshot names another manifest than there is
    ORPHAN = "orphan"  # nothing names it, no lease protects it: the collector's business

    @property
    def is_damage(self) -> bool:
        """Whether something is wrong with the database."""
        return self not in (FindingKind.ORPHAN, FindingKind.UNREADABLE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found: in which object, what, and at which byte if at one."""

    name: str
    kind: FindingKind
    problem: str
    offset: int | None = None
