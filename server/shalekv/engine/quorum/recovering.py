"""Going on without a majority: whatever only the lost members hold is given up.

It is for the day on which a majority is gone for good, and loses what was acknowledged by that
majority alone. So it is planned first, and the plan says what is kept. Of the members that answer
those stay that have the best of the logs: with others among them a majority could elect a worse
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from shalekv.engine.wal import list_wal
from shalekv.errors import InvalidRequest, LogBehindArchive
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.membership import Configuration, Member, check_members
from shalekv.protocol.proposer import next_object
from shalekv.protocol.quorum_records import Mark
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.quorum.links import DatabasePlace, Links
from shalekv.write.quorum.membership import (
    REQUEST_ID_BYTES,
    Surveyed,
    admit,
    configuration_of,
    survey,
)

NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a recovery without a majority keeps, and what it gives up."""

    planned_for: Manifest
    surveyed: Sequence[Surveyed]
    survivors: tuple[Member, ...]  # the members from then on
    kept_lsn: int  # the end of the log that is kept; 0: only the archive is
    archive_tip: int | None  # the last object of the archive
    kept_wal_id: int | None  # the last object that anything is known of

    @property
    def lost(self) -> Sequence[Member]:
        """Those whose logs are given up."""
        kept = {member.id for member in self.survivors}
        return [each.member for each in self.surveyed if each.member.id not in kept]

    @property
    def problems(self) -> Sequence[str]:
        """Why a log is not kept, for each that is not."""
        return [
            f"{each.member.address} {_problem(each)}"
            for each in self.surveyed
            if each.member not in self.survivors
        ]


class Recovering:
    """The recovery of one database."""

    def __init__(self, store: CasStore, links: Links) -> None:
        """Nothing is read yet."""
        self._store = store
        self._links = links
        self._stored = StoredManifest(store)

    async def plan(self) -> Recovery:
        """What would be kept. Raises `InvalidRequest` when nothing has to be given up."""
        manifest = await self._stored.refresh()
        configuration = configuration_of(manifest)
        surveyed = await survey(self._links, manifest.database_id, configuration.everyone)
        sound = {each.member.id for each in surveyed if each.is_sound}
        _check_lost(configuration, sound)
        tip = await self._archive_tip(manifest)
        logs = {each.member: _end(each) for each in surveyed if each.is_sound}
        best = max(logs.values(), key=lambda mark: mark.rank, default=None)
        if best is None or not _can_be_used(best, tip, manifest):
            return Recovery(manifest, surveyed, (), 0, tip, tip)
        survivors = tuple(member for member, last in logs.items() if last == best)
        kept_wal_id = tip if best.wal_id is None else best.wal_id
        return Recovery(manifest, surveyed, survivors, best.lsn, tip, kept_wal_id)

    async def recover(self, planned: Recovery, addresses: Sequence[str]) -> Manifest:
        """Make the survivors the members, or, where there is none, new nodes at `addresses`.

        Whoever was writer before is fenced when it looks at the manifest next. Until then it could
        acknowledge writes if the lost members came back: they must stay down. Raises
        `InvalidRequest` when a writer has opened the database, or members were changed, since it
        was planned, and as `admit`.
        """
        members = planned.survivors
        if not members:
            request_id = self._store.runtime.random.randbytes(REQUEST_ID_BYTES)
            place = DatabasePlace(planned.planned_for.database_id, self._store.url)
            members = await admit(self._links, place, addresses, request_id)
        check_members(members)
        nonce = self._store.runtime.random.randbytes(NONCE_BYTES)
        edit = partial(_recovered, before=planned.planned_for, members=members, nonce=nonce)
        return await self._stored.edit(edit, lambda manifest: manifest.writer_nonce == nonce)

    async def _archive_tip(self, manifest: Manifest) -> int | None:
        folder = await list_wal(self._store, manifest.first_uncompacted_wal_id)
        return folder.first_gap - 1 if folder.first_gap else None


def _check_lost(configuration: Configuration, sound: set[bytes]) -> None:
    """Raise `InvalidRequest` unless nobody can go on without giving something up."""
    if configuration.is_majority(sound):
        problem = "a majority of the safekeepers answers: a writer can open the database"
        raise InvalidRequest("members", problem)
    if configuration.is_joint and replace(configuration, next=()).is_majority(sound):
        raise InvalidRequest(
            "members",
            "a majority of the present members answers, and only some of those to be do not: "
            "`shalekv safekeeper cancel` gives up nothing but the change",
        )


def _can_be_used(last: Mark, tip: int | None, manifest: Manifest) -> bool:
    """Whether a writer could open with this log: it is not behind the archive."""
    compacted = manifest.wal_id_last_compacted
    try:
        next_object(last, archive_tip=tip, last_compacted=compacted)
    except LogBehindArchive:
        return False
    return True


def _end(surveyed: Surveyed) -> Mark:
    return Mark() if surveyed.status is None else surveyed.status.log.last


def _problem(surveyed: Surveyed) -> str:
    if surveyed.status is None:
        return surveyed.problem
    if not surveyed.is_sound:
        return f"has lost records, and is {surveyed.status.health.value}"
    return f"has a log that ends with record {surveyed.status.log.last.lsn}, before others"


def _recovered(
    manifest: Manifest, *, before: Manifest, members: tuple[Member, ...], nonce: bytes
) -> Manifest:
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
