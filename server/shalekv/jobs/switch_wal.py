"""Switching the WAL between the object store and safekeepers, without losing a write (CE15).

To safekeepers: this process opens the database as its writer. That puts a run of fences into the
bucket, so that no older writer can acknowledge anything. The whole log is compacted; a running
compactor is superseded. Then an edit of the manifest names the members. The log of the safekeepers
begins far after the fences, at ids where no writer that opens in the previous mode searches for a
free slot (CE17). The log leaves out the ids between.

To the object store: this process opens the database as its writer, by an election among the
safekeepers, which ends every older writer. The fence that it appends is the last record. When it is
in the archive, so is everything before it. Then an edit of the manifest removes the members, and
the next process that opens the database finds the whole log in the bucket.

Either edit requires that no other writer has opened since: otherwise nothing is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import structlog

from shalekv.errors import (
    DatabaseMismatch,
    InvalidRequest,
    LogFull,
    QuorumUnavailable,
    ShaleError,
    Superseded,
)
from shalekv.jobs.compact.run import compact_wal
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import (
    Member,
    check_first_count,
    check_generation,
    check_members,
    is_archived,
)
from shalekv.protocol.quorum.proposer import enter_quorum, leave_quorum
from shalekv.protocol.snapshot import remove_snapshots
from shalekv.settings import CompactorConfig, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.manifests import StoredManifest
from shalekv.write.opening import open_log
from shalekv.write.quorum.links import DatabasePlace, Links
from shalekv.write.quorum.log import until_failed
from shalekv.write.quorum.membership import REQUEST_ID_BYTES, admit, probe_members, retire
from shalekv.write.quorum.wal import QuorumWal
from shalekv.write.recovery import RecoveredLog
from shalekv.write.wal import list_wal

ARCHIVE_TIMEOUT_MS = 60_000  # without any progress
POLL_MS = 50
ADMISSIONS_MAX = 5  # attempts to name members in a generation that no other edit has ended
COMPACTIONS_MAX = 5  # attempts to compact the log while other compactors take over

log = structlog.get_logger()


async def switch_to_quorum(store: CasStore, links: Links, addresses: Sequence[str]) -> Manifest:
    """Switch the WAL to the safekeepers at these addresses.

    A writer that serves is fenced, and a running compactor superseded. Raises `DatabaseMismatch`
    when the WAL is in safekeepers already, and as `admit`, `open_log` and `compact_wal`.
    """
    current = await _check_mode(store, WalMode.OBJECT_STORE)
    check_first_count(addresses)
    request_id = store.runtime.random.randbytes(REQUEST_ID_BYTES)
    place = DatabasePlace(current.database_id, store.url)
    members = await admit(links, place, addresses, request_id)
    check_members(members)  # before it fences the writer that serves
    opened = await open_log(store, _settings(), address="")
    await _compact(store)
    for _ in range(ADMISSIONS_MAX - 1):
        try:
            return await _enter_quorum(opened, members, current.wal_generation)
        except InvalidRequest as error:  # the members may have given up their space meanwhile
            log.info("asking the safekeepers for space again", problem=str(error))
            current = await opened.manifest.refresh()
            members = await admit(links, place, addresses, request_id)
    return await _enter_quorum(opened, members, current.wal_generation)


async def _enter_quorum(
    opened: RecoveredLog, members: Sequence[Member], generation: int
) -> Manifest:
    """Edit the manifest to name the members.

    Raises `InvalidRequest` if its `wal_generation` is not `generation` any more: then the members
    may have given up the space that they had reserved.
    """
    wanted = tuple(map(str, members))

    def edit(manifest: Manifest) -> Manifest:
        check_generation(manifest, generation)
        entered = enter_quorum(manifest, opened.manifest.own, members, opened.last_wal_id)
        return replace(remove_snapshots(entered, {opened.version.snapshot_id}), writer_address="")

    switched = await opened.manifest.edit(edit, lambda m: m.wal_members == wanted)
    log.info("the WAL is in safekeepers from now on", members=wanted, behind=opened.last_wal_id)
    return switched


async def switch_to_object_store(store: CasStore, links: Links) -> Manifest:
    """Switch the WAL to the object store.

    A writer that serves is fenced. Raises `DatabaseMismatch` when the WAL is there already,
    `QuorumUnavailable` when no majority answers or nothing is archived for `ARCHIVE_TIMEOUT_MS`,
    `IllegalState` when the archive has gaps, and as `open_log`.
    """
    await _check_mode(store, WalMode.QUORUM)
    opened = await open_log(store, _settings(), address="", links=links)
    slots = opened.wal
    if not isinstance(slots, QuorumWal):  # it was switched since the check
        raise _is_already(WalMode.OBJECT_STORE)
    members = slots.leader.configuration.everyone
    switched, failure = opened.manifest.current, None
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(until_failed(slots.run), name="quorum log")
        try:
            switched = await _leave_quorum(store, links, opened, slots)
        except ShaleError as error:  # raised below, because the group would wrap it
            failure = error
        running.cancel()
    if failure is not None:
        raise failure
    log.info("the WAL is in the object store from now on", behind=opened.last_wal_id)
    await retire(links, switched.database_id, members)
    return switched


async def _leave_quorum(
    store: CasStore, links: Links, opened: RecoveredLog, slots: QuorumWal
) -> Manifest:
    await _wait_archived(store, links, opened, slots)
    current = await opened.manifest.refresh()
    # From a list that is sent only now, after the archive is complete.
    tip = (await list_wal(store, current.first_uncompacted_wal_id)).first_gap - 1

    def edit(manifest: Manifest) -> Manifest:
        left = leave_quorum(manifest, slots.leader, tip)
        return replace(
            remove_snapshots(left, {opened.version.snapshot_id}),
            wal_id_last_seen=max(opened.last_wal_id, manifest.wal_id_last_seen or 0),
            writer_address="",
        )

    return await opened.manifest.edit(edit, lambda m: m.wal_mode is WalMode.OBJECT_STORE)


async def _wait_archived(
    store: CasStore, links: Links, opened: RecoveredLog, slots: QuorumWal
) -> None:
    """Wait until a safekeeper reports that the fence of this process is archived.

    It is the last record of the log. Raises `QuorumUnavailable` when nothing is archived for
    `ARCHIVE_TIMEOUT_MS`.
    """
    clock = store.runtime.clock
    before, since_ms = slots.leader.log.base.wal_id, clock.monotonic_ms()
    while True:
        refusal = slots.refusal
        if refusal is not None and not isinstance(refusal, LogFull):
            raise refusal  # a full log does not matter, since nothing more is appended
        archived = slots.report().archived_wal_id
        if is_archived(opened.last_wal_id, archived):
            return
        if archived != before:
            before, since_ms = archived, clock.monotonic_ms()
        elif clock.monotonic_ms() - since_ms >= ARCHIVE_TIMEOUT_MS:
            raise QuorumUnavailable(await _why_not_archived(links, opened, slots))
        await clock.sleep_ms(POLL_MS)


async def _why_not_archived(links: Links, opened: RecoveredLog, slots: QuorumWal) -> str:
    members = slots.leader.configuration.everyone
    probes = await probe_members(links, opened.manifest.current.database_id, members)
    problems = [
        f"{each.member.address}: {each.problem or (each.status and each.status.archive_problem)}"
        for each in probes
        if each.status is None or each.status.archive_problem
    ]
    return (
        f"the safekeepers have archived nothing for {ARCHIVE_TIMEOUT_MS // 1_000} s "
        f"({'; '.join(problems) or 'they give no reason'}), and not all of the log is in the "
        "bucket. The WAL stays in them: start a writer, or try again later"
    )


def _settings() -> WriterSettings:
    # At most one object is written, so no interval is needed.
    return WriterSettings(flush_interval_ms=0)


async def _compact(store: CasStore) -> None:
    """Compact the whole log, even if a compactor is started again and again meanwhile."""
    settings = CompactorConfig()
    for attempt in range(1, COMPACTIONS_MAX):
        try:
            await compact_wal(store, settings, holder="switch")
        except Superseded:
            await store.pause(attempt)
        else:
            return
    await compact_wal(store, settings, holder="switch")


async def _check_mode(store: CasStore, mode: WalMode) -> Manifest:
    current = await StoredManifest(store).refresh()
    if current.wal_mode is not mode:
        raise _is_already(current.wal_mode)
    return current


def _is_already(mode: WalMode) -> DatabaseMismatch:
    name = mode.name.lower().replace("_", "-")
    return DatabaseMismatch(f"this database has its WAL in mode {name} already")
