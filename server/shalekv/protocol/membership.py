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

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from shalekv.errors import InvalidRequest
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.opening import WriterId, check_owner

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
