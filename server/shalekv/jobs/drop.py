"""Deleting a database: its objects, their records, and its pins in the databases it is a clone of.

    fence older writers --> mark the manifest: the database cannot be opened any more
    --> remove the pins in other databases --> delete SSTs, policies, leases of elections, older
    manifests --> delete the WAL --> delete the marked manifest, which is the last object

A crash before the mark leaves the database as it was. After it, the marked manifest is all that the
next attempt needs: every step can be repeated. Nothing but this job reads a marked database.

The fences are deleted near the end, by the order of their names. An older writer that asks the
store for anything until then finds a fence or the mark, and ends. Where processes seem to use the
database, the job waits for `NOTICE_MS` before it deletes the fences. A writer that was paused for
longer, and continues after the end, may acknowledge what it had in flight.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace

import structlog

from shalekv.errors import (
    CorruptObject,
    DatabaseMismatch,
    DatabaseNotFound,
    IllegalState,
    InvalidRequest,
    ShaleError,
)
from shalekv.format import names
from shalekv.jobs.collect import DELETES_PER_S_COUNT, Deleter
from shalekv.jobs.pinned_clones import CloneState, check_clones
from shalekv.protocol.compaction.publish import claim_compactor_epoch
from shalekv.protocol.fencing import WriterId, check_owner
from shalekv.protocol.manifest import Manifest, Snapshot
from shalekv.protocol.origins import is_pin
from shalekv.protocol.retention import is_lease_expired
from shalekv.protocol.snapshot import NEVER, is_expired
from shalekv.read.origins import origin_pins
from shalekv.store.api import ObjectInfo
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest, edit_deadline
from shalekv.wording import moment
from shalekv.write.opening import fence_log

NOTICE_MS = 60_000  # in which a writer notices that another one has taken over (open_timeout_ms)
_NONCE_BYTES = 16
# In the order in which they are deleted, but for the marked manifest, which is the last object.
FOLDERS = (
    names.LEVELS_FOLDER,
    names.ACCESS_FOLDER,
    names.ELECTION_FOLDER,
    names.MANIFEST_FOLDER,
    names.WAL_FOLDER,
)
_JOBS = ("clone ", "backup ")  # how the names of snapshots begin that jobs make

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DropPlan:
    """A database that may be deleted, and what speaks against it."""

    manifest: Manifest
    users: Sequence[str]  # what seems to use it at present
    clones: Sequence[str]  # clones that would be lost, and those of which nothing is known
    objects: int
    size_bytes: int

    def check_unused(self) -> None:
        """Raise `InvalidRequest` if something speaks against the deletion."""
        problems = [f"in use ({each})" for each in self.users]
        problems += [f"needed by a clone ({each})" for each in self.clones]
        if problems and not self.is_begun:
            raise InvalidRequest(
                "database",
                f"it is {'; '.join(problems)}. Nothing was deleted. Stop what uses it, "
                "and delete its clones first; --force deletes it nevertheless",
            )

    def check_unchanged(self, current: Manifest, now_s: float) -> None:
        """Raise `InvalidRequest` if somebody has begun to need the database since this plan."""
        pins = {each.id for each in self.manifest.snapshots if is_pin(each)}
        problems = [f"in use ({each})" for each in _users(current, now_s)]
        problems += [
            f"needed by a clone ({each.name})"
            for each in current.snapshots
            if is_pin(each) and each.id not in pins
        ]
        if problems:
            raise InvalidRequest(
                "database",
                f"it is {'; '.join(problems)} since a moment ago. Nothing was deleted. Run the "
                "command again",
            )

    @property
    def is_begun(self) -> bool:
        """Return whether an earlier attempt was interrupted."""
        return self.manifest.is_dropped


class DropJob:
    """Deletes the database in one store."""

    def __init__(self, store: CasStore) -> None:
        """Read nothing yet."""
        self._store = store
        self._stored = StoredManifest(store, even_dropped=True)

    async def plan(self) -> DropPlan:
        """Return what there is to delete, and what speaks against it; change nothing of it.

        Raises `DatabaseNotFound`; what an earlier attempt may have left in the transactional store
        is deleted then. Raises `DatabaseMismatch` while the log is in safekeepers, or if `--cas` is
        another one, `CorruptObject` and `StoreError`.
        """
        try:
            manifest = await self._stored.refresh()
        except DatabaseNotFound:
            await self._store.repair(_is_collected)
            raise
        self._stored.check_cas_mode(manifest)
        if not manifest.is_log_in_store:
            raise DatabaseMismatch(
                "this database has its log in safekeepers, which would keep it. First stop its "
                "server, and move the log: `shalekv safekeeper switch --to object-store --url "
                f"{self._store.url}`"
            )
        pins = await check_clones(self._store, manifest)
        users = [*_users(manifest, await self._now_s())]
        listed = [each async for each in self._listed()]
        return DropPlan(
            manifest,
            users,
            [each.remark for each in pins if each.state is not CloneState.GONE],
            len(listed),
            sum(each.size_bytes for each in listed),
        )

    async def run(self, plan: DropPlan, *, is_forced: bool = False) -> Sequence[str]:
        """Delete the database of the plan; return the pins that are left, with the reasons.

        Raises `InvalidRequest` if something speaks against it, or has changed since the plan was
        made, unless `is_forced`, `Fenced` if a writer opens it meanwhile, and as `plan`.
        """
        known = None if is_forced else plan
        if known is not None:
            known.check_unused()
        if not plan.is_begun:
            await self._mark(known)
        manifest = self._stored.current
        # What crashed processes had begun is completed: a list shows it only then.
        await self._store.repair()
        pins_left = await self._release_pins(manifest, is_forced=is_forced)
        marked = names.manifest_name(manifest.manifest_id)
        deleter = Deleter(self._store, per_s_count=DELETES_PER_S_COUNT)
        listed = [each.name async for each in self._listed()]
        await deleter.delete([each for each in listed if each != marked and not _is_in_log(each)])
        if plan.users or [*_users(manifest, await self._now_s())]:
            await self._store.runtime.clock.sleep_ms(NOTICE_MS)
        # With what a process has written that had not noticed yet.
        listed = [each.name async for each in self._listed()]
        await deleter.delete([each for each in listed if each != marked])
        await deleter.delete([marked])  # by a request of its own: one for many has no order
        await self._store.repair(_is_collected)
        log.info("database deleted", url=self._store.url, database_id=manifest.database_id.hex())
        return pins_left

    async def _fence(self, *, is_forced: bool) -> WriterId | None:
        """Fence older writers; None: the log is damaged, and that was accepted."""
        try:
            return (await fence_log(self._store)).own
        except (CorruptObject, IllegalState):
            if not is_forced:
                raise
            return None

    async def _mark(self, known: DropPlan | None) -> None:
        """Fence older writers, and mark the manifest; `known` is None if that is forced.

        Nobody may have begun to need the database since `known` was made.
        """
        now_s = await self._now_s()
        if known is not None:  # before a server that has started since is shut out
            known.check_unchanged(await self._stored.refresh(), now_s)
        own = await self._fence(is_forced=known is None)
        nonce = self._store.runtime.random.randbytes(_NONCE_BYTES)

        def edit(current: Manifest) -> Manifest:
            if known is not None:
                known.check_unchanged(current, now_s)
            if own is not None and not current.is_dropped:
                check_owner(current, own)
            superseded = claim_compactor_epoch(current, nonce)
            return replace(superseded, is_dropped=True, writer_address="")

        async with edit_deadline(self._store):
            await self._stored.edit(edit, lambda current: current.is_dropped)

    async def _release_pins(self, manifest: Manifest, *, is_forced: bool) -> Sequence[str]:
        """Remove the pins in the origins; return those that are left, with the reasons.

        Raises the first reason, unless `is_forced`: nothing else remembers where the pin is.
        """
        pins = {each.snapshot_id: each.url for each in manifest.origins if each.url}
        left: list[str] = []
        async with origin_pins(self._store, manifest) as origins:
            for snapshot_id, url in sorted(pins.items()):
                try:
                    await origins.release(url, snapshot_id)
                except ShaleError as error:
                    if not is_forced:
                        raise
                    left.append(f"{snapshot_id.hex()} in {url}: {error}")
        return left

    async def _now_s(self) -> float:
        return await self._store.now_ms() / 1_000

    async def _listed(self) -> AsyncIterator[ObjectInfo]:
        """List all objects, the folders in the order in which they are deleted."""
        for folder in FOLDERS:
            async for info in self._store.list(folder):
                yield info


def _is_in_log(name: str) -> bool:
    return name.startswith(names.WAL_FOLDER)


def _is_collected(_name: str) -> bool:
    """Tell `ObjectStore.repair` that no name is in use: every record without object is deleted."""
    return True


def _users(manifest: Manifest, now_s: float) -> Iterator[str]:
    """Return the processes that seem to use the database, as far as the manifest shows them."""
    where = f", its writer is at {manifest.writer_address}" if manifest.writer_address else ""
    current = [
        each for each in manifest.snapshots if not is_pin(each) and not is_expired(each, now_s)
    ]
    ends_s = [each.snapshot_expire_time_s for each in current if not each.name]
    if any(ends_s):  # 0: it never expires, so a user has made it
        until = moment(max(ends_s) * 1_000)
        yield f"a server or a scan has not ended, or was killed and counts until {until}{where}"
    for each in current:
        if each.name.startswith(_JOBS):
            yield f"{each.name} is being made, or was interrupted and counts until {_end(each)}"
    for lease in manifest.leases:
        is_of_job = lease.wal_id_min is None and lease.expire_time_s != NEVER
        if is_of_job and not is_lease_expired(lease, now_s):
            until = moment(lease.expire_time_s * 1_000)
            yield f"{lease.holder} runs, or was killed and counts until {until}"


def _end(snapshot: Snapshot) -> str:
    if snapshot.snapshot_expire_time_s == NEVER:
        return "it is deleted"
    return moment(snapshot.snapshot_expire_time_s * 1_000)
