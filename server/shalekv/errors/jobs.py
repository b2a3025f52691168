"""Why a job has failed: a compaction, a load, a backup."""

from __future__ import annotations

from shalekv.errors.root import ShaleError


class LeaseLost(ShaleError):
    """The lease of a job has expired, and what it wrote may be deleted. Nothing was published."""

    reason = "LEASE_LOST"


class PartFailed(ShaleError):
    """A process that merged a part of a compaction has failed. Nothing was published."""

    reason = "PART_FAILED"


class LoadUnknown(ShaleError):
    """A load was registered too long ago, or never: whether it was committed is not known here."""

    reason = "LOAD_UNKNOWN"


class BackupNotFound(ShaleError):
    """There is no such backup at this URL. List those that there are."""

    reason = "BACKUP_NOT_FOUND"


class BackupBusy(ShaleError):
    """Backups are made and deleted at this URL at the same time. Try again when one has ended."""

    reason = "BACKUP_BUSY"
