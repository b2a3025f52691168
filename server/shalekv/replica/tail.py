"""Tailing: a replica of a quorum database reads from a safekeeper what is not archived yet.

    choose a member --- Tail ---> apply record by record --- it breaks, or lags ---> another one
         |  ^
     none, or     the archive has what comes next: the replica reads the bucket meanwhile
         +--+

The records of a tail are committed, whichever member sends them, and however long that member was
cut off from the others. So a tail shows how far the log goes at least, and not how recent that is.
For that, a majority is asked where its logs end (`protocol.tail`). When that much is applied,
everything is applied that was acknowledged before the request. The members are those of the
manifest, so nothing is claimed for the time after it was read last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog

from shalekv.clock import Clock
from shalekv.errors import CorruptObject, IllegalState, NotAMember, RecordTrimmed, ShaleError
from shalekv.protocol.membership import Configuration, Member
from shalekv.protocol.quorum_records import LogEnd, Record
from shalekv.protocol.tail import (
    AppliedPosition,
    MemberTail,
    News,
    choose,
    furthest_commit,
    newest_of_majority,
    sound_ids,
)
from shalekv.settings import ReaderSettings, TailChoice
from shalekv.store.manifests import StoredManifest
from shalekv.write.quorum.links import LinkBroken, Links, TailPiece

log = structlog.get_logger()

ANSWER_TIMEOUT_MS = 1_000  # of a request to a member
SILENCE_MS = 10_000  # a tail without records or keep-alives for so long is broken
PROOFS_MAX = 16  # proofs that wait for records


class Tailed(Protocol):
    """The replica that a tail keeps up to date."""

    @property
    def position(self) -> AppliedPosition:
        """How far the log is applied."""
        ...

    async def apply(self, record: Record) -> None:
        """Apply a record, unless it was applied meanwhile. Raises errors of the store."""
        ...

    def is_memory_full(self) -> bool:
        """Whether memory is full."""
        ...

    async def read_archive(self) -> None:
        """Wait for a poll of the archive that began after this call."""
        ...

    def mark_fresh(self, at_ms: float) -> None:
        """Record that everything acknowledged before the monotonic time `at_ms` is applied."""
        ...


class _Proof(NamedTuple):
    """If all up to `newest` is applied, so is all that was acknowledged before `asked_ms`."""

    newest: LogEnd
    asked_ms: float
    configuration: Configuration


@dataclass(slots=True)
class _CurrentTail:
    """The tail that is being read."""

    member_id: bytes
    address: str
    scope: asyncio.Timeout  # its expiry ends the tail
    is_abandoned: bool = False


class TailEnded(Exception):
    """A tail is abandoned. The text says why; the log continues elsewhere."""


class TailReader:
    """Reads tails for one replica."""

    def __init__(
        self,
        links: Links,
        stored: StoredManifest,
        clock: Clock,
        settings: ReaderSettings,
        tailed: Tailed,
    ) -> None:
        """Prepare; `run` reads tails."""
        self._links = links
        self._stored = stored
        self._clock = clock
        self._settings = settings
        self._tailed = tailed
        self._current: _CurrentTail | None = None
        self._reported_lsn = 0  # the commit point that the tail has reported
        self._due: tuple[int, float] | None = None  # the one it should report, and since when
        self._failures: dict[bytes, int] = {}  # by member, since it was last of use
        self._avoided: dict[bytes, float] = {}  # by member, until when
        self._proofs: list[_Proof] = []
        self._advanced = asyncio.Event()
        self.is_live = False  # a tail delivers commits: the bucket need not be polled
        self.tail_count = 0  # tails that were begun

    @property
    def address(self) -> str:
        """The address of the member whose tail is being read; empty if none is."""
        return "" if self._current is None else self._current.address

    @property
    def configuration(self) -> Configuration | None:
        """The members, by the manifest that was read last; None: there is nothing to tail."""
        if self._settings.tail is not TailChoice.AUTO:
            return None
        configuration = Configuration.of(self._stored.current)
        return configuration if configuration.members else None

    async def run(self) -> None:
        """Tail until cancelled. Raises `IllegalState` when the log was replaced by another one."""
        try:
            while True:
                await self._tail_once()
        finally:
            self.is_live = False

    async def confirm(self, *, is_wanted: bool) -> None:
        """Ask the members how recent the applied state is, and whether the current tail lags.

        With `is_wanted` a call waits for it: the manifest is read anew, and the method waits until
        what the members have is applied, if it arrives in time. Raises as reading a manifest.
        """
        configuration = self.configuration
        if configuration is None:
            return
        asked_ms = self._clock.monotonic_ms()
        if is_wanted:
            await self._stored.refresh()
            configuration = self.configuration
            if configuration is None:
                return
        asked = await self._ask(configuration)
        self._judge(configuration, asked)
        newest = newest_of_majority(configuration, asked.answers)
        if newest is None:
            return
        proof = _Proof(newest, asked_ms, configuration)
        self._proofs = [*self._proofs[1 - PROOFS_MAX :], proof]
        self._settle_proofs()
        if is_wanted:
            await self._settled(proof)

    def _judge(self, configuration: Configuration, asked: MemberAnswers) -> None:
        """Leave a tail from which nothing more can be expected."""
        current = self._current
        if current is None or current.is_abandoned or current.scope.expired():
            return
        if current.member_id not in {member.id for member in configuration.everyone}:
            self._abandon(current, "it is no member any more")
        elif current.member_id in asked.silent:
            self._abandon(current, "it does not answer")
        elif self._is_late(furthest_commit(asked.answers)):
            self._abandon(current, "it lags behind the others")

    def _is_late(self, committed_lsn: int) -> bool:
        """Whether, for an interval, the tail has not reported a commit that others knew of."""
        now_ms = self._clock.monotonic_ms()
        if self._due is not None and self._reported_lsn >= self._due[0]:
            self._due = None
        if self._due is None and self._reported_lsn < committed_lsn:
            self._due = committed_lsn, now_ms
        return self._due is not None and now_ms - self._due[1] >= self._settings.poll_interval_ms

    def _abandon(self, current: _CurrentTail, problem: str) -> None:
        log.info("leaving a tail", address=current.address, problem=problem)
        self.is_live = False
        current.is_abandoned = True
        current.scope.reschedule(0)  # a time in the past

    def _settle_proofs(self) -> None:
        """Use the proofs for which enough is applied to mark the state as fresh."""
        position = self._tailed.position
        settled = [proof for proof in self._proofs if position.holds(proof.newest)]
        if not settled:
            return
        self._proofs = [proof for proof in self._proofs if proof not in settled]
        for proof in settled:
            if proof.configuration == self.configuration:
                self._tailed.mark_fresh(min(proof.asked_ms, self._stored.confirmed_ms))
        self._advanced.set()

    async def _settled(self, proof: _Proof) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_MS / 1_000):
                while proof in self._proofs:
                    self._advanced.clear()
                    await self._advanced.wait()
        except TimeoutError:
            pass

    async def _tail_once(self) -> None:
        """Read one tail to its end, or wait for a while."""
        configuration = self.configuration
        if configuration is None or self._tailed.is_memory_full():
            await self._clock.sleep_ms(self._settings.poll_interval_ms)
            return
        now_ms = self._clock.monotonic_ms()
        self._avoided = {each: till for each, till in self._avoided.items() if till > now_ms}
        asked = await self._ask(configuration)
        choice = choose(asked.answers, self._tailed.position, self._avoided)
        if choice.member_id is not None:
            await self._follow(configuration, choice.member_id)
            return
        if choice.is_archived:
            await self._read_archive()
        else:
            await self._clock.sleep_ms(self._settings.poll_interval_ms)

    async def _read_archive(self) -> None:
        """Poll the archive, which has what comes next, or will have it soon."""
        position = self._tailed.position
        await self._tailed.read_archive()
        if self._tailed.position == position:
            await self._clock.sleep_ms(self._settings.poll_interval_ms)

    async def _follow(self, configuration: Configuration, member_id: bytes) -> None:
        """Read the tail of one member until it ends, or is left."""
        (address,) = (each.address for each in configuration.everyone if each.id == member_id)
        try:
            async with asyncio.timeout(SILENCE_MS / 1_000) as scope:
                self._current = _CurrentTail(member_id, address, scope)
                await self._read_tail(address, member_id)
            problem = "it has ended"
        except RecordTrimmed:
            self.is_live = False
            await self._read_archive()
            return
        except IllegalState:
            raise
        except TimeoutError:
            problem = "it is silent, or was left"
        except (LinkBroken, TailEnded, NotAMember, CorruptObject) as error:
            problem = str(error)
        except ShaleError as error:  # of the store, when a load has to be protected
            problem = str(error)
        finally:
            self.is_live = False
            self._current = None
        log.info("a tail has ended", address=address, problem=problem)
        if not self._tailed.is_memory_full():
            self._avoid(member_id)

    async def _read_tail(self, address: str, member_id: bytes) -> None:
        self._reported_lsn, self._due = 0, None
        first_wal_id = self._tailed.position.next_wal_id
        pieces = self._links.tail(address, self._stored.current.database_id, first_wal_id)
        last: LogEnd | None = None
        try:
            async for piece in pieces:
                self._begin_piece(member_id, piece)
                last = await self._apply_piece(piece, last)
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    def _begin_piece(self, member_id: bytes, piece: TailPiece) -> None:
        current = self._current
        assert current is not None
        if current.is_abandoned or current.scope.expired():
            return  # its records are applied nevertheless
        if not self.is_live:
            log.info("tailing", address=current.address)
            self.is_live = True
            self.tail_count += 1
        self._reported_lsn = max(self._reported_lsn, piece.committed_lsn)
        self._failures.pop(member_id, None)
        loop_s = asyncio.get_running_loop().time()
        current.scope.reschedule(loop_s + SILENCE_MS / 1_000)

    async def _apply_piece(self, piece: TailPiece, last: LogEnd | None) -> LogEnd | None:
        """Apply the new records of a piece. Returns the last record of the tail so far."""
        for record in piece.records:
            if last is not None and not record.follows(last):
                raise TailEnded(f"record {record.lsn} does not follow record {last.lsn}")
            last = record.mark
            news = self._tailed.position.judge(record)
            if news is News.KNOWN:
                continue
            if news is News.OTHER:
                raise IllegalState(
                    f"record {record.lsn} of {self.address} is another than the one that was "
                    "applied: the log was put back to an older state. Start this process again"
                )
            if news is News.GAP:
                raise RecordTrimmed(f"what comes before record {record.lsn} is in the archive")
            if self._tailed.is_memory_full():
                raise TailEnded("memory is full")
            await self._tailed.apply(record)
            self._settle_proofs()
            await self._clock.sleep_ms(0)
        return last

    def _avoid(self, member_id: bytes) -> None:
        """Prefer other members for a while, longer the more often this one has failed."""
        settings = self._settings
        count = self._failures.get(member_id, 0)
        self._failures[member_id] = count + 1
        wait_ms = min(settings.poll_interval_ms << min(count, 16), settings.poll_interval_idle_ms)
        self._avoided[member_id] = self._clock.monotonic_ms() + max(
            wait_ms, settings.poll_interval_ms
        )

    async def _ask(self, configuration: Configuration) -> MemberAnswers:
        database_id = self._stored.current.database_id
        return await ask_members(self._links, configuration, database_id, wait_ms=ANSWER_TIMEOUT_MS)


class MemberAnswers(NamedTuple):
    """The answers of the members, and those that gave none."""

    answers: Mapping[bytes, MemberTail]  # by member
    silent: Collection[bytes]  # not reached in time, or other members by now


async def ask_members(
    links: Links, configuration: Configuration, database_id: bytes, *, wait_ms: float
) -> MemberAnswers:
    """Ask all members for their logs, until a majority of sound ones has answered, or all have.

    After `wait_ms`, members that have not answered are `silent`. Members that were not waited for
    are in neither collection.
    """
    answers: dict[bytes, MemberTail] = {}
    silent: set[bytes] = set()
    everyone = configuration.everyone
    enough = asyncio.Event()

    async def ask(member: Member) -> None:
        answer = await _ask(links, member, database_id)
        if answer is None:
            silent.add(member.id)
        else:
            answers[member.id] = answer
        is_all = len(answers) + len(silent) == len(everyone)
        if is_all or configuration.is_majority(sound_ids(answers)):
            enough.set()

    async with asyncio.TaskGroup() as tasks:
        polling = [tasks.create_task(ask(member)) for member in everyone]
        try:
            async with asyncio.timeout(wait_ms / 1_000):
                await enough.wait()
        except TimeoutError:
            silent |= {member.id for member in everyone} - answers.keys()
        for task in polling:
            task.cancel()
    return MemberAnswers(answers, silent)


async def _ask(links: Links, member: Member, database_id: bytes) -> MemberTail | None:
    """The log of one member; None: it does not answer, or is another member now."""
    try:
        status = await links.status(member.address, database_id)
    except (LinkBroken, ShaleError):
        return None
    for each in status.members:
        if each.member_id == member.id and each.place.database_id == database_id:
            return MemberTail(each.health, each.log, each.committed_lsn)
    return None
