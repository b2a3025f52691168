"""A member and the database that it belongs to: whether the manifest still names it."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from shalekv.core.manifest import WalMode
from shalekv.core.quorum.membership import Configuration
from shalekv.core.quorum.record import NO_BALLOT
from shalekv.engine.quorum.links import DatabasePlace, MemberStatus
from shalekv.errors import DatabaseMismatch, DatabaseNotFound
from shalekv.manifest.stored import StoredManifest
from shalekv.roles.safekeeper.member import Member
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore


class Standing(enum.Enum):
    """What the manifest says of a member."""

    NAMED = "named"  # among the present members, or those to be
    UNNAMED = "unnamed"
    UNKNOWN = "unknown"  # there is no manifest, or that of another database, or of an older state


@dataclass(slots=True)
class Held:
    """A member that this node has."""

    member: Member
    store: ObjectStore  # of its database
    cas: CasStore
    manifest: StoredManifest = field(init=False)
    archiving: asyncio.Task[None] | None = None  # of the node's group
    unnamed_checks: int = 0  # one after the other, that found it unnamed

    def __post_init__(self) -> None:
        """Nothing is read yet."""
        self.manifest = StoredManifest(self.cas)

    def stop_archiving(self) -> None:
        """Nothing more is added to the archive; what is under way may still arrive there."""
        if self.archiving is not None:
            self.archiving.cancel()

    @property
    def is_untouched(self) -> bool:
        """Whether no writer has ever turned to it: then no manifest may have named it yet."""
        state = self.member.state
        return state.promise == NO_BALLOT and not state.log.last.lsn

    @property
    def is_archived(self) -> bool:
        """Whether nothing is in its log that is not in the archive."""
        log = self.member.state.log
        return log.last.lsn == log.base.lsn

    async def standing(self) -> Standing:
        """What the manifest says now. Raises `CorruptObject`, `StoreError`."""
        member_id = self.member.identity.member_id
        try:
            manifest = await self.manifest.refresh()
        except DatabaseNotFound:
            return Standing.UNKNOWN
        if manifest.database_id != self.member.identity.database_id:
            return Standing.UNKNOWN
        if manifest.writer_epoch < self.member.state.promise.epoch:
            # An epoch is promised after a manifest has it: this is a backup that was put back.
            return Standing.UNKNOWN
        if manifest.wal_mode is not WalMode.QUORUM:
            return Standing.UNNAMED
        named = {each.id for each in Configuration.of(manifest).everyone}
        return Standing.NAMED if member_id in named else Standing.UNNAMED

    def status(self) -> MemberStatus:
        """What it holds."""
        member, identity = self.member, self.member.identity
        return MemberStatus(
            place=DatabasePlace(identity.database_id, identity.url),
            member_id=identity.member_id,
            promise=member.state.promise,
            health=member.state.health,
            log=member.state.log,
            committed_lsn=member.state.committed_lsn,
            archived_wal_id=member.state.archived_wal_id,
            log_bytes=member.unarchived_bytes,
            is_archiver=member.archiving.is_archiver,
            archive_problem=member.archiving.problem,
            full_problem=member.full_problem,
        )


async def check_database(cas: CasStore, database_id: bytes) -> None:
    """Raise `DatabaseMismatch` when another database is there; there may be none yet."""
    try:
        manifest = await StoredManifest(cas).refresh()
    except DatabaseNotFound:
        return
    if manifest.database_id != database_id:
        raise DatabaseMismatch(
            f"{cas.url} holds the database {manifest.database_id.hex()}, not {database_id.hex()}"
        )
