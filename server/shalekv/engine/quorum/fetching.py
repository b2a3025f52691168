"""What a writer that was elected takes over: the records that are not in the archive."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from shalekv.core.quorum.archiving import archive_tip, is_archived
from shalekv.engine.levels.parallel import in_parallel
from shalekv.engine.wal import list_wal
from shalekv.errors import (
    CorruptObject,
    LogDamaged,
    NotAMember,
    QuorumUnavailable,
    RecordTrimmed,
)
from shalekv.manifest.fenced import FencedManifest
from shalekv.protocol.membership import Member
from shalekv.protocol.proposer import Candidacy, next_object
from shalekv.protocol.quorum_records import LogShape, Mark, Record
from shalekv.store.cas import CasStore
from shalekv.write.quorum.archive import Archive
from shalekv.write.quorum.electing import greet_one
from shalekv.write.quorum.links import LinkBroken
from shalekv.write.quorum.peer import BACKOFF, Way

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Fetched:
    """The end of the log that was elected."""

    archive_tip: int | None  # the last object that is in the archive with all before it
    base: Mark  # the last record that is archived
    records: Sequence[Record]  # those that follow

    @property
    def last(self) -> Mark:
        """The last record of the log."""
        return self.records[-1].mark if self.records else self.base

    @property
    def first_wal_id(self) -> int:
        """The object behind the archive."""
        return 0 if self.archive_tip is None else self.archive_tip + 1


# An archiver that is contradicted has uploaded no more behind that than it does at once, which is
# `archive_parallel_uploads`: so these, if they are what the log says, tell of all before them.
COMPARED_MAX = 64
COMPARED_AT_ONCE = 8


class _NotTheSame(Exception):
    """A member does not have the log that was elected. Its text says why."""


# What one member says, and another one need not, nor the same one later.
_NOT_THERE = (LinkBroken, NotAMember, RecordTrimmed, LogDamaged, CorruptObject, _NotTheSame)


async def fetch_unarchived(
    store: CasStore, manifest: FencedManifest, way: Way, candidacy: Candidacy
) -> Fetched:
    """The records of objects that are not in the archive, from a voter that has the elected log.

    What is archived of the log that was elected is compared with it. Raises `LogBehindArchive`,
    `IllegalState` when another object stands there, `QuorumUnavailable` after `vote_timeout_ms`,
    and as the manifest.
    """
    last = candidacy.donor_log.last
    members = {member.id: member for member in candidacy.configuration.everyone}
    same = [member_id for member_id, vote in candidacy.votes.items() if vote.log.last == last]
    same.sort(key=lambda member_id: member_id != candidacy.donor_id)
    clock, random = store.runtime.clock, store.runtime.random
    problems: dict[str, str] = {}
    attempt = 0
    try:
        async with asyncio.timeout(way.settings.vote_timeout_ms / 1_000):
            while True:
                member = members[same[attempt % len(same)]]
                tip = await _archive_tip(store, manifest)
                next_object(
                    last, archive_tip=tip, last_compacted=manifest.current.wal_id_last_compacted
                )
                try:
                    fetched, ends = await _fetch(way, member, last, tip)
                    await _compare(store, manifest, ends)
                    return fetched
                except _NOT_THERE as error:
                    log.warning("could not fetch", address=member.address, problem=str(error))
                    problems[member.address] = str(error)
                attempt += 1
                await clock.sleep_ms(BACKOFF.wait_ms(attempt, random))
    except TimeoutError:
        told = "; ".join(f"{address} ({problem})" for address, problem in problems.items())
        raise QuorumUnavailable(
            f"the end of the log could not be fetched within {way.settings.vote_timeout_ms} ms "
            f"from who has it: {told or 'no answer'}. Try again later"
        ) from None


async def _archive_tip(store: CasStore, manifest: FencedManifest) -> int | None:
    """How far the archive goes: c is read after the list (see `archive_tip`)."""
    folder = await list_wal(store, manifest.current.first_uncompacted_wal_id)
    return archive_tip(folder.filled, (await manifest.refresh()).wal_id_last_compacted)


async def _compare(store: CasStore, manifest: FencedManifest, ends: Mapping[int, Record]) -> None:
    """Compare objects with the last records that they hold (CE17)."""
    database_id = manifest.current.database_id
    archive = Archive(store, database_id, upload_timeout_ms=math.inf)  # nothing is uploaded
    left = [*ends.items()]

    async def work() -> None:
        while left:
            wal_id, record = left.pop()
            await archive.check(wal_id, [record])

    await in_parallel(work, min(len(left), COMPARED_AT_ONCE))


async def _fetch(
    way: Way, member: Member, last: Mark, tip: int | None
) -> tuple[Fetched, Mapping[int, Record]]:
    """From one member: what is not archived, and the ends of the last objects that are.

    It may have trimmed its log since it has voted.
    """
    log_now = (await greet_one(way, member)).log
    if log_now.last != last:
        raise _NotTheSame(f"its log ends with record {log_now.last.lsn}, not {last.lsn}")
    trimmed_wal_id = log_now.base.wal_id
    if trimmed_wal_id is not None and not is_archived(trimmed_wal_id, tip):
        # Archived since we looked, and what lies between would be replayed from nowhere.
        raise _NotTheSame(
            f"it has let go of WAL objects up to {trimmed_wal_id}, which the archive did not have "
            "when it was listed just before"
        )
    base = _known_archived(log_now, tip)
    records: list[Record] = []
    before = base
    ends: dict[int, Record] = {}  # by object, those with a payload
    if base.lsn == last.lsn:
        return Fetched(tip, base, ()), ends
    async for record in _records(way, member, base.lsn + 1):
        if not record.follows(before):
            raise _NotTheSame(f"record {record.lsn} does not follow record {before.lsn}")
        before = record.mark
        if is_archived(record.wal_id, tip):
            base = before
            if record.payload:
                ends[record.wal_id] = record
            if len(ends) > COMPARED_MAX:
                del ends[min(ends)]
        else:
            records.append(record)
    if before != last:
        raise _NotTheSame(f"its records end with {before.lsn}, not {last.lsn}")
    return Fetched(tip, base, records), ends


def _known_archived(log_now: LogShape, tip: int | None) -> Mark:
    """The last record before those that are compared, by what is known without their bytes."""
    before = -1 if tip is None else tip - COMPARED_MAX
    marks = [section.last for section in log_now.sections]
    archived = [m for m in marks if m.wal_id is not None and is_archived(m.wal_id, before)]
    return archived[-1] if archived else log_now.base


async def _records(way: Way, member: Member, first_lsn: int) -> AsyncIterator[Record]:
    pieces = way.links.fetch(member.address, way.place.database_id, member.id, first_lsn)
    async for piece in pieces:
        for record in piece:
            yield record
