"""The first steps of an opening with safekeepers: greet a majority, gather their votes.

All members are asked at once, each on a stream of its own and again until it answers; a majority is
enough. Who has not answered in time is named in the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Generic, TypeVar

from shalekv.core.quorum.messages import (
    Greet,
    Greeting,
    Health,
    Refusal,
    Vote,
    VoteRequest,
)
from shalekv.errors import Fenced, NotAMember, QuorumUnavailable, ShaleError
from shalekv.protocol.membership import Configuration, Member
from shalekv.protocol.opening import WriterId, fenced
from shalekv.protocol.proposer import Candidacy
from shalekv.protocol.quorum_records import Ballot
from shalekv.write.quorum.links import Link, LinkBroken
from shalekv.write.quorum.peer import BACKOFF, Way, unexpected, without_address

AnswerT = TypeVar("AnswerT")


class _NotNow(Exception):
    """A member did not give what was asked for. Its text says why."""


class _Strange(_NotNow):
    """It is another member than the one that was asked."""


async def greet(way: Way, configuration: Configuration) -> Mapping[bytes, Greeting]:
    """What a majority has promised; nobody is changed by it.

    Raises `QuorumUnavailable`, and `NotAMember` when so many have lost their logs that no majority
    is left.
    """
    return await _Asking(way, configuration, _greeting, "answered").run()


async def greet_one(way: Way, member: Member) -> Greeting:
    """What one member says of itself now. Raises `LinkBroken` when it does not say it."""
    try:
        async with asyncio.timeout(way.settings.safekeeper_connect_timeout_ms / 1_000):
            link = await way.links.connect(member.address, way.place)
            try:
                return await _greeting(member, link)
            finally:
                await link.close()
    except (TimeoutError, ShaleError, _NotNow) as error:
        raise LinkBroken(f"{member.address}: {str(error) or 'no answer'}") from error


async def gather_votes(way: Way, configuration: Configuration, ballot: Ballot) -> Candidacy:
    """The votes of a majority. Raises as `greet`, and `Fenced` when another writer was promised."""
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
            raise _NotNow(reply.problem)
        raise _NotNow(unexpected(reply))

    asking = _Asking(way, configuration, ask, "voted")
    candidacy = Candidacy(ballot, configuration)
    for member_id, vote in (await asking.run()).items():
        candidacy = candidacy.voted(member_id, vote)
    return candidacy


class _Asking(Generic[AnswerT]):
    """One question to all members."""

    def __init__(
        self,
        way: Way,
        configuration: Configuration,
        ask: Callable[[Member, Link], Awaitable[AnswerT]],
        done: str,
    ) -> None:
        """`done`: what a member that has answered has done."""
        self._way = way
        self._configuration = configuration
        self._ask = ask
        self._done = done
        self._answers: dict[bytes, AnswerT] = {}
        self._problems: dict[bytes, str] = {}  # of who has not answered
        self._strangers: set[bytes] = set()  # they are none of the members any more
        self._fatal: ShaleError | None = None
        self._ended = asyncio.Event()

    async def run(self) -> Mapping[bytes, AnswerT]:
        """The answers, by member, as soon as there are enough."""
        timeout_ms = self._way.settings.vote_timeout_ms
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
        clock, random = self._way.runtime.clock, self._way.runtime.random
        failures = 0
        while not await self._has_answered(member):
            failures += 1
            await clock.sleep_ms(BACKOFF.wait_ms(failures, random))

    async def _has_answered(self, member: Member) -> bool:
        """Ask once; whether no more need be asked."""
        try:
            self._answers[member.id] = await self._ask_once(member)
        except Fenced as error:
            self._end_with(error)
            return True
        except TimeoutError:
            timeout_ms = self._way.settings.safekeeper_connect_timeout_ms
            self._problems[member.id] = f"did not answer within {timeout_ms} ms"
            return False
        except (LinkBroken, ShaleError, _NotNow) as error:
            self._problems[member.id] = without_address(str(error), member.address)
            if isinstance(error, NotAMember | _Strange):
                self._strangers.add(member.id)
                self._end_if_hopeless()
            return False
        if self._is_enough:
            self._ended.set()
        return True

    async def _ask_once(self, member: Member) -> AnswerT:
        async with asyncio.timeout(self._way.settings.safekeeper_connect_timeout_ms / 1_000):
            link = await self._way.links.connect(member.address, self._way.place)
            try:
                return await self._ask(member, link)
            finally:
                await link.close()

    def _end_if_hopeless(self) -> None:
        """Without those who are none of the members any more there may be no majority."""
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
            f"{self._way.settings.vote_timeout_ms} ms, which is no majority. Not so {missing}. "
            "Nothing can be written without them: start them, or try again later"
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
        raise _NotNow(unexpected(reply))
    if reply.member_id != member.id:
        raise _Strange("is another member by now: it has lost its disk, or was made anew")
    if reply.health is not Health.SOUND:
        raise _NotNow("has lost records, and does not vote before it is filled again")
    return reply
