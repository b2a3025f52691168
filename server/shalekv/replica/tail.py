"""Tails: a replica of a quorum database reads from a safekeeper what is not archived yet.

    choose a member --- Tail ---> apply record by record --- it breaks, or lags ---> another one
         |  ^
     none, or     the archive has what comes next: the replica reads the bucket meanwhile
         +--+

The records of a tail are committed, even if the member that sends them has been cut off from the
others. But later records may be committed that this member does not know. So a tail alone says
nothing about freshness: for that, a majority is asked where its logs end (`protocol.tail`). Once
everything up to that end is applied, everything acknowledged before the request is applied. The
members are those that the manifest names, and another writer may have changed them since it was
read. So the state is never reported as fresher than the last read of the manifest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from shalekv.clock import Clock
from shalekv.errors import CorruptObject, IllegalState, NotAMember, RecordTrimmed, ShaleError
from shalekv.format import names
from shalekv.format.columns import Section
from shalekv.format.sst import open_sst
from shalekv.protocol.membership import Configuration, Member
from shalekv.protocol.quorum_records import LogEnd, Record
from shalekv.protocol.tail import (
    AppliedPosition,
    MemberTail,
    RecordStatus,
    choose,
    furthest_commit,
    newest_of_majority,
    sound_ids,
)
from shalekv.read.version_set import VersionSet
from shalekv.replica.apply import LogApplier, protect_load
from shalekv.replica.progress import PollSchedule, Staleness
from shalekv.settings import ReaderSettings, TailChoice
from shalekv.store.manifests import StoredManifest
from shalekv.write.quorum.links import LinkBroken, Links, TailPiece

log = structlog.get_logger()

ANSWER_TIMEOUT_MS = 1_000  # of a request to a member
SILENCE_MS = 10_000  # a tail without records or keep-alives for so long is broken
PROOFS_MAX = 16  # proofs that wait for records


class RecordApplier:
    """Applies the records of tails to a replica that also reads the archive."""

    def __init__(
        self,
        applier: LogApplier,
        levels: VersionSet,
        stored: StoredManifest,
        *,
        poll_archive: Callable[[], None],
    ) -> None:
        """`poll_archive` requests that the archive is polled soon."""
        self._applier = applier
        self._levels = levels
        self._stored = stored
        self._poll_archive = poll_archive

    @property
    def position(self) -> AppliedPosition:
        """Position up to which the log is applied."""
        return self._applier.position

    def is_memory_full(self) -> bool:
        """Return whether nothing more can be applied before some of it is compacted or archived."""
        return self._applier.is_memory_full()

    async def apply(self, record: Record) -> None:
        """Apply a record, unless it was applied meanwhile as a part of its object.

        Raises `CorruptObject`; `StoreError`, and what an edit of the manifest raises, when it
        commits a load.
        """
        found = None
        if record.payload:
            name = names.wal_name(record.wal_id)
            database_id = self._stored.current.database_id
            found = open_sst(name, record.payload, database_id=database_id)
            if found.index.blocks_of(Section.CONTROL):
                await protect_load(self._stored, self._levels)
        if self._applier.position.status_of(record) is RecordStatus.NEXT:
            self._applier.apply_record(record, found)
        if self._applier.unarchived.is_half_full:
            self._poll_archive()


class _Proof(NamedTuple):
    """An answer of a majority: once all records up to `newest` are applied, so are all writes that
    were acknowledged before `asked_ms`, a monotonic time.
    """

    newest: LogEnd
    asked_ms: float
    configuration: Configuration


class FreshnessProofs:
    """The proofs whose records are not all applied yet."""

    def __init__(self, stored: StoredManifest, staleness: Staleness) -> None:
        """Begin without proofs. `staleness` is updated as they are settled."""
        self._stored = stored
        self._staleness = staleness
        self._proofs: list[_Proof] = []  # oldest first
        self._settled = asyncio.Event()

    def add(self, proof: _Proof) -> None:
        """Add a proof; of many, the oldest is dropped."""
        self._proofs = [*self._proofs[1 - PROOFS_MAX :], proof]

    def settle(self, position: AppliedPosition) -> None:
        """Update the staleness by the proofs whose records are applied, and drop these proofs.

        `position` is how far the log is applied. A proof of other members than those of the present
        manifest does not count.
        """
        settled = [proof for proof in self._proofs if position.holds(proof.newest)]
        if not settled:
            return
        self._proofs = [proof for proof in self._proofs if proof not in settled]
        for proof in settled:
            if proof.configuration == members_to_tail(self._stored):
                self._staleness.mark_fresh(min(proof.asked_ms, self._stored.confirmed_ms))
        self._settled.set()

    async def wait(self, proof: _Proof) -> None:
        """Wait until this proof is settled, but not longer than `ANSWER_TIMEOUT_MS`."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_MS / 1_000):
                while proof in self._proofs:
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            pass


class AvoidedMembers:
    """Members whose tails have failed: avoided for a while, longer the more often."""

    def __init__(self, clock: Clock, settings: ReaderSettings) -> None:
        """Avoid none."""
        self._clock = clock
        self._first_ms = settings.poll_interval_ms
        self._longest_ms = settings.poll_interval_idle_ms
        self._failures: dict[bytes, int] = {}  # by member, since its last tail that worked
        self._until_ms: dict[bytes, float] = {}  # by member, monotonic time

    def note_failure(self, member_id: bytes) -> None:
        """Prefer other members for a while."""
        count = self._failures.get(member_id, 0)
        self._failures[member_id] = count + 1
        wait_ms = max(min(self._first_ms << min(count, 16), self._longest_ms), self._first_ms)
        self._until_ms[member_id] = self._clock.monotonic_ms() + wait_ms

    def note_success(self, member_id: bytes) -> None:
        """Forget the failures of a member. If it is avoided now, that still lasts its time."""
        self._failures.pop(member_id, None)

    def current(self) -> Collection[bytes]:
        """Return the members to avoid now."""
        now_ms = self._clock.monotonic_ms()
        self._until_ms = {each: ms for each, ms in self._until_ms.items() if ms > now_ms}
        return self._until_ms.keys()


@dataclass(slots=True)
class _CurrentTail:
    """The tail that is being read."""

    member_id: bytes
    address: str
    scope: asyncio.Timeout  # its expiry ends the tail
    is_abandoned: bool = False
    reported_lsn: int = 0  # the last commit point that it has reported
    due_lsn: int | None = None  # a commit point of other members that it has to report; None: none
    due_since_ms: float = 0.0  # when `due_lsn` was set, by the monotonic clock

    def is_late(self, committed_lsn: int, now_ms: float, interval_ms: float) -> bool:
        """Return whether a commit that other members know has not been reported for an interval."""
        if self.due_lsn is not None and self.reported_lsn >= self.due_lsn:
            self.due_lsn = None
        if self.due_lsn is None and self.reported_lsn < committed_lsn:
            self.due_lsn, self.due_since_ms = committed_lsn, now_ms
        return self.due_lsn is not None and now_ms - self.due_since_ms >= interval_ms


class TailEnded(Exception):
    """A tail cannot be read on; the text says why. The log is read from another source then."""


class TailReader:
    """Reads the tails of safekeepers for one replica, one at a time."""

    def __init__(
        self,
        links: Links,
        stored: StoredManifest,
        settings: ReaderSettings,
        records: RecordApplier,
        *,
        clock: Clock,
        polls: PollSchedule,
        staleness: Staleness,
    ) -> None:
        """Prepare; `run` reads tails.

        Records are given to `records`. Objects that no member has any more are read from the
        archive, by the polls of `polls`.
        """
        self._links = links
        self._stored = stored
        self._settings = settings
        self._records = records
        self._clock = clock
        self._polls = polls
        self._proofs = FreshnessProofs(stored, staleness)
        self._avoided = AvoidedMembers(clock, settings)
        self._current: _CurrentTail | None = None
        self.is_live = False  # a tail delivers commits: the bucket need not be polled
        self.tail_count = 0  # tails that were begun

    @property
    def address(self) -> str:
        """The address of the member whose tail is being read; empty if none is."""
        return "" if self._current is None else self._current.address

    @property
    def configuration(self) -> Configuration | None:
        """The members, by the manifest that was read last; None: there is nothing to tail."""
        return members_to_tail(self._stored) if self._settings.tail is TailChoice.AUTO else None

    async def run(self) -> None:
        """Tail until cancelled. Raises `IllegalState` when the log was replaced by another one."""
        try:
            while True:
                await self._tail_once()
        finally:
            self.is_live = False

    async def confirm(self, *, is_wanted: bool) -> None:
        """Ask the members how recent the applied state is, and whether the current tail lags.

        With `is_wanted` a call waits for the result: the manifest is read first, and this waits
        until the records that the members have are applied, for `ANSWER_TIMEOUT_MS` at most.
        Raises what reading the manifest raises.
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
        self._proofs.add(proof)
        self._proofs.settle(self._records.position)
        if is_wanted:
            await self._proofs.wait(proof)

    def _judge(self, configuration: Configuration, asked: MemberAnswers) -> None:
        """Abandon the tail if its member was removed, does not answer, or lags behind others."""
        current = self._current
        if current is None or current.is_abandoned or current.scope.expired():
            return
        if current.member_id not in {member.id for member in configuration.everyone}:
            self._abandon(current, "it is no member any more")
        elif current.member_id in asked.silent:
            self._abandon(current, "it does not answer")
        elif current.is_late(
            furthest_commit(asked.answers),
            self._clock.monotonic_ms(),
            self._settings.poll_interval_ms,
        ):
            self._abandon(current, "it lags behind the others")

    def _abandon(self, current: _CurrentTail, problem: str) -> None:
        log.info("a tail is abandoned", address=current.address, problem=problem)
        self.is_live = False
        current.is_abandoned = True
        current.scope.reschedule(0)  # a time in the past

    async def _tail_once(self) -> None:
        """Read one tail to its end, or wait for a while."""
        configuration = self.configuration
        if configuration is None or self._records.is_memory_full():
            await self._clock.sleep_ms(self._settings.poll_interval_ms)
            return
        avoided = self._avoided.current()
        asked = await self._ask(configuration)
        choice = choose(asked.answers, self._records.position, avoided)
        if choice.member_id is not None:
            await self._follow(configuration, choice.member_id)
            return
        if choice.is_archived:
            await self._read_archive()
        else:
            await self._clock.sleep_ms(self._settings.poll_interval_ms)

    async def _read_archive(self) -> None:
        """Poll the archive, which has the next object, or will have it soon."""
        position = self._records.position
        await self._polls.next()
        if self._records.position == position:
            await self._clock.sleep_ms(self._settings.poll_interval_ms)

    async def _follow(self, configuration: Configuration, member_id: bytes) -> None:
        """Read the tail of one member until it ends, or is abandoned."""
        (address,) = (each.address for each in configuration.everyone if each.id == member_id)
        try:
            async with asyncio.timeout(SILENCE_MS / 1_000) as scope:
                self._current = _CurrentTail(member_id, address, scope)
                await self._read_tail(address)
            problem = "it has ended"
        except RecordTrimmed:
            self.is_live = False
            await self._read_archive()
            return
        except IllegalState:
            raise
        except TimeoutError:
            problem = "it is silent, or was abandoned"
        except (LinkBroken, TailEnded, NotAMember, CorruptObject) as error:
            problem = str(error)
        except ShaleError as error:  # of the store, when a load has to be protected
            problem = str(error)
        finally:
            self.is_live = False
            self._current = None
        log.info("a tail has ended", address=address, problem=problem)
        if not self._records.is_memory_full():
            self._avoided.note_failure(member_id)

    async def _read_tail(self, address: str) -> None:
        first_wal_id = self._records.position.next_wal_id
        pieces = self._links.tail(address, self._stored.current.database_id, first_wal_id)
        last: LogEnd | None = None
        try:
            async for piece in pieces:
                self._begin_piece(piece)
                last = await self._apply_piece(piece, last)
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    def _begin_piece(self, piece: TailPiece) -> None:
        current = self._current
        assert current is not None
        if current.is_abandoned or current.scope.expired():
            return  # its records are applied nevertheless
        if not self.is_live:
            log.info("tailing", address=current.address)
            self.is_live = True
            self.tail_count += 1
        current.reported_lsn = max(current.reported_lsn, piece.committed_lsn)
        self._avoided.note_success(current.member_id)
        loop_s = asyncio.get_running_loop().time()
        current.scope.reschedule(loop_s + SILENCE_MS / 1_000)

    async def _apply_piece(self, piece: TailPiece, last: LogEnd | None) -> LogEnd | None:
        """Apply the new records of a piece. Returns the last record of the tail so far."""
        for record in piece.records:
            if last is not None and not record.follows(last):
                raise TailEnded(f"record {record.lsn} does not follow record {last.lsn}")
            last = record.mark
            status = self._records.position.status_of(record)
            if status is RecordStatus.KNOWN:
                continue
            if status is RecordStatus.OTHER:
                raise IllegalState(
                    f"record {record.lsn} of {self.address} is another than the one that was "
                    "applied: the log was put back to an older state. Start this process again"
                )
            if status is RecordStatus.GAP:
                raise RecordTrimmed(f"what comes before record {record.lsn} is in the archive")
            if self._records.is_memory_full():
                raise TailEnded("memory is full")
            await self._records.apply(record)
            self._proofs.settle(self._records.position)
            await self._clock.sleep_ms(0)
        return last

    async def _ask(self, configuration: Configuration) -> MemberAnswers:
        database_id = self._stored.current.database_id
        return await ask_members(self._links, configuration, database_id, wait_ms=ANSWER_TIMEOUT_MS)


def members_to_tail(stored: StoredManifest) -> Configuration | None:
    """Return the members by the manifest that was read last; None: there are no safekeepers."""
    configuration = Configuration.of(stored.current)
    return configuration if configuration.members else None


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
    """Ask one member for its log; None: no answer, or another member is at its address now."""
    try:
        status = await links.status(member.address, database_id)
    except (LinkBroken, ShaleError):
        return None
    for each in status.members:
        if each.member_id == member.id and each.place.database_id == database_id:
            return MemberTail(each.health, each.log, each.committed_lsn)
    return None
