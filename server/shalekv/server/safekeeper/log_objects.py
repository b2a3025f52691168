"""Which objects of the archive the log of a member makes: those that are complete and committed.

The log is read once, from its base on, as it becomes committed; of each object only the place is
kept. Who archives an object reads its records again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from shalekv.errors import RecordTrimmed
from shalekv.format.member_files import MemberIdentity
from shalekv.protocol.acceptor import AcceptorState
from shalekv.protocol.membership import LogObject, complete_objects, is_archived
from shalekv.protocol.quorum_records import LogEnd, Record


class Archiving(Protocol):
    """What an archiver tells of itself."""

    is_archiver: bool  # by appointment, or because nobody else did
    problem: str  # the last one; empty: none


class ArchivedLog(Protocol):
    """What an archiver needs of a member."""

    @property
    def identity(self) -> MemberIdentity:
        """Who it is."""
        ...

    @property
    def state(self) -> AcceptorState:
        """What it has."""
        ...

    @property
    def archiver_id(self) -> bytes:
        """Whom the writer has appointed; empty: nobody."""
        ...

    @property
    def archiving(self) -> Archiving:
        """Where the archiver tells of itself."""
        ...

    @property
    def is_room_wanted(self) -> bool:
        """The log was too large for more records, since `note_looking`."""
        ...

    def note_looking(self) -> None:
        """What is in the archive is about to be looked at."""

    async def records(self, first_lsn: int, last_lsn: int, *, bytes_max: int) -> Sequence[Record]:
        """Records from `first_lsn` on, up to `last_lsn`, at least one unless the log ends before.

        Raises `RecordTrimmed`, `LogDamaged`, `CorruptObject`.
        """
        ...

    async def wait_called(self, beyond_lsn: int, archiver_id: bytes) -> None:
        """Wait until more is committed, another than `archiver_id` appointed, or room wanted."""

    async def note_archived(self, wal_id: int, base: LogEnd) -> None:
        """All objects up to `wal_id` were seen in the archive; trim the log up to `base`."""


class LogObjects:
    """The complete objects of one log that were not trimmed, oldest first."""

    def __init__(self, log: ArchivedLog, *, read_bytes: int) -> None:
        """Nothing is read yet; `read_bytes` are read at once."""
        self._log = log
        self._read_bytes = read_bytes
        self._base = log.state.log.base
        self._next_lsn = self._base.lsn + 1
        self._complete: deque[LogObject] = deque()
        self._rest: list[Record] = []  # of the object that is not complete yet, without payloads

    @property
    def complete(self) -> Sequence[LogObject]:
        """Those that are known since the last `scan`."""
        return self._complete

    async def scan(self) -> None:
        """Read what was committed since. Raises what `ArchivedLog.records` does."""
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
            self._rest += [replace(record, payload=b"") for record in records]
            found = complete_objects(self._rest, committed_lsn)
            self._complete += found
            count = 0 if not found else found[-1].last.lsn - self._rest[0].lsn + 1
            del self._rest[:count]

    def waiting(self, tip: int | None) -> list[LogObject]:
        """Those that are to be archived still, when the archive goes up to `tip`."""
        committed_lsn = self._log.state.committed_lsn
        return [
            each
            for each in self._complete
            if not is_archived(each.wal_id, tip) and each.last.lsn <= committed_lsn
        ]

    async def read(self, each: LogObject) -> Sequence[Record]:
        """The records of one. Raises what `ArchivedLog.records` does."""
        return await self._read(each.first_lsn, each.last.lsn)

    async def read_end(self, each: LogObject) -> Sequence[Record]:
        """The last records of one, one with a payload among them if there is any."""
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
            if not records:  # the log was emptied, and is filled anew
                raise RecordTrimmed(f"record {next_lsn} is not in the log any more")
            found += records
        return found

    def _move_to(self, base: LogEnd) -> None:
        """The log was trimmed there, or begun anew."""
        if all(each.last != base for each in self._complete):
            self._next_lsn = base.lsn + 1
            self._complete.clear()
            self._rest.clear()
        self._base = base
        while self._complete and self._complete[0].last.lsn <= base.lsn:
            self._complete.popleft()
