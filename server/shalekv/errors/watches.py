"""Why a watch can't begin, or has ended."""

from __future__ import annotations

from shalekv.errors.root import ShaleError


class WalCollected(ShaleError):
    """A watch begins before the oldest commit that is left of the WAL. Read the state anew."""

    reason = "WAL_COLLECTED"

    def __init__(self, *, start_seq: int, oldest_seq: int) -> None:
        """Where the watch was to begin, and the first commit with which it can."""
        super().__init__(
            f"the commits from {start_seq} on are not all in the WAL any more: the oldest that a "
            f"watch can begin with is {oldest_seq}. Scan, and watch from behind that scan's seq"
        )
        self.oldest_seq = oldest_seq


class WalUnprotected(ShaleError):
    """A lease was asked for WAL objects that may be deleted at any moment. Ask for later ones."""

    reason = "WAL_UNPROTECTED"

    def __init__(self, *, wal_id_min: int, first_wal_id: int) -> None:
        """The first object that was to be kept, and the first that can be."""
        super().__init__(
            f"WAL object {wal_id_min} may be deleted at any moment: nothing keeps what is before "
            f"{first_wal_id}. Begin there, or read the state anew"
        )
        self.wal_id_min = wal_id_min
        self.first_wal_id = first_wal_id


class WatchTooSlow(ShaleError):
    """A watch was closed: it was not taken in time. Open it again where it was closed."""

    reason = "WATCH_TOO_SLOW"

    def __init__(self, message: str, *, next_seq: int) -> None:
        """All before commit `next_seq` was told."""
        super().__init__(message)
        self.next_seq = next_seq
