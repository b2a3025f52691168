"""Members of a quorum: majorities, changes of members, and their work for the archive. Pure.

A change of members goes through a joint configuration (Raft, section 6). From the first edit of
the manifest on (`begin_change`), every decision needs a majority of the present members *and* one
of the next members. With the second edit (`finish_change`) the next members become the present
ones. The second edit is made by a writer whose log a majority of the next members holds, so that
nothing is lost on the way.

Each edit of the members raises their generation by one, and requires the generation that its maker
has read (`check_generation`). So an edit takes effect once, whichever process stalls; and a member
that was admitted in an earlier generation, but is in no manifest of a later one, will never be in
one.

Objects go into the archive in order, and only committed records do (CE7). Any member may archive at
any time, since the bytes of an object are a function of the log, and a name is created once. The
choice of one archiver (`Appointment`) saves requests, and safety does not depend on it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from shalekv.errors import InvalidRequest
from shalekv.protocol.fencing import WriterId, check_owner
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.quorum_records import Ballot, LogEnd, Record

MEMBER_ID_BYTES = 16
MEMBERS_MAX = 9
FIRST_GENERATION = 1  # of a database that was created with safekeepers


class Member(NamedTuple):
    """One safekeeper of one database: its id and address.

    The safekeeper draws the id when it admits the database. One that has lost its disk has another
    id, and is no member any more (CE8).
    """

    id: bytes
    address: str  # HOST:PORT

    def __str__(self) -> str:
        """Return its form in the manifest: the id in hexadecimal, an @, the address."""
        return f"{self.id.hex()}@{self.address}"

    @classmethod
    def parse(cls, text: str) -> Member:
        """Parse the form that `str` returns. Raises `ValueError`."""
        member_id, _, address = text.rpartition("@")
        return cls(bytes.fromhex(member_id), address)


@dataclass(frozen=True, slots=True)
class Configuration:
    """The present members, and the next ones while a change is under way (else `next` is empty)."""

    generation: int  # raised by one with each edit of the members
    members: tuple[Member, ...]
    next: tuple[Member, ...] = ()

    @classmethod
    def of(cls, manifest: Manifest) -> Configuration:
        """Read the configuration; without members if the WAL is in the object store.

        Raises `ValueError`.
        """
        if manifest.wal_mode is WalMode.OBJECT_STORE:
            return cls(manifest.wal_generation, ())
        return cls(
            manifest.wal_generation,
            tuple(map(Member.parse, manifest.wal_members)),
            tuple(map(Member.parse, manifest.wal_members_next)),
        )

    @property
    def is_joint(self) -> bool:
        """Return whether a change of members is under way."""
        return bool(self.next)

    @property
    def everyone(self) -> tuple[Member, ...]:
        """All present and next members, each once."""
        return tuple({member.id: member for member in (*self.members, *self.next)}.values())

    @property
    def _sets(self) -> tuple[tuple[Member, ...], ...]:
        return (self.members, self.next) if self.next else (self.members,)

    def is_majority(self, ids: Collection[bytes]) -> bool:
        """Return whether these ids are a majority of the members, and of the next members if
        any.
        """
        return all(_count(members, ids) > len(members) // 2 for members in self._sets)

    def is_majority_of_next(self, ids: Collection[bytes]) -> bool:
        """Return whether these ids are a majority of the next members."""
        return _count(self.next, ids) > len(self.next) // 2

    def reached_by_majority(self, reached: Callable[[bytes], int]) -> int:
        """Return the greatest number that a majority has reached; `reached` is that of a member."""
        least = []
        for members in self._sets:
            sorted_down = sorted((reached(member.id) for member in members), reverse=True)
            least.append(sorted_down[len(members) // 2])
        return min(least)


def _count(members: Iterable[Member], ids: Collection[bytes]) -> int:
    return sum(member.id in ids for member in members)


def check_generation(manifest: Manifest, generation: int) -> None:
    """Raise `InvalidRequest` unless the members are still those of this generation."""
    if manifest.wal_generation != generation:
        raise InvalidRequest(
            "members",
            "they were changed since this command has read them, or it took so long that its "
            "safekeepers have dropped the new logs that they had prepared: see `shalekv safekeeper "
            "status`, and try again",
        )


def close_generation(manifest: Manifest, generation: int) -> Manifest:
    """Return the manifest of the next generation, which rules out changes prepared in this one.

    The members stay. Raises `InvalidRequest` if another generation has begun, which has the same
    effect.
    """
    check_generation(manifest, generation)
    return replace(manifest, wal_generation=generation + 1)


def may_replace_first_members(manifest: Manifest) -> bool:
    """Return whether the members are those of the creation, and no writer has opened the
    database.
    """
    return manifest.wal_generation == FIRST_GENERATION and not manifest.writer_epoch


def replace_first_members(manifest: Manifest, members: Iterable[Member]) -> Manifest:
    """Return the manifest of a new database with other members than those of its creation.

    No record is lost, since no writer has opened the database. Raises `InvalidRequest` if a writer
    has, or if the members were replaced before.
    """
    check_generation(manifest, FIRST_GENERATION)
    if manifest.writer_epoch:
        raise InvalidRequest("members", "a writer has opened the database already")
    return replace(
        manifest,
        wal_generation=manifest.wal_generation + 1,
        wal_members=tuple(map(str, members)),
    )


def begin_change(manifest: Manifest, members: Iterable[Member]) -> Manifest:
    """Return the manifest in which decisions need majorities of the present and these new members.

    This is the first edit of a change; it changes nothing if it was made before. Raises
    `InvalidRequest` if another change is under way, if the new members are the present ones or
    cannot be a quorum (`check_members`), and if the WAL is in the object store.
    """
    present = Configuration.of(manifest)
    new = tuple(members)
    check_members(new)
    if not present.members:
        raise InvalidRequest("members", "this database has no safekeepers")
    if present.next == new:
        return manifest
    check_unchanging(present)
    if present.members == new:
        raise InvalidRequest("members", "these are the members already")
    return replace(
        manifest,
        wal_generation=manifest.wal_generation + 1,
        wal_members_next=tuple(map(str, new)),
    )


def finish_change(manifest: Manifest, *, own: WriterId, generation: int) -> Manifest:
    """Return the manifest in which the next members are the present ones.

    This is the second edit of a change. REQUIRES: the writer `own` makes it, a majority of the next
    members of this generation holds its log up to its commit point, and that point lies in its own
    epoch. Raises `Fenced`, and `InvalidRequest` if the change was cancelled or replaced.
    """
    check_owner(manifest, own)
    if manifest.wal_generation != generation or not manifest.wal_members_next:
        raise InvalidRequest("members", "the change was cancelled, or another was begun since")
    return replace(
        manifest,
        wal_generation=manifest.wal_generation + 1,
        wal_members=manifest.wal_members_next,
        wal_members_next=(),
    )


def cancel_change(manifest: Manifest) -> Manifest:
    """Return the manifest without the change that is under way.

    This is safe at any time, since nothing was decided without the present members.
    """
    return replace(manifest, wal_generation=manifest.wal_generation + 1, wal_members_next=())


def check_majority_lost(configuration: Configuration, sound: Collection[bytes]) -> None:
    """Raise `InvalidRequest` if a writer can open the database, now or once a change is cancelled.

    `sound` are the members that answer and have not lost any record.
    """
    if configuration.is_majority(sound):
        problem = "a majority of the safekeepers answers: a writer can open the database"
        raise InvalidRequest("members", problem)
    if configuration.is_joint and replace(configuration, next=()).is_majority(sound):
        raise InvalidRequest(
            "members",
            "a majority of the present members answers, but no majority of the next ones: "
            "`shalekv safekeeper cancel` gives up nothing but the change",
        )


def force_members(
    manifest: Manifest, *, before: Manifest, members: Iterable[Member], nonce: bytes
) -> Manifest:
    """Return the manifest with other members, chosen without a majority, as of a new writer.

    The writer before is fenced by the epoch. `before` is the manifest for which the members were
    chosen: raises `InvalidRequest` if a writer has opened the database, or the members were
    changed, since.
    """
    now = (manifest.writer_epoch, manifest.wal_generation)
    if now != (before.writer_epoch, before.wal_generation):
        problem = "a writer has opened the database, or they were changed, since: look again"
        raise InvalidRequest("members", problem)
    return replace(
        manifest,
        writer_epoch=manifest.writer_epoch + 1,
        writer_nonce=nonce,
        writer_address="",
        wal_generation=manifest.wal_generation + 1,
        wal_members=tuple(map(str, members)),
        wal_members_next=(),
    )


class MembershipStatus(enum.Enum):
    """Status of a member by the manifest."""

    NAMED = "named"  # among the present members, or the next ones
    UNNAMED = "unnamed"
    DISPLACED = "displaced"  # the manifest is that of another database
    UNKNOWN = "unknown"  # there is no manifest, or an older one than the member has seen


def membership_status(
    manifest: Manifest, *, database_id: bytes, member_id: bytes, promise: Ballot
) -> MembershipStatus:
    """Return the status of a member of this database, which has made this promise.

    A writer creates the manifest with its epoch before members promise it. So a manifest of a lower
    epoch is an older state of the database, such as a restored backup.
    """
    if manifest.database_id != database_id:
        return MembershipStatus.DISPLACED
    if manifest.writer_epoch < promise.epoch:
        return MembershipStatus.UNKNOWN
    if manifest.wal_mode is not WalMode.QUORUM:
        return MembershipStatus.UNNAMED
    named = {each.id for each in Configuration.of(manifest).everyone}
    return MembershipStatus.NAMED if member_id in named else MembershipStatus.UNNAMED


def check_unchanging(configuration: Configuration) -> None:
    """Raise `InvalidRequest` while a change of members is under way."""
    if configuration.is_joint:
        names = ", ".join(member.address for member in configuration.next)
        problem = f"a change to {names} is under way: let it end, or cancel it first"
        raise InvalidRequest("members", problem)


def check_first_count(addresses: Collection[str]) -> None:
    """Raise `InvalidRequest` if the count of a new log's safekeepers is even.

    To be called before any of them admits the database.
    """
    if len(addresses) % 2 == 0:
        problem = f"{len(addresses)} of them: an odd number is needed, 3 or 5 as a rule"
        raise InvalidRequest("safekeepers", problem)


def check_members(members: Collection[Member]) -> None:
    """Raise `InvalidRequest` unless these members can be a quorum.

    Three members survive the loss of one, five that of two. An even number survives no more than
    the odd number below it, and is allowed as a step between odd numbers.
    """
    if not 1 <= len(members) <= MEMBERS_MAX:
        problem = f"{len(members)} of them: 3 or 5 are usual, 1 to {MEMBERS_MAX} possible"
        raise InvalidRequest("members", problem)
    ids, addresses = {m.id for m in members}, {m.address for m in members}
    if len(ids) != len(members) or len(addresses) != len(members):
        raise InvalidRequest("members", "one is listed twice")


class LogObject(NamedTuple):
    """A complete and committed object of the archive: the records from `first_lsn` to `last`."""

    wal_id: int
    first_lsn: int
    last: LogEnd


def complete_objects(records: Iterable[Record], committed_lsn: int) -> Sequence[LogObject]:
    """Return the objects to which no leader can add a record any more.

    An object ends with a record that says so, or before the first record of a later object, which
    a new leader begins. Either counts only once it is committed (CE7). REQUIRES: `records` follow
    each other, and the first one is the first of its object.
    """
    committed = (record for record in records if record.lsn <= committed_lsn)
    found: list[LogObject] = []
    is_complete = True
    for wal_id, group in groupby(committed, key=attrgetter("wal_id")):
        first, *more = group
        last = (more or [first])[-1].mark
        found.append(LogObject(wal_id, first.lsn, last))
        is_complete = last.ends_object
    return found if is_complete else found[:-1]


def archive_tip(listed: Collection[int], known: int | None) -> int | None:
    """Return the object up to which the archive has, or had, all objects; None if it has none.

    Compacted objects may have been collected since. `known` is the greater of c and the tip that
    was seen before. REQUIRES: `listed` has all objects above it, and c was read after that list, so
    that objects which were collected before the list are not taken for a hole.
    """
    tip = known
    while (following := 0 if tip is None else tip + 1) in listed:
        tip = following
    return tip


def trim_mark(
    objects: Iterable[LogObject], *, seen_wal_id: int | None, committed_lsn: int
) -> LogEnd | None:
    """Return the record up to which the log may be trimmed; None if nothing may be trimmed.

    `seen_wal_id` is the object up to which this member itself has listed the archive, without a
    hole. Reports of other members do not count, nor does an upload that succeeded.
    """
    mark = None
    for each in objects:
        if not is_archived(each.wal_id, seen_wal_id) or each.last.lsn > committed_lsn:
            break
        mark = each.last
    return mark


def is_archived(wal_id: int, tip: int | None) -> bool:
    """Return whether an object is in an archive with all objects up to `tip` (None: it is
    empty).
    """
    return tip is not None and wal_id <= tip


@dataclass(frozen=True, slots=True)
class TakeoverTimer:
    """The time for which a member has seen the same object wait to be archived."""

    wal_id: int | None = None  # None: nothing waits
    since_ms: float = 0  # by the monotonic clock of the member

    def polled(self, first_waiting: int | None, now_ms: float) -> TakeoverTimer:
        """Return the timer after a list of the archive that lacks `first_waiting` as the first."""
        return self if first_waiting == self.wal_id else TakeoverTimer(first_waiting, now_ms)

    def has_ended(self, now_ms: float, *, takeover_ms: float, place: int) -> bool:
        """Return whether this member has to archive now.

        A member with a higher `place` waits `takeover_ms` longer, so that those before try first.
        """
        return self.wal_id is not None and now_ms - self.since_ms >= takeover_ms * (1 + place)


def takeover_place(member_id: bytes, configuration: Configuration, appointed_id: bytes) -> int:
    """Return how many other members try before this one if the appointed one does not archive."""
    ids = [member.id for member in configuration.everyone]
    start = ids.index(appointed_id) + 1 if appointed_id in ids else 0
    order = [*ids[start:], *ids[:start]]
    return order.index(member_id) if member_id in order else len(order)


@dataclass(frozen=True, slots=True)
class Candidate:
    """The writer's knowledge of a member that could archive."""

    member_id: bytes
    is_fit: bool  # it is connected, and its log is sound
    flushed_lsn: int
    archived_wal_id: int | None


@dataclass(frozen=True, slots=True)
class Appointment:
    """The member that the writer has appointed to archive, and its progress."""

    member_id: bytes = b""  # empty: no member
    progress: int | None = None  # the object up to which it had archived when last judged
    since_ms: float = 0  # when it last progressed, had nothing to archive, or was appointed
    tried: frozenset[bytes] = frozenset()  # members appointed since then, without progress

    def judged(
        self,
        candidates: Collection[Candidate],
        now_ms: float,
        *,
        complete_wal_id: int | None,
        takeover_ms: float,
    ) -> Appointment:
        """Return the appointment from now on. `complete_wal_id` is the last complete object.

        Another member is appointed if this one is not fit any more, or if the archive has not
        progressed for `takeover_ms` although an object waits.
        """
        present = next((c for c in candidates if c.member_id == self.member_id and c.is_fit), None)
        if present is None:
            return self._with(_best(candidates, frozenset()), now_ms, frozenset())
        is_waiting = complete_wal_id is not None and not is_archived(
            complete_wal_id, present.archived_wal_id
        )
        if not is_waiting or present.archived_wal_id != self.progress:
            progress = present.archived_wal_id
            return replace(self, progress=progress, since_ms=now_ms, tried=frozenset())
        if now_ms - self.since_ms < takeover_ms:
            return self
        tried = self.tried | {self.member_id}
        another = _best(candidates, tried)
        if another is None:  # all were tried: begin another round
            tried = frozenset({self.member_id})
            another = _best(candidates, tried) or present
        return self._with(another, now_ms, tried)

    def _with(
        self, chosen: Candidate | None, now_ms: float, tried: frozenset[bytes]
    ) -> Appointment:
        if chosen is None:
            return Appointment(since_ms=now_ms)
        return Appointment(chosen.member_id, chosen.archived_wal_id, now_ms, tried)


def _best(candidates: Iterable[Candidate], tried: Collection[bytes]) -> Candidate | None:
    """Return the fit, untried candidate with the longest log; of equals that of the higher id."""
    fit = [each for each in candidates if each.is_fit and each.member_id not in tried]
    return max(fit, key=lambda each: (each.flushed_lsn, each.member_id), default=None)
