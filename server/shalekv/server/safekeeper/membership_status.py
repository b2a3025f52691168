"""A member and the database that it belongs to: whether the manifest still names it.

A manifest that has ceased to name a member is read twice, some time apart, before a log goes that
nobody asked to delete. One whose records are not all seen in the archive yet has more time.

A member that no writer has turned to is one that a manifest may be about to name: whoever has
asked for it may stand still. It goes when that is ruled out:

- another database is at its place, so that its own can't be created there any more;
- a manifest of its database is of a later generation than when room was asked for: edits are of the
  generation that was looked at before (`protocol.membership`). If none comes, this node makes
  one, which changes nothing else;
- there was no manifest for long. Then whoever creates the database late looks after it.

It has promised nothing and holds nothing, so whatever happens nothing is lost with it.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field
from functools import partial

import structlog

from shalekv.errors import (
    DatabaseMismatch,
    DatabaseNotFound,
    InvalidRequest,
    StoreBroken,
)
from shalekv.protocol.manifest import WalMode
from shalekv.protocol.membership import Configuration, close_generation
from shalekv.server.safekeeper.member import LocalMember
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.quorum.links import DatabasePlace, MemberStatus

log = structlog.get_logger()

_UNNAMED_CHECKS = 2
_UNARCHIVED_CHECKS = 10
_UNTOUCHED_CHECKS = 10
_RULE_OUT_TIMEOUT_MS = 20_000


class MembershipStatus(enum.Enum):
    """What the manifest says of a member."""

    NAMED = "named"  # among the present members, or those to be
    UNNAMED = "unnamed"
    DISPLACED = "displaced"  # it is that of another database
    UNKNOWN = "unknown"  # there is none, or one of an older state


@dataclass(slots=True)
class Held:
    """A member that this node has."""

    member: LocalMember
    store: ObjectStore  # of its database
    cas: CasStore
    manifest: StoredManifest = field(init=False)
    archiving: asyncio.Task[None] | None = None  # of the node's group
    unnamed_checks: int = 0  # one after the other, that found it unnamed
    generation: int | None = None  # of the first of these; None: it was not named in any

    def __post_init__(self) -> None:
        """Nothing is read yet."""
        self.manifest = StoredManifest(self.cas)

    def expect_to_be_named(self) -> None:
        """Somebody has asked for it, after a look at the manifest, and is about to name it."""
        self.unnamed_checks = 0
        self.generation = None

    def stop_archiving(self) -> None:
        """Nothing more is added to the archive; what is under way may still arrive there."""
        if self.archiving is not None:
            self.archiving.cancel()

    @property
    def is_untouched(self) -> bool:
        """True if no writer has asked it yet. Then perhaps no manifest has named it either."""
        return self.member.state.is_untouched

    @property
    def is_archived(self) -> bool:
        """Whether nothing is in its log that is not in the archive."""
        log = self.member.state.log
        return log.last.lsn == log.base.lsn

    async def standing(self) -> MembershipStatus:
        """What the manifest says now. Raises `CorruptObject`, `StoreError`."""
        member_id = self.member.identity.member_id
        if self.is_untouched:  # its database may have been deleted, and another one created
            self.manifest = StoredManifest(self.cas)
        try:
            manifest = await self.manifest.refresh()
        except DatabaseNotFound:
            return MembershipStatus.UNKNOWN
        if manifest.database_id != self.member.identity.database_id:
            return MembershipStatus.DISPLACED
        if manifest.writer_epoch < self.member.state.promise.epoch:
            # An epoch is promised after a manifest has it: this is a backup that was put back.
            return MembershipStatus.UNKNOWN
        if manifest.wal_mode is not WalMode.QUORUM:
            return MembershipStatus.UNNAMED
        named = {each.id for each in Configuration.of(manifest).everyone}
        return MembershipStatus.NAMED if member_id in named else MembershipStatus.UNNAMED

    async def is_of_no_use(self) -> bool:
        """Look once more, as is done regularly. Raises `CorruptObject`, `StoreError`."""
        standing = await self.standing()
        # From here on nothing is waited for: what is untouched now has told nobody anything.
        if self.is_untouched:
            return self._will_not_be_named(standing)
        self.unnamed_checks = self.unnamed_checks + 1 if standing is MembershipStatus.UNNAMED else 0
        return self.unnamed_checks >= (_UNNAMED_CHECKS if self.is_archived else _UNARCHIVED_CHECKS)

    def _will_not_be_named(self, standing: MembershipStatus) -> bool:
        if standing is MembershipStatus.NAMED:
            self.expect_to_be_named()
            return False
        self.unnamed_checks += 1
        if standing is not MembershipStatus.UNNAMED:
            is_displaced = standing is MembershipStatus.DISPLACED
            return self.unnamed_checks >= (_UNNAMED_CHECKS if is_displaced else _UNTOUCHED_CHECKS)
        present = self.manifest.current.wal_generation
        if self.generation is None:
            self.generation = present
        return present != self.generation

    @property
    def waits_in_vain(self) -> bool:
        """Whether whoever was about to name it should have done so long ago."""
        is_late = self.unnamed_checks >= _UNTOUCHED_CHECKS
        return self.is_untouched and self.generation is not None and is_late

    async def rule_out(self) -> None:
        """Have no change name it that was prepared by now; the next look sees if it has worked.

        Raises `StoreBroken` when this process may not write to the store any more.
        """
        assert self.generation is not None
        before, edit = self.generation, partial(close_generation, generation=self.generation)
        try:
            async with asyncio.timeout(_RULE_OUT_TIMEOUT_MS / 1_000):
                await self.manifest.edit(edit, lambda manifest: manifest.wal_generation != before)
        except StoreBroken:
            raise
        except InvalidRequest:  # somebody else has begun a generation
            return
        except Exception as error:  # noqa: BLE001 - as when it is retired meanwhile: no others end
            problem = str(error) or f"not done within {_RULE_OUT_TIMEOUT_MS} ms"
            log.warning("a member that nobody names is kept", problem=problem, **self.told)

    @property
    def told(self) -> dict[str, str]:
        """What logs tell of it."""
        identity = self.member.identity
        return {
            "url": identity.url,
            "database_id": identity.database_id.hex(),
            "member_id": identity.member_id.hex(),
            "health": self.member.state.health.value,
        }

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
