"""The election of a writer: greet a majority, gather votes, and fetch the elected log.

All members are asked at once, each on a stream of its own and repeatedly until it answers; a
majority is enough. The error names the members that have not answered in time. What is fetched are
the records that are not in the archive.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from shalekv.concurrency import in_parallel
from shalekv.errors import (
    CorruptObject,
    Fenced,
    LogDamaged,
    NotAMember,
    QuorumUnavailable,
    RecordTrimmed,
    ShaleError,
)
from shalekv.protocol.fencing import WriterId, fenced
from shalekv.protocol.membership import Configuration, Member, archive_tip, is_archived
from shalekv.protocol.proposer import Candidacy, next_object
from shalekv.protocol.quorum_records import (
    Ballot,
    Greet,
    Greeting,
    LogEnd,
    LogHealth,
    LogShape,
    Record,
    Refusal,
    Vote,
    VoteRequest,
)
from shalekv.store.cas import CasStore
from shalekv.store.manifests import FencedManifest
from shalekv.write.quorum.archive import Archive
from shalekv.write.quorum.links import Link, LinkBroken
from shalekv.write.quorum.peer import BACKOFF, QuorumContext, unexpected, without_address
from shalekv.write.wal import list_wal

log = structlog.get_logger()

AnswerT = TypeVar("AnswerT")
# An archiver that finds a contradiction has uploaded no more objects behind it than it uploads in
# parallel, `archive_parallel_uploads`. So if these objects agree with the log, all before them do.
COMPARED_MAX = 64
COMPARED_AT_ONCE = 8


class _NoAnswer(Exception):
    """A member did not give what was asked for. The text says why."""


class _OtherMember(_NoAnswer):
    """The node is another member than the one that was asked."""


async def greet(context: QuorumContext, configuration: Configuration) -> Mapping[bytes, Greeting]:
    """Read what a majority has promised; changes no member.

    Raises `QuorumUnavailable`, and `NotAMember` when so many have lost their logs that no majority
    is left.
    """
    return await _MajorityPoll(context, configuration, _greeting, "answered").run()


async def greet_one(context: QuorumContext, member: Member) -> Greeting:
    """Read the present state of one member. Raises `LinkBroken` when it does not answer."""
    try:
        async with asyncio.timeout(context.settings.safekeeper_connect_timeout_ms / 1_000):
            link = await context.links.connect(member.address, context.place)
            try:
                return await _greeting(member, link)
            finally:
                await link.close()
    except (TimeoutError, ShaleError, _NoAnswer) as error:
        raise LinkBroken(f"{member.address}: {str(error) or 'no answer'}") from error


async def gather_votes(
    context: QuorumContext, configuration: Configuration, ballot: Ballot
) -> Candidacy:
    """Gather the votes of a majority.

    Raises as `greet`, and `Fenced` when a member has promised itself to another writer.
    """
    own = WriterId(*ballot)

    async def ask(member: Member, link: Link) -> Vote:
        await link.send(VoteRequest(member.id, ballot))
        reply = await link.receive()
        if isinstance(reply, Vote) and reply.ballot == ballot:
            return reply
        if isinstance(reply, Refusal):
            promise = reply.promise
            if promise.epoch >= ballot.epoch and promise != ballot:
                seen_at = f"the promise of the safekeeper at {member.address}"
                raise fenced(own, promise.epoch, seen_at)
            raise _NoAnswer(reply.problem)
        raise _NoAnswer(unexpected(reply))

    asking = _MajorityPoll(context, configuration, ask, "voted")
    candidacy = Candidacy(ballot, configuration)
    for member_id, vote in (await asking.run()).items():
        candidacy = candidacy.voted(member_id, vote)
    return candidacy


class _MajorityPoll(Generic[AnswerT]):
    """One request to all members, until a majority has answered."""

    def __init__(
        self,
        context: QuorumContext,
        configuration: Configuration,
        ask: Callable[[Member, Link], Awaitable[AnswerT]],
        done: str,
    ) -> None:
        """`done` is a verb in the past tense for what an answering member has done."""
        self._context = context
        self._configuration = configuration
        self._ask = ask
        self._done = done
        self._answers: dict[bytes, AnswerT] = {}
        self._problems: dict[bytes, str] = {}  # of members that have not answered
        self._strangers: set[bytes] = set()  # members whose nodes are other members by now
        self._fatal: ShaleError | None = None
        self._ended = asyncio.Event()

    async def run(self) -> Mapping[bytes, AnswerT]:
        """The answers, by member id, as soon as there are enough."""
        timeout_ms = self._context.settings.vote_timeout_ms
        async with asyncio.TaskGroup() as tasks:
            everyone = self._configuration.everyone
            asking = [tasks.create_task(self._ask_until_answered(member)) for member in everyone]
            try:
                async with asyncio.timeout(timeout_ms / 1_000):
                    await self._ended.wait()
            except TimeoutError:
                pass
            for task in asking:
                task.cancel()
        if self._fatal is not None:
            raise self._fatal
        if not self._is_enough:
            raise QuorumUnavailable(self._too_few())
        return self._answers

    @property
    def _is_enough(self) -> bool:
        return self._configuration.is_majority(self._answers.keys())

    async def _ask_until_answered(self, member: Member) -> None:
        clock, random = self._context.runtime.clock, self._context.runtime.random
        failures = 0
        while not await self._has_answered(member):
            failures += 1
            await clock.sleep_ms(BACKOFF.wait_ms(failures, random))

    async def _has_answered(self, member: Member) -> bool:
        """Ask once. Returns whether the member need not be asked again."""
        try:
            self._answers[member.id] = await self._ask_once(member)
        except Fenced as error:
            self._end_with(error)
            return True
        except TimeoutError:
            timeout_ms = self._context.settings.safekeeper_connect_timeout_ms
            self._problems[member.id] = f"did not answer within {timeout_ms} ms"
            return False
        except (LinkBroken, ShaleError, _NoAnswer) as error:
            self._problems[member.id] = without_address(str(error), member.address)
            if isinstance(error, NotAMember | _OtherMember):
                self._strangers.add(member.id)
                self._end_if_hopeless()
            return False
        if self._is_enough:
            self._ended.set()
        return True

    async def _ask_once(self, member: Member) -> AnswerT:
        async with asyncio.timeout(self._context.settings.safekeeper_connect_timeout_ms / 1_000):
            link = await self._context.links.connect(member.address, self._context.place)
            try:
                return await self._ask(member, link)
            finally:
                await link.close()

    def _end_if_hopeless(self) -> None:
        """Fail if no majority is left without the nodes that are other members now."""
        everyone = {member.id for member in self._configuration.everyone}
        if not self._configuration.is_majority(everyone - self._strangers):
            names = self._names(self._strangers)
            self._end_with(
                NotAMember(
                    f"a majority of the safekeepers has lost its logs: {names}. Bring back their "
                    "disks, or see `shalekv safekeeper recover --help`"
                )
            )

    def _end_with(self, error: ShaleError) -> None:
        self._fatal = self._fatal or error
        self._ended.set()

    def _too_few(self) -> str:
        everyone = {member.id for member in self._configuration.everyone}
        missing = self._names(everyone - self._answers.keys())
        return (
            f"{len(self._answers)} of {len(everyone)} safekeepers have {self._done} within "
            f"{self._context.settings.vote_timeout_ms} ms, which is no majority. Missing: {missing}"
            ". Nothing can be written without them: start them, or try again later"
        )

    def _names(self, ids: Collection[bytes]) -> str:
        return "; ".join(
            f"{member.address} ({self._problems.get(member.id, 'has not answered')})"
            for member in self._configuration.everyone
            if member.id in ids
        )


async def _greeting(member: Member, link: Link) -> Greeting:
    await link.send(Greet())
    reply = await link.receive()
    if not isinstance(reply, Greeting):
        raise _NoAnswer(unexpected(reply))
    if reply.member_id != member.id:
        raise _OtherMember("is another member by now: it has lost its disk, or was made anew")
    if reply.health is not LogHealth.SOUND:
        raise _NoAnswer("has lost records, and does not vote before it is filled again")
    return reply


@dataclass(frozen=True, slots=True)
class FetchedTail:
    """The end of the elected log."""

    archive_tip: int | None  # the last object that is in the archive with all before it
    base: LogEnd  # the last record that is archived
    records: Sequence[Record]  # the records that follow it

    @property
    def last(self) -> LogEnd:
        """The last record of the log."""
        return self.records[-1].mark if self.records else self.base

    @property
    def first_wal_id(self) -> int:
        """The first object behind the archive."""
        return 0 if self.archive_tip is None else self.archive_tip + 1


class _NotTheSame(Exception):
    """A member does not have the elected log. The text says why."""


# Errors of one member, which another member, or the same one later, need not have.
_NOT_THERE = (LinkBroken, NotAMember, RecordTrimmed, LogDamaged, CorruptObject, _NotTheSame)


async def fetch_unarchived(
    store: CasStore, manifest: FencedManifest, context: QuorumContext, candidacy: Candidacy
) -> FetchedTail:
    """Fetch the records of objects that are not in the archive, from a voter with the elected log.

    The archived part of the elected log is compared with the archive. Raises `LogBehindArchive`,
    `IllegalState` when the archive holds another object, `QuorumUnavailable` after
    `vote_timeout_ms`, and as the manifest.
    """
    last = candidacy.donor_log.last
    members = {member.id: member for member in candidacy.configuration.everyone}
    same = [member_id for member_id, vote in candidacy.votes.items() if vote.log.last == last]
    same.sort(key=lambda member_id: member_id != candidacy.donor_id)
    clock, random = store.runtime.clock, store.runtime.random
    problems: dict[str, str] = {}
    attempt = 0
    try:
        async with asyncio.timeout(context.settings.vote_timeout_ms / 1_000):
            while True:
                member = members[same[attempt % len(same)]]
                tip = await _archive_tip(store, manifest)
                next_object(
                    last, archive_tip=tip, last_compacted=manifest.current.wal_id_last_compacted
                )
                try:
                    fetched, ends = await _fetch(context, member, last, tip)
                    await _compare(store, manifest, ends)
                    return fetched
                except _NOT_THERE as error:
                    log.warning("could not fetch", address=member.address, problem=str(error))
                    problems[member.address] = str(error)
                attempt += 1
                await clock.sleep_ms(BACKOFF.wait_ms(attempt, random))
    except TimeoutError:
        problem_list = "; ".join(f"{address} ({problem})" for address, problem in problems.items())
        raise QuorumUnavailable(
            f"the end of the log could not be fetched within {context.settings.vote_timeout_ms} ms "
            f"from the safekeepers that have it: {problem_list or 'no answer'}. Try again later"
        ) from None


async def _archive_tip(store: CasStore, manifest: FencedManifest) -> int | None:
    """The last object of the archive: c is read after the list (see `archive_tip`)."""
    folder = await list_wal(store, manifest.current.first_uncompacted_wal_id)
    return archive_tip(folder.filled, (await manifest.refresh()).wal_id_last_compacted)


async def _compare(store: CasStore, manifest: FencedManifest, ends: Mapping[int, Record]) -> None:
    """Compare archived objects with the last records that they hold (CE17)."""
    database_id = manifest.current.database_id
    archive = Archive(store, database_id, upload_timeout_ms=math.inf)  # nothing is uploaded
    left = [*ends.items()]

    async def work() -> None:
        while left:
            wal_id, record = left.pop()
            await archive.check(wal_id, [record])

    await in_parallel(work, min(len(left), COMPARED_AT_ONCE))


async def _fetch(
    context: QuorumContext, member: Member, last: LogEnd, tip: int | None
) -> tuple[FetchedTail, Mapping[int, Record]]:
    """Fetch from one member what is not archived, and the last records of the last archived
    objects.

    The member may have trimmed its log since it has voted.
    """
    log_now = (await greet_one(context, member)).log
    if log_now.last != last:
        raise _NotTheSame(f"its log ends with record {log_now.last.lsn}, not {last.lsn}")
    trimmed_wal_id = log_now.base.wal_id
    if trimmed_wal_id is not None and not is_archived(trimmed_wal_id, tip):
        # It was archived since the list, and what lies between could not be replayed.
        raise _NotTheSame(
            f"it has let go of WAL objects up to {trimmed_wal_id}, which the archive did not have "
            "when it was listed just before"
        )
    base = _known_archived(log_now, tip)
    records: list[Record] = []
    before = base
    ends: dict[int, Record] = {}  # by object, those with a payload
    if base.lsn == last.lsn:
        return FetchedTail(tip, base, ()), ends
    async for record in _records(context, member, base.lsn + 1):
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
    return FetchedTail(tip, base, records), ends


def _known_archived(log_now: LogShape, tip: int | None) -> LogEnd:
    """The last record before those that are compared, as far as known without their bytes."""
    before = -1 if tip is None else tip - COMPARED_MAX
    marks = [section.last for section in log_now.sections]
    archived = [m for m in marks if m.wal_id is not None and is_archived(m.wal_id, before)]
    return archived[-1] if archived else log_now.base


async def _records(context: QuorumContext, member: Member, first_lsn: int) -> AsyncIterator[Record]:
    pieces = context.links.fetch(member.address, context.place.database_id, member.id, first_lsn)
    async for piece in pieces:
        for record in piece:
            yield record
