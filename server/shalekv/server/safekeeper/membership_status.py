"""Membership status of the members of a node: whether the manifest of the database names them.

Before a node discards a log that it was not asked to delete, the manifest has to be found without
the member in two checks, some time apart; in more if the log has records that were not seen in the
archive.

A member that no writer has used may be named soon, by a process that has requested it and is
stalled. It is discarded when that is impossible:

- Another database is at its URL, so its own cannot be created there any more.
- The manifest of its database has a later generation than when the member was requested: an edit of
  the members requires the generation that was read before (`protocol.membership`). If the
  generation does not change, this node raises it by an edit that changes nothing else.
- There was no manifest for long. If the database is created late, its creation admits the members
  again.

Such a member has promised nothing and has no records, so nothing is lost with it in any case. See
server/docs/safekeepers.md, "Members that no manifest names".
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

import structlog

from shalekv.errors import (
    DatabaseMismatch,
    DatabaseNotFound,
    InvalidRequest,
    StoreBroken,
)
from shalekv.protocol.membership import MembershipStatus, close_generation, membership_status
from shalekv.server.safekeeper.member import LocalMember
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.quorum.links import DatabasePlace, MemberStatus

log = structlog.get_logger()

# Checks in a row, at intervals of `LOG_RETIRE_INTERVAL_MS`, before a member is discarded.
_UNNAMED_CHECKS = 2
_UNARCHIVED_CHECKS = 10
_UNTOUCHED_CHECKS = 10
_RULE_OUT_TIMEOUT_MS = 20_000


@dataclass(slots=True)
class HostedMember:
    """A member on this node, with its store, its archiver, and the checks of its membership."""

    member: LocalMember
    store: ObjectStore  # of its database
    cas: CasStore
    manifest: StoredManifest = field(init=False)
    archiver_task: asyncio.Task[None] | None = None  # in the task group of the node
    unnamed_checks: int = 0  # checks in a row that did not find it named
    generation: int | None = None  # of the manifest at the first of them that found it unnamed

    def __post_init__(self) -> None:
        """Read nothing yet."""
        self.manifest = StoredManifest(self.cas)

    def expect_to_be_named(self) -> None:
        """Restart the checks: the member was requested, and a manifest may name it soon."""
        self.unnamed_checks = 0
        self.generation = None

    def stop_archiver(self) -> None:
        """Stop archiving; uploads in flight may still succeed."""
        if self.archiver_task is not None:
            self.archiver_task.cancel()

    @property
    def is_untouched(self) -> bool:
        """True if no writer has used it yet. Then perhaps no manifest has named it either."""
        return self.member.state.is_untouched

    @property
    def is_archived(self) -> bool:
        """True if all records of its log were archived and trimmed."""
        log = self.member.state.log
        return log.last.lsn == log.base.lsn

    async def membership(self) -> MembershipStatus:
        """Read the manifest, and return the status by it. Raises `CorruptObject`, `StoreError`."""
        if self.is_untouched:  # its database may have been deleted, and another one created
            self.manifest = StoredManifest(self.cas)
        try:
            manifest = await self.manifest.refresh()
        except DatabaseNotFound:
            return MembershipStatus.UNKNOWN
        return membership_status(
            manifest,
            database_id=self.member.identity.database_id,
            member_id=self.member.identity.member_id,
            promise=self.member.state.promise,
        )

    async def is_unneeded(self) -> bool:
        """Check once more, and return True if the member is to be discarded.

        To be called regularly. Raises `CorruptObject`, `StoreError`.
        """
        membership = await self.membership()
        # No await from here on: a member that is untouched now has promised nothing.
        if self.is_untouched:
            return self._will_not_be_named(membership)
        self.unnamed_checks = (
            self.unnamed_checks + 1 if membership is MembershipStatus.UNNAMED else 0
        )
        return self.unnamed_checks >= (_UNNAMED_CHECKS if self.is_archived else _UNARCHIVED_CHECKS)

    def _will_not_be_named(self, membership: MembershipStatus) -> bool:
        if membership is MembershipStatus.NAMED:
            self.expect_to_be_named()
            return False
        self.unnamed_checks += 1
        if membership is not MembershipStatus.UNNAMED:
            is_displaced = membership is MembershipStatus.DISPLACED
            return self.unnamed_checks >= (_UNNAMED_CHECKS if is_displaced else _UNTOUCHED_CHECKS)
        present = self.manifest.current.wal_generation
        if self.generation is None:
            self.generation = present
        return present != self.generation

    @property
    def is_overdue(self) -> bool:
        """True if it is untouched, and the manifest should have named it long ago."""
        is_late = self.unnamed_checks >= _UNTOUCHED_CHECKS
        return self.is_untouched and self.generation is not None and is_late

    async def prevent_naming(self) -> None:
        """Raise the generation of the manifest, so that no change prepared before can name it.

        The next check finds out whether that has worked. Raises `StoreBroken` when this process may
        not write to the store any more.
        """
        assert self.generation is not None
        before, edit = self.generation, partial(close_generation, generation=self.generation)
        try:
            async with asyncio.timeout(_RULE_OUT_TIMEOUT_MS / 1_000):
                await self.manifest.edit(edit, lambda manifest: manifest.wal_generation != before)
        except StoreBroken:
            raise
        except InvalidRequest:  # another process has raised it
            return
        except Exception as error:  # noqa: BLE001 - one member must not end others: it may be retired now
            problem = str(error) or f"not done within {_RULE_OUT_TIMEOUT_MS} ms"
            log.warning("a member that nobody names is kept", problem=problem, **self.log_fields)

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of log lines about this member."""
        identity = self.member.identity
        return {
            "url": identity.url,
            "database_id": identity.database_id.hex(),
            "member_id": identity.member_id.hex(),
            "health": self.member.state.health.value,
        }

    def status(self) -> MemberStatus:
        """Report the state of the member."""
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
            is_archiver=member.archiver_status.is_archiver,
            archive_problem=member.archiver_status.problem,
            full_problem=member.full_problem,
        )


async def check_database(cas: CasStore, database_id: bytes) -> None:
    """Raise `DatabaseMismatch` if there is another database; there may be none yet."""
    try:
        manifest = await StoredManifest(cas).refresh()
    except DatabaseNotFound:
        return
    if manifest.database_id != database_id:
        raise DatabaseMismatch(
            f"{cas.url} holds the database {manifest.database_id.hex()}, not {database_id.hex()}"
        )
