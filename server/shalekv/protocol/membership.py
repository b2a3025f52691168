"""Who decides: the members of a quorum, and what a majority of them is.

A change of members goes through a joint configuration (Raft, section 6): from the first edit of
the manifest on, whatever is decided needs a majority of the present members *and* one of the next;
with the second edit the next become the present ones. The second edit is made by a writer whose
log a majority of the next members holds, so that nothing is lost on the way.

Each edit of the members raises their generation by one, and is made of the generation that whoever
makes it has looked at (`check_generation`). So it is made once, whoever stalls; and a member that
was admitted before, and is in no manifest of a later generation, will never be in one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from shalekv.errors import InvalidRequest
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.opening import WriterId, check_owner
from shalekv.protocol.quorum_records import LogEnd, Record

MEMBER_ID_BYTES = 16
MEMBERS_MAX = 9
FIRST_GENERATION = 1  # of a database that was created with safekeepers


class Member(NamedTuple):
    """One safekeeper of one database: which, and where it is.

    The id is drawn by the safekeeper when it makes room for the database. One that has lost its
    disk has another id, and is no member any more (CE8).
    """

    id: bytes
    address: str  # HOST:PORT

    def __str__(self) -> str:
        """As it stands in the manifest: the id in hexadecimal, an @, the address."""
        return f"{self.id.hex()}@{self.address}"

    @classmethod
    def parse(cls, text: str) -> Member:
        """Of its text. Raises `ValueError`."""
        member_id, _, address = text.rpartition("@")
        return cls(bytes.fromhex(member_id), address)


@dataclass(frozen=True, slots=True)
class Configuration:
    """The members, and those to be: `next` is empty unless a change is under way."""

    generation: int  # raised by one with each edit of the members
    members: tuple[Member, ...]
    next: tuple[Member, ...] = ()

    @classmethod
    def of(cls, manifest: Manifest) -> Configuration:
        """That of a database with its WAL in safekeepers. Raises `ValueError`."""
        return cls(
            manifest.wal_generation,
            tuple(map(Member.parse, manifest.wal_members)),
            tuple(map(Member.parse, manifest.wal_members_next)),
        )

    @property
    def is_joint(self) -> bool:
        """Whether a change of members is under way."""
        return bool(self.next)

    @property
    def everyone(self) -> tuple[Member, ...]:
        """All whose word counts, each once."""
        return tuple({member.id: member for member in (*self.members, *self.next)}.values())

    @property
    def _sets(self) -> tuple[tuple[Member, ...], ...]:
        return (self.members, self.next) if self.next else (self.members,)

    def is_majority(self, ids: Collection[bytes]) -> bool:
        """Whether these are a majority: while a change is under way, of both sets."""
        return all(_count(members, ids) > len(members) // 2 for members in self._sets)

    def is_majority_of_next(self, ids: Collection[bytes]) -> bool:
        """Whether these are a majority of those to be."""
        return _count(self.next, ids) > len(self.next) // 2

    def reached_by_majority(self, reached: Callable[[bytes], int]) -> int:
        """The greatest number that a majority has reached, by what each has reached."""
        least = []
        for members in self._sets:
            sorted_down = sorted((reached(member.id) for member in members), reverse=True)
            least.append(sorted_down[len(members) // 2])
        return min(least)


def _count(members: Iterable[Member], ids: Collection[bytes]) -> int:
    return sum(member.id in ids for member in members)


def check_generation(manifest: Manifest, generation: int) -> None:
    """Raise `InvalidRequest` unless the members are those of this generation still."""
    if manifest.wal_generation != generation:
        raise InvalidRequest(
            "members",
            "they were changed since this command has looked at them, or it took so long that its "
            "safekeepers have given up the room that they had made: see `shalekv safekeeper "
            "status`, and try again",
        )


def close_generation(manifest: Manifest, generation: int) -> Manifest:
    """Rule out every change that was prepared in this generation, and change nothing else.

    Raises `InvalidRequest` when another generation has begun, which does the same.
    """
    check_generation(manifest, generation)
    return replace(manifest, wal_generation=generation + 1)


def name_anew(manifest: Manifest, members: Iterable[Member]) -> Manifest:
    """Other members for a database that nobody has opened. Raises `InvalidRequest` if one has."""
    check_generation(manifest, FIRST_GENERATION)
    if manifest.writer_epoch:
        raise InvalidRequest("members", "a writer has opened the database already")
    return replace(
        manifest,
        wal_generation=manifest.wal_generation + 1,
        wal_members=tuple(map(str, members)),
    )


def begin_change(manifest: Manifest, members: Iterable[Member]) -> Manifest:
    """The first edit: from now on both sets decide. Raises `InvalidRequest`."""
    present = Configuration.of(manifest)
    new = tuple(members)
    check_members(new)
    if manifest.wal_mode is not WalMode.QUORUM:
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
    """The second edit. Raises `Fenced`, and `InvalidRequest` when the change is another by now.

    REQUIRES: made by the writer `own`, when a majority of the next members of this generation holds
    its log up to its commit point, and that point lies in its own epoch.
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
    """Back to the present members: at any time, since nothing was decided without them."""
    return replace(manifest, wal_generation=manifest.wal_generation + 1, wal_members_next=())


def check_unchanging(configuration: Configuration) -> None:
    """Raise `InvalidRequest` while a change is under way: another one has to wait for its end."""
    if configuration.is_joint:
        names = ", ".join(member.address for member in configuration.next)
        problem = f"a change to {names} is under way: let it end, or cancel it first"
        raise InvalidRequest("members", problem)


def check_first_count(addresses: Collection[str]) -> None:
    """Raise `InvalidRequest` unless a log may begin with so many: before any of them makes room."""
    if len(addresses) % 2 == 0:
        problem = f"{len(addresses)} of them: an odd number is needed, 3 or 5 as a rule"
        raise InvalidRequest("safekeepers", problem)


def check_members(members: Collection[Member]) -> None:
    """Raise `InvalidRequest` unless these can be a quorum.

    Three of them survive the loss of one, five of two. An even number survives no more than the odd
    one below it, and is allowed on the way to the next one.
    """
    if not 1 <= len(members) <= MEMBERS_MAX:
        problem = f"{len(members)} of them: 3 or 5 are usual, 1 to {MEMBERS_MAX} possible"
        raise InvalidRequest("members", problem)
    ids, addresses = {m.id for m in members}, {m.address for m in members}
    if len(ids) != len(members) or len(addresses) != len(members):
        raise InvalidRequest("members", "one stands there twice")


# --- archiving
# Archiving as decisions: what is complete, who does it, what the log may let go of. Pure.
#
# Objects go into the archive in order, and only what is committed does (CE7). Any member may
# archive at any time, since the bytes are a function of the log and a name is created once: who
# does it is a matter of thrift, never of safety.


class LogObject(NamedTuple):
    """An object that is complete and committed: its records stand from `first_lsn` to `last`."""

    wal_id: int
    first_lsn: int
    last: LogEnd


def complete_objects(records: Iterable[Record], committed_lsn: int) -> Sequence[LogObject]:
    """The objects that no record can be added to any more, not even by another leader.

    An object ends with a record that says so, or before the first of a later one: a leader that is
    new begins one. Either is a word of the log only when it is committed (CE7). REQUIRES: `records`
    follow each other, and the first is the first of its object.
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
    """The object up to which the archive has all, or had: what is compacted may be collected.

    `known` is c, or what was seen before if that is more. REQUIRES: `listed` tells of all objects
    above it, and c was read after that list: so what was collected before it is no hole.
    """
    tip = known
    while (following := 0 if tip is None else tip + 1) in listed:
        tip = following
    return tip


def trim_mark(
    objects: Iterable[LogObject], *, seen_wal_id: int | None, committed_lsn: int
) -> LogEnd | None:
    """The record up to which the log may be dropped; None: nothing may.

    `seen_wal_id` is how far this very member has listed the archive, without a hole. Nothing that
    was heard from others counts, nor that an upload ended well.
    """
    mark = None
    for each in objects:
        if not is_archived(each.wal_id, seen_wal_id) or each.last.lsn > committed_lsn:
            break
        mark = each.last
    return mark


def is_archived(wal_id: int, tip: int | None) -> bool:
    """Whether an object is in the archive that goes up to `tip`."""
    return tip is not None and wal_id <= tip


@dataclass(frozen=True, slots=True)
class TakeoverTimer:
    """How long a member has seen the same object wait for whoever is to archive it."""

    wal_id: int | None = None  # None: nothing waits
    since_ms: float = 0  # by its own clock of lapsed time

    def looked(self, first_waiting: int | None, now_ms: float) -> TakeoverTimer:
        """After a look at the archive, in which this object is the first that is missing."""
        return self if first_waiting == self.wal_id else TakeoverTimer(first_waiting, now_ms)

    def has_ended(self, now_ms: float, *, takeover_ms: float, place: int) -> bool:
        """Whether it archives now what waits. Those with a lower `place` have tried before it."""
        return self.wal_id is not None and now_ms - self.since_ms >= takeover_ms * (1 + place)


def takeover_place(member_id: bytes, configuration: Configuration, appointed_id: bytes) -> int:
    """How many others try before this member does when the appointed one does not archive."""
    ids = [member.id for member in configuration.everyone]
    start = ids.index(appointed_id) + 1 if appointed_id in ids else 0
    order = [*ids[start:], *ids[:start]]
    return order.index(member_id) if member_id in order else len(order)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a writer knows of a member that could archive."""

    member_id: bytes
    is_fit: bool  # connected, and its log is sound
    flushed_lsn: int
    archived_wal_id: int | None


@dataclass(frozen=True, slots=True)
class Appointment:
    """Whom the writer has asked to archive, and since when nothing has come of it."""

    member_id: bytes = b""  # empty: nobody
    progress: int | None = None  # the object up to which that member archived, when last asked
    since_ms: float = 0  # when it was seen to move, or nothing waited, or it was appointed
    tried: frozenset[bytes] = frozenset()  # were appointed since, and nothing came of it

    def judged(
        self,
        candidates: Collection[Candidate],
        now_ms: float,
        *,
        complete_wal_id: int | None,
        takeover_ms: float,
    ) -> Appointment:
        """Whom to ask from now on. `complete_wal_id` is the last object that can be archived.

        Another one is asked when this one is gone, or when its archive has stood still for
        `takeover_ms` while something waits.
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
        if another is None:  # all were: once more from the beginning
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
    """The fit one with the longest log; of several the one that the id decides."""
    fit = [each for each in candidates if each.is_fit and each.member_id not in tried]
    return max(fit, key=lambda each: (each.flushed_lsn, each.member_id), default=None)
