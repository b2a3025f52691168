"""Mutants of safekeepers and of writers that commit to them: disks, replies, elections, archive."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shalekv.errors import ObjectNotFound, StoreRefused, StoreUnavailable
from shalekv.format.names import parse_temporary_name
from shalekv.jobs import switch_wal
from shalekv.protocol import membership as quorum_members
from shalekv.protocol.fencing import WriterId
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.membership import LogObject, MembershipStatus, complete_objects, is_archived
from shalekv.protocol.membership import Member as Named
from shalekv.protocol.quorum import proposer
from shalekv.protocol.quorum.acceptor import Effect, Reply
from shalekv.protocol.quorum.proposer import Candidacy, Leader, enter_quorum
from shalekv.protocol.quorum_records import Ballot, LogHealth, ToProposer
from shalekv.protocol.two_phase import CreateRecord, Destination
from shalekv.server import database
from shalekv.server.safekeeper import service
from shalekv.server.safekeeper.log_objects import LogObjects
from shalekv.server.safekeeper.member import LocalMember
from shalekv.server.safekeeper.membership_status import HostedMember
from shalekv.server.safekeeper.propose import TAIL_MESSAGE_BYTES_MAX
from shalekv.store.api import Created, CreateOutcome, Exists, Repaired, Unknown
from shalekv.store.safekeeper_log.log import MemberLog
from shalekv.store.two_phase.store import (
    Repair,
    SourceDeleter,
    TwoPhaseCreate,
    TwoPhaseStore,
    _Retry,
)
from shalekv.write.quorum import opening
from shalekv.write.quorum.links import DatabasePlace, Links, TailPiece
from tests.sim.planting import mutant


async def commit_first(self: TwoPhaseCreate, own: CreateRecord) -> CreateOutcome:
    try:
        is_ours = await self._records.commit(own)
        await self._plain.copy(own.source, own.destination.name)
    except ObjectNotFound:
        return await self._resolve_missing_source(own)
    except (StoreUnavailable, StoreRefused) as error:
        return Unknown(str(error))
    await self._completer.discard(own.source)
    return Created() if is_ours else Unknown("")


async def believe_in_copy(_self: TwoPhaseCreate, _own: CreateRecord, _cause: str) -> CreateOutcome:
    """A copy without an answer is taken for one that was made."""
    return Created()


async def believe_in_insert(_self: TwoPhaseCreate, _own: CreateRecord, _cause: str) -> None:
    """An insert without an answer is taken for one that was made."""


async def help_nobody(_self: TwoPhaseCreate, record: CreateRecord | None) -> Exists | _Retry:
    """Report that the object of an open record exists, without making it."""
    return Exists() if record is not None else _Retry(None)


async def take_over_the_living(
    _self: TwoPhaseCreate, record: CreateRecord | None
) -> Exists | _Retry:
    """A record is taken over although it could be completed."""
    if record is not None and record.is_committed:
        return Exists()
    return _Retry(record)


async def records_first(self: TwoPhaseStore, names: Iterable[str]) -> None:
    doomed = tuple(names)
    temporary = [name for name in doomed if parse_temporary_name(name) is not None]
    if temporary:
        await SourceDeleter(self._plain, self._records, self._runtime.random).delete(temporary)
    created = [name for name in doomed if parse_temporary_name(name) is None]
    await self._records.delete_committed([Destination(self.url, name) for name in created])
    await self._plain.delete(created)


async def forget_all(self: Repair, batch: list[CreateRecord]) -> int:
    """Records that may go do so although their objects are there."""
    await self._records.delete_committed([record.destination for record in batch])
    return len(batch)


async def complete_nothing(self: Repair) -> Repaired:
    return Repaired(forgotten=await self._forget())


TWO_PHASE = (
    mutant(
        "two phases: commit before the copy",
        (TwoPhaseCreate, "_carry_out", commit_first),
        seeds=20,
    ),
    mutant(
        "two phases: take an unanswered copy for made",
        (TwoPhaseCreate, "_resolve_copy", believe_in_copy),
        seeds=20,
        hint=1,
    ),
    mutant(
        "two phases: take an unanswered insert for made",
        (TwoPhaseCreate, "_resolve_record", believe_in_insert),
        seeds=20,
        hint=1,
    ),
    mutant(
        "two phases: do not help whoever is first",
        (TwoPhaseCreate, "_help_rival", help_nobody),
        seeds=20,
    ),
    mutant(
        "two phases: take over from the living",
        (TwoPhaseCreate, "_help_rival", take_over_the_living),
        seeds=20,
    ),
    mutant("two phases: delete records first", (TwoPhaseStore, "delete", records_first), seeds=20),
    mutant(
        "two phases: forget a record whose object is there",
        (Repair, "_forget_gone", forget_all),
        seeds=20,
    ),
    mutant(
        "two phases: recover nothing",
        (Repair, "run", complete_nothing),
        seeds=40,
        hint=6,
    ),
)


_carry_out = LocalMember._carry_out  # noqa: SLF001 - what is replaced


def _reply_first(self: LocalMember, effects: Sequence[Effect]) -> Future[ToProposer | None]:
    _ = _carry_out(self, effects)
    reply: Future[ToProposer | None] = asyncio.get_running_loop().create_future()
    reply.set_result(next((e.message for e in effects if isinstance(e, Reply)), None))
    return reply


def _flush_without_sync(self: MemberLog) -> None:
    self._durable_lsn = self._index.last.lsn
    self._synced.write(self._bound())


def _save_nothing(self: MemberLog, promise: Ballot, health: LogHealth) -> None:
    del self, promise, health


def _commit_by_one(leader: Leader) -> Leader:
    reached = max(leader.flushed.values(), default=0)
    if reached < leader.first_own_lsn:
        return leader
    return replace(leader, committed_lsn=max(leader.committed_lsn, reached))


async def _scan_all(self: LogObjects) -> None:
    """Treat every written record as committed, whichever members have it."""
    base = self._log.state.log.base
    if base != self._base:
        self._move_to(base)
    last_lsn = self._log.state.log.last.lsn
    while self._next_lsn <= last_lsn:
        records = await self._log.records(self._next_lsn, last_lsn, bytes_max=self._read_bytes)
        if not records:
            return
        self._next_lsn = records[-1].lsn + 1
        self._incomplete += [replace(record, payload=b"") for record in records]
        found = complete_objects(self._incomplete, last_lsn)
        self._complete += found
        count = 0 if not found else found[-1].last.lsn - self._incomplete[0].lsn + 1
        del self._incomplete[:count]


def _all_waiting(self: LogObjects, tip: int | None) -> list[LogObject]:
    return [each for each in self._complete if not is_archived(each.wal_id, tip)]


async def _replay_nothing(*_arguments: Any) -> None:
    """The archive is believed to be all there is."""


async def _tail_all(member: LocalMember, first_wal_id: int) -> AsyncIterator[TailPiece]:
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
        records = await member.records(next_lsn, last_lsn, bytes_max=TAIL_MESSAGE_BYTES_MAX)
        if records:
            next_lsn = records[-1].lsn + 1
            yield TailPiece(records, records[-1].lsn)


def _lowest(self: Candidacy) -> bytes:
    return min(self.votes, key=lambda each: self.votes[each].log.last.rank)


def _enter_at_once(
    manifest: Manifest, own: WriterId, members: Iterable[quorum_members.Member], last_wal_id: int
) -> Manifest:
    entered = enter_quorum(manifest, own, members, last_wal_id)
    c = manifest.wal_id_last_compacted
    return replace(entered, wal_id_last_compacted=c, wal_ids_left_out=())


def _keep_for_ever(self: HostedMember, membership: MembershipStatus) -> bool:
    del self, membership
    return False


def _drop_soon(self: HostedMember, membership: MembershipStatus) -> bool:
    self.unnamed_checks = 0 if membership is MembershipStatus.NAMED else self.unnamed_checks + 1
    return self.unnamed_checks > 1


async def _admit_nobody(
    _links: Links, _place: DatabasePlace, members: tuple[Named, ...], _request_id: bytes
) -> tuple[Named, ...]:
    return members


QUORUM = (
    mutant(
        "a safekeeper replies before its sync", (LocalMember, "_carry_out", _reply_first), seeds=10
    ),
    mutant(
        "a safekeeper does not sync its log", (MemberLog, "flush", _flush_without_sync), seeds=10
    ),
    mutant("a promise is kept in memory only", (MemberLog, "_save", _save_nothing), seeds=10),
    mutant("one safekeeper is enough", (proposer, "_with_commit", _commit_by_one), seeds=20),
    mutant(
        "archive before commit",
        (LogObjects, "scan", _scan_all),
        (LogObjects, "waiting", _all_waiting),
        seeds=20,
        hint=2,
    ),
    mutant(
        "open with the archive alone",
        (opening, "_replay_records", _replay_nothing),
        also=("I14",),  # what was acknowledged is missing in reads as well
        seeds=20,
    ),
    mutant("a tail shows what is not committed", (service, "tail", _tail_all), seeds=60, hint=3),
    mutant(
        "the log of safekeepers begins in the next slot",
        (switch_wal, "enter_quorum", _enter_at_once),
        seeds=60,
        hint=18,
    ),
    mutant(
        "the log of the lowest rank wins",
        (Candidacy, "donor_id", property(_lowest)),
        seeds=20,
        hint=5,
    ),
    mutant(
        "a member that nobody names stays",
        (HostedMember, "_will_not_be_named", _keep_for_ever),
        seeds=10,
        hint=1,
    ),
    mutant(
        "a member that may be named goes",
        (HostedMember, "_will_not_be_named", _drop_soon),
        seeds=60,
        hint=15,
    ),
    mutant(
        "a creation that was slow names who is gone",
        (database, "admit_again", _admit_nobody),
        seeds=20,
    ),
)
