"""WAL objects in the log of a member that are complete and committed, and so can be archived.

The log is read once, from its base on, as it becomes committed; only the position of each object is
kept. Its records are read again when it is archived. The protocols here are what an archiver needs
of a member.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from shalekv.errors import RecordTrimmed
from shalekv.format.quorum.member_files import MemberIdentity
from shalekv.protocol.membership import LogObject, complete_objects, is_archived
from shalekv.protocol.quorum.acceptor import AcceptorState
from shalekv.protocol.quorum_records import LogEnd, Record


class ArchiverStatus(Protocol):
    """Status of an archiver."""

    is_archiver: bool  # it archives now: it was appointed, or no other member did
    problem: str  # the last one; empty: none


class ArchivedLog(Protocol):
    """A member, as its archiver sees it."""

    @property
    def identity(self) -> MemberIdentity:
        """Ids and URL of the member."""
        ...

    @property
    def state(self) -> AcceptorState:
        """State of its log."""
        ...

    @property
    def archiver_id(self) -> bytes:
        """The member that the writer has appointed; empty: none."""
        ...

    @property
    def archiver_status(self) -> ArchiverStatus:
        """Status that the archiver reports."""
        ...

    @property
    def is_space_wanted(self) -> bool:
        """True if the log was too large for more records since `clear_space_wanted`."""
        ...

    def clear_space_wanted(self) -> None:
        """Clear `is_space_wanted`, because the archive is about to be polled."""

    async def records(self, first_lsn: int, last_lsn: int, *, bytes_max: int) -> Sequence[Record]:
        """Read records from `first_lsn` to `last_lsn`, at least one unless the log ends before.

        Raises `RecordTrimmed`, `LogDamaged`, `CorruptObject`.
        """
        ...

    async def wait_for_work(self, beyond_lsn: int, archiver_id: bytes) -> None:
        """Wait until more is committed, the appointed archiver changes, or space is wanted."""

    async def note_archived(self, wal_id: int, base: LogEnd) -> None:
        """Note that all objects up to `wal_id` are in the archive; trim the log up to `base`."""


class LogObjects:
    """The complete objects of one log that were not trimmed, oldest first."""

    def __init__(self, log: ArchivedLog, *, read_bytes: int) -> None:
        """Read nothing yet; `read_bytes` is the size of one read of the log."""
        self._log = log
        self._read_bytes = read_bytes
        self._base = log.state.log.base
        self._next_lsn = self._base.lsn + 1
        self._complete: deque[LogObject] = deque()
        self._incomplete: list[Record] = []  # of the last object, without payloads

    @property
    def complete(self) -> Sequence[LogObject]:
        """The complete objects, as of the last `scan`."""
        return self._complete

    async def scan(self) -> None:
        """Read the records that were committed since. Raises as `ArchivedLog.records`."""
        base = self._log.state.log.base
        if base != self._base:
            self._move_to(base)
        committed_lsn = self._log.state.committed_lsn
        while self._next_lsn <= committed_lsn:
            records = await self._log.records(
                self._next_lsn, committed_lsn, bytes_max=self._read_bytes
            )
            if not records:
                return
            self._next_lsn = records[-1].lsn + 1
            self._incomplete += [replace(record, payload=b"") for record in records]
            found = complete_objects(self._incomplete, committed_lsn)
            self._complete += found
            count = 0 if not found else found[-1].last.lsn - self._incomplete[0].lsn + 1
            del self._incomplete[:count]

    def waiting(self, tip: int | None) -> list[LogObject]:
        """Return the objects that are still to be archived if the archive ends with `tip`."""
        committed_lsn = self._log.state.committed_lsn
        return [
            each
            for each in self._complete
            if not is_archived(each.wal_id, tip) and each.last.lsn <= committed_lsn
        ]

    async def read(self, each: LogObject) -> Sequence[Record]:
        """Read the records of one object. Raises as `ArchivedLog.records`."""
        return await self._read(each.first_lsn, each.last.lsn)

    async def read_end(self, each: LogObject) -> Sequence[Record]:
        """Read the last records of one object, back to the last one that has a payload."""
        found: Sequence[Record] = ()
        for lsn in range(each.last.lsn, each.first_lsn - 1, -1):
            found = [*await self._read(lsn, lsn), *found]
            if found[0].payload:
                break
        return found

    async def _read(self, first_lsn: int, last_lsn: int) -> Sequence[Record]:
        found: list[Record] = []
        while (next_lsn := first_lsn + len(found)) <= last_lsn:
            records = await self._log.records(next_lsn, last_lsn, bytes_max=self._read_bytes)
            if not records:  # the log was emptied, and is being refilled
                raise RecordTrimmed(f"record {next_lsn} is not in the log any more")
            found += records
        return found

    def _move_to(self, base: LogEnd) -> None:
        """Follow the base of the log, which was trimmed up to there or reset."""
        if all(each.last != base for each in self._complete):
            self._next_lsn = base.lsn + 1
            self._complete.clear()
            self._incomplete.clear()
        self._base = base
        while self._complete and self._complete[0].last.lsn <= base.lsn:
            self._complete.popleft()
