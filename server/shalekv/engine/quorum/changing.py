"""Changes of who the members are, by edits of the manifest (core.quorum.membership).

Each change is two edits: the first is made here, by whoever asks for the change; the second by the
writer that serves, or by the next one, when a majority of the members to be holds its log. A member
that comes new is asked first to make room (`Links.admit`), so that its id is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from shalekv.core.manifest import Manifest, WalMode
from shalekv.core.quorum.membership import (
    Configuration,
    Member,
    begin_change,
    cancel_change,
    check_unchanging,
)
from shalekv.core.quorum.messages import Health
from shalekv.engine.quorum.links import DatabasePlace, LinkBroken, Links, MemberStatus
from shalekv.errors import (
    DatabaseExists,
    DatabaseMismatch,
    InvalidRequest,
    NotAMember,
    QuorumUnavailable,
    ShaleError,
)
from shalekv.manifest.stored import StoredManifest
from shalekv.store.cas import CasStore

log = structlog.get_logger()

REQUEST_ID_BYTES = 16
PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What one member says of itself; None: it does not answer, or is another one by now."""

    member: Member
    status: MemberStatus | None
    problem: str = ""  # why there is no status

    @property
    def is_sound(self) -> bool:
        """Whether its log can be believed."""
        return self.status is not None and self.status.health is Health.SOUND


def configuration_of(manifest: Manifest) -> Configuration:
    """The members. Raises `DatabaseMismatch` when the database has none."""
    if manifest.wal_mode is not WalMode.QUORUM:
        raise DatabaseMismatch(
            "this database has its WAL in the object store, and no safekeepers: see `shalekv "
            "safekeeper switch --help`"
        )
    return Configuration.of(manifest)


async def survey(links: Links, database_id: bytes, members: Iterable[Member]) -> Sequence[Surveyed]:
    """Ask each member what it holds."""
    return [await _survey_one(links, database_id, member) for member in members]


async def _survey_one(links: Links, database_id: bytes, member: Member) -> Surveyed:
    try:
        node = await links.status(member.address, database_id)
    except NotAMember:
        return Surveyed(member, None, "does not have this database: its disk was lost or exchanged")
    except (LinkBroken, ShaleError) as error:
        return Surveyed(member, None, f"does not answer: {error}")
    found = {status.member_id: status for status in node.members}
    if member.id in found:
        return Surveyed(member, found[member.id])
    others = ", ".join(member_id.hex() for member_id in found)
    return Surveyed(member, None, f"is another member by now ({others}): it was made anew")


async def admit(
    links: Links, place: DatabasePlace, addresses: Sequence[str], request_id: bytes
) -> tuple[Member, ...]:
    """Have each node make room for the database: who they are from now on.

    A call that is repeated with its `request_id` gives the same members. Raises `InvalidRequest`,
    `QuorumUnavailable` when a node does not answer, and what nodes say.
    """
    if len(set(addresses)) != len(addresses):
        raise InvalidRequest("safekeepers", "an address stands there twice")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
            raise InvalidRequest("safekeepers", f"{address!r} is not HOST:PORT")
    members = []
    for address in addresses:
        try:
            members.append(Member(await links.admit(address, place, request_id), address))
        except LinkBroken as error:
            problem = f"the safekeeper at {address} does not answer: {error}. Nothing was changed"
            raise QuorumUnavailable(problem) from error
    return tuple(members)


async def retire(links: Links, database_id: bytes, members: Iterable[Member]) -> None:
    """Let the nodes delete what nobody needs any more; they find out by themselves, too."""
    for member in members:
        try:
            await links.retire(member.address, database_id, member.id)
        except (LinkBroken, ShaleError) as error:
            log.warning("a safekeeper keeps its log for now", at=member.address, problem=str(error))


class Changing:
    """The changes of one database."""

    def __init__(self, store: CasStore, links: Links) -> None:
        """Nothing is read yet."""
        self._store = store
        self._links = links
        self._stored = StoredManifest(store)

    async def add(self, addresses: Sequence[str]) -> Manifest:
        """Begin to add the nodes at these addresses. Raises as `change` and `admit`."""
        configuration = await self._unchanging()
        for address in addresses:
            if address in {member.address for member in configuration.members}:
                problem = f"{address} is one already: if it was made anew, use `replace`"
                raise InvalidRequest("safekeepers", problem)
        new = await self._admit(addresses)
        return await self._change(lambda members: (*members, *new))

    async def remove(self, addresses: Sequence[str]) -> Manifest:
        """Begin to remove the members at these addresses."""
        await self._check_known(addresses)
        return await self._change(
            lambda members: tuple(each for each in members if each.address not in addresses)
        )

    async def replace(self, old_address: str, new_address: str) -> Manifest:
        """Begin to put a node in the place of a member.

        The addresses are the same when a node has lost its disk: it comes back as another member.
        """
        configuration = await self._check_known([old_address])
        others = {member.address for member in configuration.members} - {old_address}
        if new_address in others:
            raise InvalidRequest("safekeepers", f"{new_address} is one already")
        try:
            (new,) = await self._admit([new_address])
        except DatabaseExists as error:
            if old_address == new_address:
                raise _has_its_log(old_address) from error
            raise
        if new in configuration.members:  # it has made room, and no writer has turned to it yet
            raise _has_its_log(old_address)
        return await self._change(
            lambda members: tuple(new if m.address == old_address else m for m in members)
        )

    async def cancel(self) -> Manifest:
        """Give up a change that is under way."""
        manifest = await self._stored.refresh()
        if not configuration_of(manifest).is_joint:
            raise InvalidRequest("members", "no change is under way")
        joint = manifest.wal_members_next
        return await self._stored.edit(cancel_change, lambda m: m.wal_members_next != joint)

    async def _change(self, change: Callable[[tuple[Member, ...]], tuple[Member, ...]]) -> Manifest:
        """The first edit. Raises `InvalidRequest`, for instance when a change is under way."""
        wanted = change(configuration_of(await self._stored.refresh()).members)

        def edit(manifest: Manifest) -> Manifest:
            return begin_change(manifest, change(configuration_of(manifest).members))

        def landed(manifest: Manifest) -> bool:
            texts = tuple(map(str, wanted))
            return texts in (manifest.wal_members_next, manifest.wal_members)

        return await self._stored.edit(edit, landed)

    async def _admit(self, addresses: Sequence[str]) -> tuple[Member, ...]:
        request_id = self._store.runtime.random.randbytes(REQUEST_ID_BYTES)
        place = DatabasePlace(self._stored.current.database_id, self._store.url)
        return await admit(self._links, place, addresses, request_id)

    async def _unchanging(self) -> Configuration:
        """The members, before anybody is asked for room. Raises while a change is under way."""
        configuration = configuration_of(await self._stored.refresh())
        check_unchanging(configuration)
        return configuration

    async def _check_known(self, addresses: Sequence[str]) -> Configuration:
        configuration = await self._unchanging()
        known = [member.address for member in configuration.members]
        for address in addresses:
            if address not in known:
                problem = f"{address} is none of them: they are {', '.join(known)}"
                raise InvalidRequest("safekeepers", problem)
        return configuration


def _has_its_log(address: str) -> InvalidRequest:
    problem = f"{address} has its log: there is nothing to replace"
    return InvalidRequest("safekeepers", problem)
