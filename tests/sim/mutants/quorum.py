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
from tests.sim.planting import Mutant

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
    Mutant(
        "a safekeeper replies before its sync",
        "A reply goes out when the message is taken, and not when what it rests on is durable.",
        [(Member, "_carry_out", _reply_first)],
        "quorum",
        ("I11",),
        seeds=10,
    ),
    Mutant(
        "a safekeeper does not sync its log",
        "Records are written, and believed to be durable.",
        [(MemberLog, "flush", _flush_without_sync)],
        "quorum",
        ("I11",),
        seeds=10,
    ),
    Mutant(
        "a promise is kept in memory only",
        "A safekeeper that starts again follows a writer that it has promised not to.",
        [(MemberLog, "_save", _save_nothing)],
        "quorum",
        ("I11",),
        seeds=10,
    ),
    Mutant(
        "one safekeeper is enough",
        "A record counts as committed when the first member has it.",
        [(election, "_with_commit", _commit_by_one)],
        "quorum",
        ("I1", "I11"),
        seeds=20,
    ),
    Mutant(
        "archive before commit",
        "A member archives whatever is in its log.",
        [(LogObjects, "scan", _scan_all), (LogObjects, "waiting", _all_waiting)],
        "quorum",
        ("I11",),
        seeds=20,
        hint=1,
    ),
    Mutant(
        "open with the archive alone",
        "A writer does not replay the records that are not archived yet.",
        [(opening, "_replay_records", _replay_nothing)],
        "quorum",
        ("I1", "I11"),
        seeds=20,
        hint=7,
    ),
    Mutant(
        "a tail shows what is not committed",
        "A replica is sent records that no majority has yet.",
        [(service, "tail", _tail_all)],
        "quorum",
        ("I6",),
        seeds=20,
        hint=4,
    ),
    Mutant(
        "the log of the lowest rank wins",
        "A new writer takes over the log of the voter that has least.",
        [(Candidacy, "donor_id", property(_lowest))],
        "quorum",
        ("I11", "I13"),
        seeds=20,
        hint=6,
    ),
)
