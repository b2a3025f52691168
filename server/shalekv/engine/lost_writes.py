"""The log line of each write that was accepted and will not be acknowledged."""

from __future__ import annotations

import structlog

from shalekv.errors import ShaleError
from shalekv.write.commit import Commit

log = structlog.get_logger()


def report_lost(commit: Commit, error: ShaleError) -> None:
    """Log that the commit is lost because of `error`; of one that writes nothing, nothing is."""
    if not commit.writes:
        return
    first = (*commit.entries[:1], *commit.range_tombstones[:1])
    log.error(
        "write lost",
        reason=error.reason,
        seq=commit.seq,
        keys=len(commit.entries),
        range_deletes=len(commit.range_tombstones),
        first_key=repr(first[0].key[:64]) if first else "",
        load_id=commit.load.load_id if commit.load else "",
    )
