"""What can be wrong with a quorum of safekeepers."""

from __future__ import annotations

from shalekv.errors.database import DatabaseError
from shalekv.errors.requests import Overloaded
from shalekv.errors.root import ShaleError


class QuorumUnavailable(ShaleError):
    """No majority of the safekeepers answers. Nothing was applied; try again later."""

    reason = "QUORUM_UNAVAILABLE"


class LogFull(Overloaded):
    """A majority of the safekeepers has no room for more. Nothing was applied; try again later."""

    reason = "LOG_FULL"


class LogBehindArchive(DatabaseError):
    """The safekeepers that answered know less than the archive: a majority has lost its records."""

    reason = "LOG_BEHIND_ARCHIVE"


class NotAMember(ShaleError):
    """A safekeeper does not have this database, or as another member than it was asked for."""

    reason = "NOT_A_MEMBER"


class LogDamaged(ShaleError):
    """A safekeeper has lost records that it had acknowledged, and waits to be filled again."""

    reason = "LOG_DAMAGED"


class RecordTrimmed(ShaleError):
    """A record is not in the log of a safekeeper any more: it is in the archive."""

    reason = "RECORD_TRIMMED"
