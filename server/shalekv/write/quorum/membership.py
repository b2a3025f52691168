"""Changes of the members of a quorum WAL, by edits of the manifest (`protocol.membership`).

Each change is two edits. The process that asks for the change makes the first one, here. The writer
that serves, or the next one, makes the second when a majority of the next members has its log. A
new member is asked first to allocate a log (`Links.admit`), so that its id is known. An edit
applies to the generation that was read before that. So an edit that comes late, or is retried, does
not undo other changes.

`ForcedRecovery` goes on without a majority, and gives up what only the lost members have. It is for
the day on which a majority is gone for good, and loses what was acknowledged by that majority
alone. So it is planned first, and the plan says what is kept. Of the members that answer, those
with the best log stay. With others among them, a majority could elect a worse log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from shalekv.errors import (
    DatabaseExists,
    DatabaseMismatch,
    InvalidRequest,
    NotAMember,
    QuorumUnavailable,
    ShaleError,
)
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import (
    Configuration,
    Member,
    begin_change,
    cancel_change,
    check_generation,
    check_majority_lost,
    check_members,
    check_unchanging,
    force_members,
)
from shalekv.protocol.quorum.proposer import best_log
from shalekv.protocol.quorum_records import LogEnd, LogHealth
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.quorum.links import DatabasePlace, LinkBroken, Links, MemberStatus
from shalekv.write.wal import list_wal

log = structlog.get_logger()

REQUEST_ID_BYTES = 16
PORT_MAX = 65_535
NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class MemberProbe:
    """The state of one member as it reports it; None: it does not answer, or is another one now."""

    member: Member
    status: MemberStatus | None
    problem: str = ""  # why there is no status

    @property
    def is_sound(self) -> bool:
        """Return whether its log can be trusted."""
        return self.status is not None and self.status.health is LogHealth.SOUND


def configuration_of(manifest: Manifest) -> Configuration:
    """The members. Raises `DatabaseMismatch` when the WAL is not in safekeepers."""
    if manifest.wal_mode is not WalMode.QUORUM:
        raise DatabaseMismatch(
            "this database has its WAL in the object store, and no safekeepers: see `shalekv "
            "safekeeper switch --help`"
        )
    return Configuration.of(manifest)


async def probe_members(
    links: Links, database_id: bytes, members: Iterable[Member]
) -> Sequence[MemberProbe]:
    """Ask each member for its state."""
    return [await _probe(links, database_id, member) for member in members]


async def _probe(links: Links, database_id: bytes, member: Member) -> MemberProbe:
    try:
        node = await links.status(member.address, database_id)
    except NotAMember:
        return MemberProbe(
            member, None, "does not have this database: its disk was lost or exchanged"
        )
    except (LinkBroken, ShaleError) as error:
        return MemberProbe(member, None, f"does not answer: {error}")
    found = {status.member_id: status for status in node.members}
    if member.id in found:
        return MemberProbe(member, found[member.id])
    others = ", ".join(member_id.hex() for member_id in found)
    return MemberProbe(member, None, f"is another member by now ({others}): it was made anew")


async def admit(
    links: Links,
    place: DatabasePlace,
    addresses: Sequence[str],
    request_id: bytes,
    *,
    is_new: bool = False,
) -> tuple[Member, ...]:
    """Make each node a member of the database. Returns the new members.

    A call that is repeated with its `request_id` returns the same members. Raises `InvalidRequest`,
    `QuorumUnavailable` when a node does not answer, and errors of the nodes. After an error, nodes
    notice by themselves that a log is not needed. Those of a database that `is_new`, which no other
    process knows, are retired at once.
    """
    if len(set(addresses)) != len(addresses):
        raise InvalidRequest("safekeepers", "an address occurs twice")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
            raise InvalidRequest("safekeepers", f"{address!r} is not HOST:PORT")
    members: list[Member] = []
    try:
        for address in addresses:
            member_id = await _admit_one(links, place, address, request_id)
            members.append(Member(member_id, address))
    except ShaleError:
        if is_new:
            await retire(links, place.database_id, members)
        raise
    return tuple(members)


async def _admit_one(links: Links, place: DatabasePlace, address: str, request_id: bytes) -> bytes:
    try:
        return await links.admit(address, place, request_id)
    except LinkBroken as error:
        problem = f"the safekeeper at {address} does not answer: {error}. Nothing was changed"
        raise QuorumUnavailable(problem) from error


async def admit_again(
    links: Links, place: DatabasePlace, members: Iterable[Member], request_id: bytes
) -> tuple[Member, ...]:
    """Admit the members again, since some may have deleted their log meanwhile. Returns them.

    A member that does not answer is assumed to be unchanged.
    """
    found = []
    for member in members:
        try:
            member_id = await links.admit(member.address, place, request_id)
        except (LinkBroken, ShaleError) as error:
            log.warning("a safekeeper was not asked again", at=member.address, problem=str(error))
            member_id = member.id
        found.append(Member(member_id, member.address))
    return tuple(found)


async def retire(links: Links, database_id: bytes, members: Iterable[Member]) -> None:
    """Let nodes delete logs that are not needed any more; they also notice that by themselves."""
    for member in members:
        try:
            await links.retire(member.address, database_id, member.id)
        except (LinkBroken, ShaleError) as error:
            log.warning("a safekeeper keeps its log for now", at=member.address, problem=str(error))


class Reconfiguration:
    """Changes of the members of one database."""

    def __init__(self, store: CasStore, links: Links) -> None:
        self._store = store
        self._links = links
        self._stored = StoredManifest(store)

    async def add(self, addresses: Sequence[str]) -> Manifest:
        """Begin to add the nodes at these addresses.

        Raises `InvalidRequest` for an address that is a member already or while a change is under
        way, and as `admit`.
        """
        configuration = await self._stable_configuration()
        for address in addresses:
            if address in {member.address for member in configuration.members}:
                problem = f"{address} is a member already: if it was made anew, use `replace`"
                raise InvalidRequest("safekeepers", problem)
        new = await self._admit(addresses)
        return await self._change(configuration, (*configuration.members, *new))

    async def remove(self, addresses: Sequence[str]) -> Manifest:
        """Begin to remove the members at these addresses."""
        configuration = await self._check_known(addresses)
        left = tuple(each for each in configuration.members if each.address not in addresses)
        return await self._change(configuration, left)

    async def replace(self, old_address: str, new_address: str) -> Manifest:
        """Begin to replace a member by a node.

        The addresses are the same when a node has lost its disk: it returns as another member.
        """
        configuration = await self._check_known([old_address])
        others = {member.address for member in configuration.members} - {old_address}
        if new_address in others:
            raise InvalidRequest("safekeepers", f"{new_address} is a member already")
        try:
            (new,) = await self._admit([new_address])
        except DatabaseExists as error:
            if old_address == new_address:
                raise _has_its_log(old_address) from error
            raise
        if new in configuration.members:  # it was admitted, and no writer has connected to it yet
            raise _has_its_log(old_address)
        wanted = tuple(new if m.address == old_address else m for m in configuration.members)
        return await self._change(configuration, wanted)

    async def cancel(self) -> Manifest:
        """Cancel a change that is under way."""
        joint = configuration_of(await self._stored.refresh())
        if not joint.is_joint:
            raise InvalidRequest("members", "no change is under way")

        def edit(manifest: Manifest) -> Manifest:
            check_generation(manifest, joint.generation)
            return cancel_change(manifest)

        def landed(manifest: Manifest) -> bool:
            return configuration_of(manifest).next != joint.next

        return await self._stored.edit(edit, landed)

    async def _change(self, before: Configuration, wanted: tuple[Member, ...]) -> Manifest:
        """Make the first edit of a change of `before`. Raises `InvalidRequest`."""

        def edit(manifest: Manifest) -> Manifest:
            check_generation(manifest, before.generation)
            return begin_change(manifest, wanted)

        def landed(manifest: Manifest) -> bool:
            after = configuration_of(manifest)
            return wanted in (after.next, after.members)

        return await self._stored.edit(edit, landed)

    async def _admit(self, addresses: Sequence[str]) -> tuple[Member, ...]:
        request_id = self._store.runtime.random.randbytes(REQUEST_ID_BYTES)
        place = DatabasePlace(self._stored.current.database_id, self._store.url)
        return await admit(self._links, place, addresses, request_id)

    async def _stable_configuration(self) -> Configuration:
        """The members, before new ones are admitted. Raises while a change is under way."""
        configuration = configuration_of(await self._stored.refresh())
        check_unchanging(configuration)
        return configuration

    async def _check_known(self, addresses: Sequence[str]) -> Configuration:
        configuration = await self._stable_configuration()
        known = [member.address for member in configuration.members]
        for address in addresses:
            if address not in known:
                problem = f"{address} is not a member: the members are {', '.join(known)}"
                raise InvalidRequest("safekeepers", problem)
        return configuration


def _has_its_log(address: str) -> InvalidRequest:
    problem = f"{address} has its log: there is nothing to replace"
    return InvalidRequest("safekeepers", problem)


@dataclass(frozen=True, slots=True)
class Recovery:
    """The plan of a recovery without a majority: what it keeps, and what it gives up."""

    planned_for: Manifest
    probes: Sequence[MemberProbe]
    survivors: tuple[Member, ...]  # the members from then on
    kept_lsn: int  # the end of the log that is kept; 0: only the archive is
    archive_tip: int | None  # the last object of the archive
    kept_wal_id: int | None  # the last object that anything is known of

    @property
    def lost(self) -> Sequence[Member]:
        """The members whose logs are given up."""
        kept = {member.id for member in self.survivors}
        return [each.member for each in self.probes if each.member.id not in kept]

    @property
    def problems(self) -> Sequence[str]:
        """Why a log is not kept, for each that is not."""
        return [
            f"{each.member.address} {_problem(each)}"
            for each in self.probes
            if each.member not in self.survivors
        ]


class ForcedRecovery:
    """The recovery of one database without a majority."""

    def __init__(self, store: CasStore, links: Links) -> None:
        self._store = store
        self._links = links
        self._stored = StoredManifest(store)

    async def plan(self) -> Recovery:
        """Find out what would be kept. Raises `InvalidRequest` when nothing has to be given up."""
        manifest = await self._stored.refresh()
        configuration = configuration_of(manifest)
        probes = await probe_members(self._links, manifest.database_id, configuration.everyone)
        sound = {each.member.id for each in probes if each.is_sound}
        check_majority_lost(configuration, sound)
        tip = await self._archive_tip(manifest)
        logs = {each.member: _end(each) for each in probes if each.is_sound}
        compacted = manifest.wal_id_last_compacted
        best = best_log(logs.values(), archive_tip=tip, last_compacted=compacted)
        if best is None:
            return Recovery(manifest, probes, (), 0, tip, tip)
        survivors = tuple(member for member, last in logs.items() if last == best)
        kept_wal_id = tip if best.wal_id is None else best.wal_id
        return Recovery(manifest, probes, survivors, best.lsn, tip, kept_wal_id)

    async def recover(self, planned: Recovery, addresses: Sequence[str]) -> Manifest:
        """Make the survivors the members, or, if there are none, new nodes at `addresses`.

        The previous writer is fenced when it reads the manifest next. Until then it could
        acknowledge writes if the lost members came back, so they must stay down. Raises
        `InvalidRequest` when a writer has opened the database, or members were changed, since the
        plan was made, and as `admit`.
        """
        members = planned.survivors
        if not members:
            request_id = self._store.runtime.random.randbytes(REQUEST_ID_BYTES)
            place = DatabasePlace(planned.planned_for.database_id, self._store.url)
            members = await admit(self._links, place, addresses, request_id)
        check_members(members)
        nonce = self._store.runtime.random.randbytes(NONCE_BYTES)
        edit = partial(force_members, before=planned.planned_for, members=members, nonce=nonce)
        return await self._stored.edit(edit, lambda manifest: manifest.writer_nonce == nonce)

    async def _archive_tip(self, manifest: Manifest) -> int | None:
        folder = await list_wal(self._store, manifest.first_uncompacted_wal_id)
        return folder.first_gap - 1 if folder.first_gap else None


def _end(probe: MemberProbe) -> LogEnd:
    return LogEnd() if probe.status is None else probe.status.log.last


def _problem(probe: MemberProbe) -> str:
    if probe.status is None:
        return probe.problem
    if not probe.is_sound:
        return f"has lost records, and is {probe.status.health.value}"
    return f"has a log that ends with record {probe.status.log.last.lsn}, before others"
