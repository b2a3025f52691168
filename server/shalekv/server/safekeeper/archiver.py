"""Archiver of one member: uploads its log to the archive, in order, and trims what is there.

    wait   for commits, or until the next poll is due
    poll   list the archive, read the manifest; trim objects that were listed (CE13)
    add    the appointed member uploads complete objects, or another one after a long wait (CE7)

Several members may archive at once. That costs requests, but is safe: names are created once, and
the bytes of an object are a function of the log (CE16). When the archive contradicts the log, an
archiver raises an alarm, and neither adds nor trims any more until its process is restarted.
"""

from __future__ import annotations

import asyncio
import math

import structlog

from shalekv.clock import NOW_MS, Clock
from shalekv.errors import (
    DatabaseMismatch,
    DatabaseNotFound,
    IllegalState,
    NotAMember,
    RecordTrimmed,
    ShaleError,
    Stopping,
    StoreBroken,
)
from shalekv.format.names import wal_name
from shalekv.protocol.membership import (
    Configuration,
    LogObject,
    TakeoverTimer,
    is_archived,
    takeover_place,
    trim_mark,
)
from shalekv.protocol.quorum_records import LogHealth
from shalekv.server.safekeeper.log_objects import ArchivedLog, LogObjects
from shalekv.settings import MIB, ArchivingSettings
from shalekv.store.cas import CasStore
from shalekv.write.quorum.archive import Archive

log = structlog.get_logger()

MANIFEST_INTERVAL_MS = 60_000  # between checks that a manifest names this member: one request
PARALLEL_UPLOADS = 4  # WAL objects of one database
UPLOAD_TIMEOUT_MS = 60_000  # an upload of 8 MiB takes so long at 1 Mbit/s
PAUSE_MS = 20  # between checks for complete objects: it bounds the work, and is a part of an upload
READ_BYTES = 4 * MIB  # of a log at once, to find complete objects
SPACE_POLL_MS = 500  # interval between polls while space is wanted
_BATCH_PER_UPLOAD = 8  # objects for each parallel upload, before the next poll


class PollTimer:
    """The times of an archiver's polls, by the monotonic clock."""

    def __init__(self, clock: Clock, settings: ArchivingSettings) -> None:
        """The first poll is due at once."""
        self._clock = clock
        self._settings = settings
        self._due_ms = self._manifest_due_ms = clock.monotonic_ms()
        self._polled_ms = -math.inf

    @property
    def is_manifest_due(self) -> bool:
        """Return whether the poll that has begun must read the manifest in any case."""
        return self._polled_ms >= self._manifest_due_ms

    def left_ms(self, *, is_space_wanted: bool) -> float:
        """Time until the next poll, which comes sooner while space is wanted."""
        due_ms = self._due_ms
        if is_space_wanted:
            due_ms = min(due_ms, self._polled_ms + SPACE_POLL_MS)
        return due_ms - self._clock.monotonic_ms()

    def begin(self) -> None:
        """Begin a poll. Until `end` is called the next poll is due at once."""
        self._polled_ms = self._clock.monotonic_ms()

    def end(self, *, is_manifest_read: bool) -> None:
        """End a poll; `is_manifest_read` says that the manifest need not be read again soon."""
        self._due_ms = self._polled_ms + self._settings.archive_list_interval_ms
        if is_manifest_read:
            self._manifest_due_ms = self._polled_ms + MANIFEST_INTERVAL_MS


class Archiver:
    """The archiver of one member. It reports to the member's `archiver_status`."""

    def __init__(self, member: ArchivedLog, store: CasStore, settings: ArchivingSettings) -> None:
        """`store` is that of the database, at the URL of the member."""
        identity = member.identity
        self._member = member
        self._store = store
        self._settings = settings
        self._archive = Archive(store, identity.database_id, upload_timeout_ms=UPLOAD_TIMEOUT_MS)
        self._objects = LogObjects(member, read_bytes=READ_BYTES)
        # All objects up to this one are in the archive: they were listed or uploaded here, or the
        # log begins behind them.
        self._tip = member.state.log.base.wal_id
        self._known: set[int] = set()  # objects that were added or compared here, and not trimmed
        self._takeover_timer = TakeoverTimer()
        self._timer = PollTimer(store.runtime.clock, settings)
        self._was_found = False
        self._is_named = True  # by the manifest; the node deletes members that are not
        self.alarm: IllegalState | DatabaseMismatch | None = None

    async def run(self) -> None:
        """Archive until cancelled, until the member has ended, or until an alarm.

        Raises `StoreBroken` when this process may not write to the store any more.
        """
        failures = 0
        while True:
            try:
                if self._member.state.is_untouched:  # perhaps no manifest will ever name it
                    await self._member.wait_for_work(0, b"")
                seen_lsn = self._member.state.committed_lsn
                seen_archiver_id = self._member.archiver_id
                await self._round()
                await self._wait(seen_lsn, seen_archiver_id)
            except StoreBroken:
                raise
            except (NotAMember, Stopping):
                return
            except RecordTrimmed as error:  # the log was reset while it was read
                self._log.info("the log has moved on", problem=str(error))
                await self._store.pause(1)
            except (IllegalState, DatabaseMismatch) as error:
                self._raise_alarm(error)
                return
            except (ShaleError, OSError) as error:  # OSError: too many open files, for example
                failures += 1
                self._log_failure(error, failures)
                await self._store.pause(failures)
            else:
                failures = 0
                self._member.archiver_status.problem = ""

    def _raise_alarm(self, error: IllegalState | DatabaseMismatch) -> None:
        self._log.error("ARCHIVING STOPPED", reason=error.reason, problem=str(error))
        self.alarm = error
        self._member.archiver_status.problem = str(error)
        self._member.archiver_status.is_archiver = False

    def _log_failure(self, error: Exception, failures: int) -> None:
        if isinstance(error, DatabaseNotFound) and not self._was_found:
            return  # a member is admitted before the first manifest is written
        self._log.warning("archiving failed", failures=failures, problem=str(error))
        self._member.archiver_status.problem = str(error)

    @property
    def _may_archive(self) -> bool:
        is_damaged = self._member.state.health is LogHealth.DAMAGED
        return self._is_named and not is_damaged

    async def _round(self) -> None:
        if self._poll_in_ms < NOW_MS:
            await self._poll()
        is_turn = self._may_archive and self._is_turn()
        self._member.archiver_status.is_archiver = is_turn
        if is_turn:
            await self._objects.scan()
            await self._add(self._objects.waiting(self._tip))

    async def _wait(self, seen_lsn: int, seen_archiver_id: bytes) -> None:
        """Wait for later commits, an appointment, want of space, or the next poll."""
        if self._may_archive and self._is_turn() and self._objects.waiting(self._tip):
            return
        left_ms = max(self._poll_in_ms, 0)
        if self._member.is_space_wanted or not self._may_archive:
            await self._clock.sleep_ms(left_ms)
            return
        try:
            async with asyncio.timeout(left_ms / 1_000):
                await self._member.wait_for_work(seen_lsn, seen_archiver_id)
        except TimeoutError:
            return
        await self._clock.sleep_ms(PAUSE_MS)

    @property
    def _poll_in_ms(self) -> float:
        """Time until the next poll."""
        return self._timer.left_ms(is_space_wanted=self._member.is_space_wanted)

    @property
    def _clock(self) -> Clock:
        return self._store.runtime.clock

    @property
    def _member_id(self) -> bytes:
        return self._member.identity.member_id

    @property
    def _log(self) -> structlog.stdlib.BoundLogger:
        """The log, with the database in each line."""
        identity = self._member.identity
        bound: structlog.stdlib.BoundLogger = log.bind(
            database_id=identity.database_id.hex(), url=self._store.url
        )
        return bound

    # Appointment and takeover.

    def _is_turn(self) -> bool:
        appointed_id = self._member.archiver_id
        if appointed_id == self._member_id:
            return True
        if not self._was_found:
            return False
        configuration = Configuration.of(self._archive.manifest)
        return self._takeover_timer.has_ended(
            self._clock.monotonic_ms(),
            takeover_ms=self._settings.archive_unappointed_ms,
            place=takeover_place(self._member_id, configuration, appointed_id),
        )

    # Polling.

    async def _poll(self) -> None:
        """List the archive if objects may be trimmed; else read the manifest when it is due."""
        self._timer.begin()
        self._member.clear_space_wanted()
        if self._may_archive:
            await self._objects.scan()
        if self._may_archive and self._objects.complete:
            await self._list_and_trim()
        elif self._timer.is_manifest_due:
            await self._archive.refresh()
        else:
            self._timer.end(is_manifest_read=False)
            return
        self._was_found = True
        manifest = self._archive.manifest
        named = Configuration.of(manifest).everyone
        self._is_named = any(member.id == self._member_id for member in named)
        # If it is not named, soon again: the manifest may be about to name it.
        self._timer.end(is_manifest_read=self._is_named)

    async def _list_and_trim(self) -> None:
        """List the archive, and trim the objects listed, by whichever member archived (CE13)."""
        base = self._member.state.log.base
        tip = await self._archive.find_tip()
        for known in (base.wal_id, self._tip):
            if known is not None and not is_archived(known, tip):
                missing = wal_name(0 if tip is None else tip + 1)
                raise IllegalState(
                    f"{self._store.url}: {missing} was in the archive, is not compacted, and is "
                    "gone: somebody has deleted it. This safekeeper archives nothing more, and "
                    "keeps what it has in its log"
                )
        self._tip = tip
        if tip is not None:
            await self._compare(tip)
            committed_lsn = self._member.state.committed_lsn
            mark = trim_mark(self._objects.complete, seen_wal_id=tip, committed_lsn=committed_lsn)
            await self._member.note_archived(tip, mark or base)
            await self._objects.scan()
            self._known &= {each.wal_id for each in self._objects.complete}
        waiting = self._objects.waiting(tip)
        first_waiting = waiting[0].wal_id if waiting else None
        self._takeover_timer = self._takeover_timer.polled(
            first_waiting, self._clock.monotonic_ms()
        )

    async def _compare(self, tip: int) -> None:
        """Compare the last objects that other members have archived with the log.

        An archiver stops at the first object that contradicts its log, with no more behind it than
        its parallel uploads. So it is enough to compare the last ones. An opening writer compares
        more (`COMPARED_MAX`), since archivers of earlier versions could upload more in parallel.
        """
        others = [
            each
            for each in self._objects.complete
            if is_archived(each.wal_id, tip) and each.wal_id not in self._known
        ]
        for each in others[-PARALLEL_UPLOADS:]:
            await self._archive.check(each.wal_id, await self._objects.read_end(each))
            self._known.add(each.wal_id)

    # Adding.

    async def _add(self, waiting: list[LogObject]) -> None:
        """Upload some of these objects, and move `_tip` up to the first gap.

        An upload begins when the object `PARALLEL_UPLOADS` before it, and all earlier ones, are
        archived. So fewer objects than that are behind a gap, or behind an object that contradicts
        the log.
        """
        batch = waiting[: PARALLEL_UPLOADS * _BATCH_PER_UPLOAD]
        if not batch:
            return
        adding: dict[int, asyncio.Task[None]] = {}  # by object
        failures: list[ShaleError] = []

        async def add(each: LogObject) -> None:
            try:
                await self._archive.add(each.wal_id, await self._objects.read(each))
                self._known.add(each.wal_id)
            except ShaleError as error:  # raised below, because the group would wrap it
                failures.append(error)

        async with asyncio.TaskGroup() as uploads:
            for number, each in enumerate(batch):
                before = (
                    adding.get(batch[number - PARALLEL_UPLOADS].wal_id)
                    if number >= PARALLEL_UPLOADS
                    else None
                )
                if before is not None:
                    await before
                if failures:
                    break
                if each.wal_id not in self._known:
                    adding[each.wal_id] = uploads.create_task(add(each))
        await self._advance(batch)
        if failures:
            raise max(failures, key=_weight)

    async def _advance(self, batch: list[LogObject]) -> None:
        for each in batch:
            if each.wal_id not in self._known:
                break
            self._tip = each.wal_id
        if self._tip is not None:
            await self._member.note_archived(self._tip, self._member.state.log.base)


def _weight(error: ShaleError) -> int:
    """Rank errors: `StoreBroken`, then those that raise the alarm, then others."""
    return 2 * isinstance(error, StoreBroken) + isinstance(error, IllegalState | DatabaseMismatch)
