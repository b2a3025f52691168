"""Mutants of safekeepers and of writers that commit to them: disks, replies, elections, archive."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shalekv.core.quorum import election
from shalekv.core.quorum.acceptor import Effect, Reply
from shalekv.core.quorum.archiving import LogObject, complete_objects, is_archived
from shalekv.core.quorum.election import Candidacy, Leader
from shalekv.core.quorum.messages import Health, ToProposer
from shalekv.core.quorum.record import Ballot
from shalekv.engine.quorum import opening
from shalekv.engine.quorum.links import TailPiece
from shalekv.roles.safekeeper import service
from shalekv.roles.safekeeper.log_objects import LogObjects
from shalekv.roles.safekeeper.member import Member
from shalekv.settings import SafekeeperSettings
from shalekv.store.member_log.log import MemberLog
from tests.sim.planting import mutant

_carry_out = Member._carry_out  # noqa: SLF001 - what is replaced


def _reply_first(self: Member, effects: Sequence[Effect]) -> Future[ToProposer | None]:
    _ = _carry_out(self, effects)
    reply: Future[ToProposer | None] = asyncio.get_running_loop().create_future()
    reply.set_result(next((e.message for e in effects if isinstance(e, Reply)), None))
    return reply


def _flush_without_sync(self: MemberLog) -> None:
    self._durable_lsn = self._index.last.lsn
    self._synced.note(self._bound())


def _save_nothing(self: MemberLog, promise: Ballot, health: Health) -> None:
    del self, promise, health


def _commit_by_one(leader: Leader) -> Leader:
    reached = max(leader.flushed.values(), default=0)
    if reached < leader.first_own_lsn:
        return leader
    return replace(leader, committed_lsn=max(leader.committed_lsn, reached))


async def _scan_all(self: LogObjects) -> None:
    """What was written, whoever has it, is looked at as if it were committed."""
    base = self._log.state.log.base
    if base != self._base:
        self._move_to(base)
    last_lsn = self._log.state.log.last.lsn
    while self._next_lsn <= last_lsn:
        records = await self._log.records(self._next_lsn, last_lsn, bytes_max=self._read_bytes)
        if not records:
            return
        self._next_lsn = records[-1].lsn + 1
        self._rest += [replace(record, payload=b"") for record in records]
        found = complete_objects(self._rest, last_lsn)
        self._complete += found
        count = 0 if not found else found[-1].last.lsn - self._rest[0].lsn + 1
        del self._rest[:count]


def _all_waiting(self: LogObjects, tip: int | None) -> list[LogObject]:
    return [each for each in self._complete if not is_archived(each.wal_id, tip)]


async def _replay_nothing(*_arguments: Any) -> None:
    """The archive is believed to be all there is."""


async def _tail_all(
    member: Member, first_wal_id: int, settings: SafekeeperSettings
) -> AsyncIterator[TailPiece]:
    next_lsn = member.first_of_object(first_wal_id)
    yield TailPiece((), member.state.committed_lsn)
    while True:
        last_lsn = member.state.log.last.lsn
        if next_lsn > last_lsn:
            next_lsn = min(next_lsn, last_lsn + 1)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await member.wait_committed(last_lsn)
            member.check_readable(next_lsn)
            continue
        records = await member.records(next_lsn, last_lsn, bytes_max=settings.piece_bytes_max)
        if records:
            next_lsn = records[-1].lsn + 1
            yield TailPiece(records, records[-1].lsn)


def _lowest(self: Candidacy) -> bytes:
    return min(self.votes, key=lambda each: self.votes[each].log.last.rank)


MUTANTS = (
    mutant("a safekeeper replies before its sync", (Member, "_carry_out", _reply_first), seeds=10),
    mutant(
        "a safekeeper does not sync its log", (MemberLog, "flush", _flush_without_sync), seeds=10
    ),
    mutant("a promise is kept in memory only", (MemberLog, "_save", _save_nothing), seeds=10),
    mutant("one safekeeper is enough", (election, "_with_commit", _commit_by_one), seeds=20),
    mutant(
        "archive before commit",
        (LogObjects, "scan", _scan_all),
        (LogObjects, "waiting", _all_waiting),
        seeds=20,
        hint=1,
    ),
    mutant(
        "open with the archive alone",
        (opening, "_replay_records", _replay_nothing),
        seeds=20,
        hint=7,
    ),
    mutant("a tail shows what is not committed", (service, "tail", _tail_all), seeds=20, hint=4),
    mutant(
        "the log of the lowest rank wins",
        (Candidacy, "donor_id", property(_lowest)),
        seeds=20,
        hint=6,
    ),
)
