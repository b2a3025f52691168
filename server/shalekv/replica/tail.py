"""Tailing: a replica of a quorum database hears from a safekeeper what is not archived yet.

    choose a member --- Tail ---> apply record by record --- it breaks, or lags ---> another one
         |  ^
     nobody, or   the archive has what comes next: the replica reads the bucket meanwhile
         +--+

What a tail brings is committed, whichever member sends it, and however long that was cut off from
the others. So it tells how far the log goes at least, and not how new that is. For this a majority
is asked where their logs end (`protocol.tail`): when that much is applied, everything is that
was acknowledged before they were asked. Who the members were is told by the manifest, so nothing is
claimed for the time after the last look at it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog

from shalekv.clock import Clock
from shalekv.errors import CorruptObject, IllegalState, NotAMember, RecordTrimmed, ShaleError
from shalekv.protocol.manifest import WalMode
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

ASK_MS = 1_000  # for so long a member that is asked may take to answer
SILENCE_MS = 10_000  # a tail that brings nothing for so long, no sign of life either, is broken
PROOFS_MAX = 16  # that wait for records


class Tailed(Protocol):
    """What is kept up to date."""

    @property
    def position(self) -> AppliedPosition:
        """How far it is."""
        ...

    async def apply(self, record: Record) -> None:
        """Apply a record, unless that has happened meanwhile. Raises what the store raises."""
        ...

    def has_no_room(self) -> bool:
        """Whether memory is full."""
        ...

    async def read_archive(self) -> None:
        """Return when the archive was looked at for news, by a look that began after this call."""
        ...

    def is_fresh(self, at_ms: float) -> None:
        """Everything that was acknowledged before this moment of lapsed time is applied."""
        ...


class _Proof(NamedTuple):
    """When all up to `newest` is applied, all is that was acknowledged before `asked_ms`."""

    newest: LogEnd
    asked_ms: float
    configuration: Configuration


@dataclass(slots=True)
class _Following:
    """The tail that is read now."""

    member_id: bytes
    address: str
    scope: asyncio.Timeout  # ends it
    is_cut: bool = False


class TailEnded(Exception):
    """A tail is not read on. The text says why; what comes next is there, at another place."""


class Tailing:
    """Reads tails for one replica."""

    def __init__(
        self,
        links: Links,
        stored: StoredManifest,
        clock: Clock,
        settings: ReaderSettings,
        tailed: Tailed,
    ) -> None:
        """Nothing is tailed before `run`."""
        self._links = links
        self._stored = stored
        self._clock = clock
        self._settings = settings
        self._tailed = tailed
        self._following: _Following | None = None
        self._heard_lsn = 0  # what is committed, as the member that is followed says
        self._due: tuple[int, float] | None = None  # what it should have said, and since when
        self._failures: dict[bytes, int] = {}  # of each member, since it was last any use
        self._avoided: dict[bytes, float] = {}  # until when
        self._proofs: list[_Proof] = []
        self._advanced = asyncio.Event()
        self.is_live = False  # what is committed comes by itself: the bucket need not be asked
        self.tail_count = 0  # that were begun

    @property
    def address(self) -> str:
        """Of the member whose tail is read; empty: of none."""
        return "" if self._following is None else self._following.address

    @property
    def configuration(self) -> Configuration | None:
        """Who has the log, by the manifest that was seen last; None: it is not to be tailed."""
        manifest = self._stored.current
        is_on = self._settings.tail is TailChoice.AUTO
        if not is_on or manifest.wal_mode is not WalMode.QUORUM:
            return None
        return Configuration.of(manifest)

    async def run(self) -> None:
        """Tail until cancelled. Raises `IllegalState` when the log is another one suddenly."""
        try:
            while True:
                await self._tail_once()
        finally:
            self.is_live = False

    # Looks: what the follower does instead of asking the bucket.

    async def confirm(self, *, is_wanted: bool) -> None:
        """Ask the members how new that is what was applied, and which of them lags.

        Somebody waits for it if `is_wanted`: then by a manifest that is read now, and until what
        they have is applied, if it comes at all. Raises what reading a manifest raises.
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

    def _judge(self, configuration: Configuration, asked: Asked) -> None:
        """End a tail from which nothing more is to be expected."""
        following = self._following
        if following is None or following.is_cut or following.scope.expired():
            return
        if following.member_id not in {member.id for member in configuration.everyone}:
            self._cut(following, "it is no member any more")
        elif following.member_id in asked.silent:
            self._cut(following, "it does not answer")
        elif self._is_late(furthest_commit(asked.answers)):
            self._cut(following, "it lags behind the others")

    def _is_late(self, committed_lsn: int) -> bool:
        """Whether the tail has not told for an interval what others knew then to be committed."""
        now_ms = self._clock.monotonic_ms()
        if self._due is not None and self._heard_lsn >= self._due[0]:
            self._due = None
        if self._due is None and self._heard_lsn < committed_lsn:
            self._due = committed_lsn, now_ms
        return self._due is not None and now_ms - self._due[1] >= self._settings.poll_interval_ms

    def _cut(self, following: _Following, problem: str) -> None:
        log.info("a tail is left", address=following.address, problem=problem)
        self.is_live = False
        following.is_cut = True
        following.scope.reschedule(0)  # which is over

    def _settle_proofs(self) -> None:
        """Of the proofs for which enough is applied, each says something."""
        position = self._tailed.position
        settled = [proof for proof in self._proofs if position.holds(proof.newest)]
        if not settled:
            return
        self._proofs = [proof for proof in self._proofs if proof not in settled]
        for proof in settled:
            if proof.configuration == self.configuration:
                self._tailed.is_fresh(min(proof.asked_ms, self._stored.confirmed_ms))
        self._advanced.set()

    async def _settled(self, proof: _Proof) -> None:
        try:
            async with asyncio.timeout(ASK_MS / 1_000):
                while proof in self._proofs:
                    self._advanced.clear()
                    await self._advanced.wait()
        except TimeoutError:
            pass

    # Tails.

    async def _tail_once(self) -> None:
        """Read one tail to its end, or wait for a while."""
        configuration = self.configuration
        if configuration is None or self._tailed.has_no_room():
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
        """What comes next is there, or will be in a moment."""
        position = self._tailed.position
        await self._tailed.read_archive()
        if self._tailed.position == position:
            await self._clock.sleep_ms(self._settings.poll_interval_ms)

    async def _follow(self, configuration: Configuration, member_id: bytes) -> None:
        """Read the tail of one member until it ends, or is cut."""
        (address,) = (each.address for each in configuration.everyone if each.id == member_id)
        try:
            async with asyncio.timeout(SILENCE_MS / 1_000) as scope:
                self._following = _Following(member_id, address, scope)
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
        except ShaleError as error:  # the store's, where a load has to be protected
            problem = str(error)
        finally:
            self.is_live = False
            self._following = None
        log.info("a tail has ended", address=address, problem=problem)
        if not self._tailed.has_no_room():
            self._avoid(member_id)

    async def _read_tail(self, address: str, member_id: bytes) -> None:
        self._heard_lsn, self._due = 0, None
        first_wal_id = self._tailed.position.next_wal_id
        pieces = self._links.tail(address, self._stored.current.database_id, first_wal_id)
        last: LogEnd | None = None
        try:
            async for piece in pieces:
                self._begin_piece(member_id, piece)
                last = await self._take(piece, last)
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    def _begin_piece(self, member_id: bytes, piece: TailPiece) -> None:
        following = self._following
        assert following is not None
        if following.is_cut or following.scope.expired():
            return  # what has come still counts
        if not self.is_live:
            log.info("tailing", address=following.address)
            self.is_live = True
            self.tail_count += 1
        self._heard_lsn = max(self._heard_lsn, piece.committed_lsn)
        self._failures.pop(member_id, None)
        loop_s = asyncio.get_running_loop().time()
        following.scope.reschedule(loop_s + SILENCE_MS / 1_000)

    async def _take(self, piece: TailPiece, last: LogEnd | None) -> LogEnd | None:
        """Apply what is news; the last record of the tail so far."""
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
            if self._tailed.has_no_room():
                raise TailEnded("memory is full")
            await self._tailed.apply(record)
            self._settle_proofs()
            await self._clock.sleep_ms(0)
        return last

    def _avoid(self, member_id: bytes) -> None:
        """Try others first: for longer, the more often it was of no use."""
        settings = self._settings
        count = self._failures.get(member_id, 0)
        self._failures[member_id] = count + 1
        wait_ms = min(settings.poll_interval_ms << min(count, 16), settings.poll_interval_idle_ms)
        self._avoided[member_id] = self._clock.monotonic_ms() + max(
            wait_ms, settings.poll_interval_ms
        )

    async def _ask(self, configuration: Configuration) -> Asked:
        database_id = self._stored.current.database_id
        return await ask_members(self._links, configuration, database_id, wait_ms=ASK_MS)


# --- asking
# Asking the members of a quorum what they hold, all at once, until enough have answered.


class Asked(NamedTuple):
    """What came of it."""

    answers: Mapping[bytes, MemberTail]  # by member
    silent: Collection[bytes]  # they were not reached, or are no members any more


async def ask_members(
    links: Links, configuration: Configuration, database_id: bytes, *, wait_ms: float
) -> Asked:
    """Ask all, and return when a majority of sound ones has answered, or nobody more will.

    After `wait_ms` whoever has not answered is `silent`; who was not waited for is neither.
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
        asking = [tasks.create_task(ask(member)) for member in everyone]
        try:
            async with asyncio.timeout(wait_ms / 1_000):
                await enough.wait()
        except TimeoutError:
            silent |= {member.id for member in everyone} - answers.keys()
        for task in asking:
            task.cancel()
    return Asked(answers, silent)


async def _ask(links: Links, member: Member, database_id: bytes) -> MemberTail | None:
    """None: it is not there, or is another one now."""
    try:
        status = await links.status(member.address, database_id)
    except (LinkBroken, ShaleError):
        return None
    for each in status.members:
        if each.member_id == member.id and each.place.database_id == database_id:
            return MemberTail(each.health, each.log, each.committed_lsn)
    return None
