"""The requests of an election: greet a majority, gather votes, and fetch the elected log.

All members are asked at once, each on a stream of its own and repeatedly until it answers; a
majority is enough. The error names the members that have not answered in time. Only records that
are not in the archive are fetched.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
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
from shalekv.protocol.membership import Configuration, Member
from shalekv.protocol.quorum.opening import (
    FetchFailed,
    FetchTail,
    TailFetched,
    TailMismatch,
    TailVerifier,
)
from shalekv.protocol.quorum_records import (
    Ballot,
    Greet,
    Greeting,
    LogHealth,
    Record,
    Refusal,
    Vote,
    VoteRequest,
)
from shalekv.store.cas import CasStore
from shalekv.write.quorum.archive import Archive
from shalekv.write.quorum.links import CONNECT_TIMEOUT_MS, Link, LinkBroken
from shalekv.write.quorum.peer import BACKOFF, QuorumContext, unexpected, without_address

log = structlog.get_logger()

AnswerT = TypeVar("AnswerT")
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
        async with asyncio.timeout(CONNECT_TIMEOUT_MS / 1_000):
            link = await context.links.connect(member.address, context.place)
            try:
                return await _greeting(member, link)
            finally:
                await link.close()
    except (TimeoutError, ShaleError, _NoAnswer) as error:
        raise LinkBroken(f"{member.address}: {str(error) or 'no answer'}") from error


async def gather_votes(
    context: QuorumContext, configuration: Configuration, ballot: Ballot
) -> Mapping[bytes, Vote]:
    """Gather the votes of a majority, by the id of the member.

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
            if ballot.is_superseded_by(promise):
                seen_at = f"the promise of the safekeeper at {member.address}"
                raise fenced(own, promise.epoch, seen_at)
            raise _NoAnswer(reply.problem)
        raise _NoAnswer(unexpected(reply))

    return await _MajorityPoll(context, configuration, ask, "voted").run()


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
            self._problems[member.id] = f"did not answer within {CONNECT_TIMEOUT_MS} ms"
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
        async with asyncio.timeout(CONNECT_TIMEOUT_MS / 1_000):
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


# Errors of one member, which another member, or the same one later, need not have.
_NOT_THERE = (LinkBroken, NotAMember, RecordTrimmed, LogDamaged, CorruptObject, TailMismatch)


class TailFetcher:
    """Fetches the records that are not in the archive, from one voter after the other."""

    def __init__(self, store: CasStore, context: QuorumContext) -> None:
        """Start without an attempt."""
        self._context = context
        database_id = context.place.database_id
        self._archive = Archive(store, database_id, upload_timeout_ms=math.inf)  # reads only
        self._problems: dict[str, str] = {}  # by address
        self._failures = 0

    async def fetch(self, wanted: FetchTail) -> TailFetched | FetchFailed:
        """Try to fetch from this voter; after a failure, wait before returning.

        Raises `IllegalState` when the archive holds another object than the log.
        """
        member = wanted.member
        try:
            log_now = (await greet_one(self._context, member)).log
            verifier = TailVerifier(wanted.last, wanted.archive_tip, log_now)
            if verifier.next_lsn is not None:
                async for record in self._records(member, verifier.next_lsn):
                    verifier.add(record)
            tail = verifier.end()
            await self._compare(verifier.archived_ends)
        except _NOT_THERE as error:
            log.warning("could not fetch", address=member.address, problem=str(error))
            self._problems[member.address] = str(error)
        else:
            return TailFetched(tail)
        self._failures += 1
        runtime = self._context.runtime
        await runtime.clock.sleep_ms(BACKOFF.wait_ms(self._failures, runtime.random))
        return FetchFailed()

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Limit all attempts to `vote_timeout_ms`. Raises `QuorumUnavailable`."""
        timeout_ms = self._context.settings.vote_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                yield
        except TimeoutError:
            problems = "; ".join(f"{at} ({problem})" for at, problem in self._problems.items())
            raise QuorumUnavailable(
                f"the end of the log could not be fetched within {timeout_ms} ms "
                f"from the safekeepers that have it: {problems or 'no answer'}. Try again later"
            ) from None

    async def _records(self, member: Member, first_lsn: int) -> AsyncIterator[Record]:
        links, database_id = self._context.links, self._context.place.database_id
        pieces = links.fetch(member.address, database_id, member.id, first_lsn)
        async for piece in pieces:
            for record in piece:
                yield record

    async def _compare(self, ends: Mapping[int, Record]) -> None:
        """Compare archived objects with the last records that they hold (CE17)."""
        left = [*ends.items()]

        async def work() -> None:
            while left:
                wal_id, record = left.pop()
                await self._archive.check(wal_id, [record])

        await in_parallel(work, min(len(left), COMPARED_AT_ONCE))
