"""Opening a database whose log is in safekeepers (server/docs/safekeepers.md, "Opening").

    greet      ask a majority for what it has promised; this changes no member
    claim      claim an epoch above all that were seen, by compare-and-swap in the manifest
    vote       a majority promises to follow no older writer
    close      put a fence of this epoch at the end of the log before, if that was in the store
    fetch      read from the voter with the highest rank what is not in the archive
    fence      a majority stores the first record of this epoch, which commits all before it
    replay     the archive, then what was fetched

The fence is one record, whatever `max_parallel_writes` and `fence_width` are. Those concern uploads
that land later, and a member that has voted accepts nothing from an older writer any more.
"""

from __future__ import annotations

import asyncio

import structlog

from shalekv.errors import DatabaseMismatch, NotAMember, QuorumUnavailable, ShaleError
from shalekv.format import names
from shalekv.format.block_frame import Codec
from shalekv.format.sst import open_sst
from shalekv.protocol.fencing import SlotVerdict, WriterId, fenced, judge
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import Configuration
from shalekv.protocol.opening import claim_epoch, first_seq_of_writer
from shalekv.protocol.proposer import (
    CHARGED_INTERVAL_MS,
    FREE_INTERVAL_MS,
    Leader,
    epoch_to_claim,
    next_object,
)
from shalekv.protocol.quorum_records import Ballot
from shalekv.read.replay import Replayed, apply_object
from shalekv.settings import CacheSettings, QuorumSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.disk_cache import DiskCache
from shalekv.store.manifests import FencedManifest, StoredManifest
from shalekv.store.url import UNCHARGED_SCHEMES
from shalekv.write.commit import WalContents
from shalekv.write.logical_time import LogicalTime, first_time
from shalekv.write.quorum.electing import FetchedTail, fetch_unarchived, gather_votes, greet
from shalekv.write.quorum.ledger import HeldRecords, Ledger
from shalekv.write.quorum.links import DatabasePlace, Links
from shalekv.write.quorum.log import MembershipFollower, QuorumLog, until_failed
from shalekv.write.quorum.peer import QuorumContext
from shalekv.write.quorum.wal import GroupEncoding, QuorumWal
from shalekv.write.recovery import (
    FencedLog,
    OpeningSnapshot,
    RecoveredLog,
    flush_policy,
    opening_deadline,
    replay_log,
    serve_replayed,
)
from shalekv.write.wal import ObjectStoreWal, list_wal

log = structlog.get_logger()

NONCE_BYTES = 16


async def open_quorum_log(  # noqa: PLR0913 - what an opening is made of
    store: CasStore,
    stored: StoredManifest,
    settings: WriterSettings,
    *,
    quorum: QuorumSettings,
    links: Links,
    address: str,
    since_epoch: int | None = None,
    cache: CacheSettings | None = None,
    disk: DiskCache | None = None,
) -> RecoveredLog:
    """Take over the database in `store`, whose manifest was read.

    If a `since_epoch` is given, a writer with a later epoch is not fenced, and
    `ManifestVersionExists` is raised.

    Raises `QuorumUnavailable` when no majority answers, `NotAMember` when a majority has lost its
    logs, `LogBehindArchive` when the log of the majority is older than the archive, `Fenced` when
    another opens at the same time and wins, and otherwise as `open_log`.
    """
    quorum = with_archive_interval(quorum, store.url)
    place = DatabasePlace(stored.current.database_id, store.url)
    context = QuorumContext(links, place, quorum, store.runtime)
    time = await first_time(store, stored.current, settings.clock_jump_max_s)
    opening_snapshot = OpeningSnapshot(store, settings, time)
    manifest = await _win_epoch(
        store, stored, settings, context, opening_snapshot, address=address, since_epoch=since_epoch
    )
    wal, fetched, fence_wal_id = await _take_over(store, manifest, settings, context, time)
    replayed = await replay_log(store, manifest, fetched.first_wal_id, settings, opening_snapshot)
    await _replay_records(store, replayed, fetched, manifest.current.database_id)
    fenced = FencedLog(
        replayed,
        wal,
        flush_policy(settings, max_parallel_writes=quorum.parallel_appends, is_charged=False),
        time,
        fence_wal_id,
        last_stored_wal_id=fetched.archive_tip,
        first_seq=first_seq_of_writer(manifest.current, replayed.last_seq),
        safekeepers=wal,
    )
    return await serve_replayed(store, manifest, settings, fenced, cache, disk)


def with_archive_interval(settings: QuorumSettings, url: str) -> QuorumSettings:
    """Fill in the default interval between archived objects for this kind of store."""
    if settings.archive_interval_ms is not None:
        return settings
    interval_ms = FREE_INTERVAL_MS if url.startswith(UNCHARGED_SCHEMES) else CHARGED_INTERVAL_MS
    return settings.model_copy(update={"archive_interval_ms": interval_ms})


async def _take_over(
    store: CasStore,
    manifest: FencedManifest,
    settings: WriterSettings,
    context: QuorumContext,
    time: LogicalTime,
) -> tuple[QuorumWal, FetchedTail, int]:
    """Go from the election to a committed fence: no older writer can commit any more."""
    own = manifest.own
    log.info("epoch won", epoch=own.epoch, manifest_id=manifest.current.manifest_id)
    # From the manifest that has the epoch: later changes of members must take us into account.
    configuration = Configuration.of(manifest.current)
    try:
        candidacy = await gather_votes(context, configuration, Ballot(own.epoch, own.nonce))
    except NotAMember:  # a writer that has opened since may have retired them
        await manifest.refresh()
        raise
    log.info("elected", epoch=own.epoch, last_lsn=candidacy.donor_log.last.lsn)
    time.raise_to(manifest.current.logical_time_ms)
    if not candidacy.donor_log.last.lsn:
        await _fence_previous_log(store, manifest, settings, time)
    fetched = await fetch_unarchived(store, manifest, context, candidacy)
    fence_wal_id = next_object(
        fetched.last,
        archive_tip=fetched.archive_tip,
        last_compacted=manifest.current.wal_id_last_compacted,
    )
    ledger = Ledger(
        Leader.of(candidacy).trimmed(fetched.base),
        HeldRecords(fetched.base, fetched.records),
        archived_wal_id=fetched.archive_tip,
        held_bytes_max=context.settings.unarchived_log_bytes_max,
        clock=store.runtime.clock,
    )
    quorum_log = QuorumLog(ledger, context)
    encoding = GroupEncoding(
        manifest.current.database_id,
        settings.wal_block_bytes,
        Codec[settings.wal_codec.name],
        time.now_ms,
    )
    membership = MembershipFollower(manifest, quorum_log, store.runtime.clock)
    wal = QuorumWal(quorum_log, membership, encoding, context.settings, store.runtime)
    time.raise_to(_latest_ms(fetched, manifest.current))
    await _fence(quorum_log, wal, fence_wal_id, context)
    log.info("older writers fenced", epoch=own.epoch, wal_id=fence_wal_id)
    return wal, fetched, fence_wal_id


async def _win_epoch(
    store: CasStore,
    stored: StoredManifest,
    settings: WriterSettings,
    context: QuorumContext,
    opening_snapshot: OpeningSnapshot,
    *,
    address: str,
    since_epoch: int | None,
) -> FencedManifest:
    """Claim an epoch above the manifest's and above all that a majority has promised."""
    before = stored.current
    try:
        greetings = await greet(context, _configuration(before))
    except (NotAMember, QuorumUnavailable):  # the members may have been changed meanwhile
        if (await stored.refresh()).wal_generation == before.wal_generation:
            raise
        greetings = await greet(context, _configuration(stored.current))
    await store.repair()
    nonce = store.runtime.random.randbytes(NONCE_BYTES)

    def claim(manifest: Manifest) -> Manifest:
        _configuration(manifest)  # raises if the WAL mode was switched meanwhile (CE15)
        return claim_epoch(
            manifest,
            nonce=nonce,
            max_parallel_writes=1,
            address=address,
            snapshot_expire_time_s=opening_snapshot.expire_time_s,
            epoch_min=epoch_to_claim(manifest.writer_epoch, greetings.values()),
            since_epoch=since_epoch,
        )

    async with opening_deadline(store, settings):
        won = await stored.edit(claim, lambda m: m.writer_nonce == nonce)
    return FencedManifest(stored, WriterId(won.writer_epoch, nonce))


def _configuration(manifest: Manifest) -> Configuration:
    if manifest.wal_mode is not WalMode.QUORUM:
        raise DatabaseMismatch(
            "the WAL of this database was moved from its safekeepers to the object store while it "
            "was opened: open it again"
        )
    return Configuration.of(manifest)


async def _fence_previous_log(
    store: CasStore, manifest: FencedManifest, settings: WriterSettings, time: LogicalTime
) -> None:
    """Put a closing fence into the first free slot of the previous log, if there was one.

    Its new epoch makes a replica that follows that log read the manifest. The fence is there before
    the first record of the new log, because what replicas show is fresh only while no writer writes
    elsewhere.
    """
    if not manifest.current.wal_ids_left_out:
        return  # the WAL mode was never switched
    wal = ObjectStoreWal(
        store,
        manifest.own,
        database_id=manifest.current.database_id,
        block_bytes=settings.wal_block_bytes,
        now_ms=time.now_ms,
        last_compacted=_nothing,
    )
    first = manifest.current.wal_ids_left_out[-1].start
    while True:
        wal_id = (await list_wal(store, first)).first_gap
        occupant = await wal.create(wal_id, WalContents())
        if occupant is None:
            return
        if judge(occupant, wal.own) is SlotVerdict.NEWER:
            raise fenced(wal.own, occupant.owner.epoch, names.wal_name(wal_id))
        first = wal_id + 1  # the list may lag


async def _nothing() -> None:
    """Always None: fences are never collected, so no slot is filled again."""


async def _fence(
    quorum_log: QuorumLog, wal: QuorumWal, wal_id: int, context: QuorumContext
) -> None:
    """Wait until a majority has the elected log and the first record of this epoch."""
    timeout_ms = context.settings.vote_timeout_ms
    fence = await wal.append_fence(wal_id)
    failure: ShaleError | None = None
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(until_failed(quorum_log.run), name="quorum log")
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                await quorum_log.ledger.wait_committed(fence.lsn)
        except TimeoutError:
            problems = [f"{m.address} ({m.problem})" for m in quorum_log.report().members]
            failure = QuorumUnavailable(
                f"a majority has voted for this writer, but did not take its log within "
                f"{timeout_ms} ms: {', '.join(problems)}. Try again later"
            )
        except ShaleError as error:
            failure = error
        running.cancel()
    if failure is not None:
        raise failure


async def _replay_records(
    store: CasStore, replayed: Replayed, fetched: FetchedTail, database_id: bytes
) -> None:
    """Apply the records that are not in the archive: the fence behind them has committed them."""
    last_wal_id: int | None = None
    for record in fetched.records:
        if not record.payload:
            continue
        found = open_sst(names.wal_name(record.wal_id), record.payload, database_id=database_id)
        objects = replayed.objects
        apply_object(found, replayed)
        if record.wal_id == last_wal_id:
            replayed.objects = objects
        last_wal_id = record.wal_id
        await replayed.memtable.merge_runs(store.runtime.clock)
        await store.runtime.clock.sleep_ms(0)


def _latest_ms(fetched: FetchedTail, manifest: Manifest) -> int:
    """The logical time of the last record with entries, which the fence must not be behind."""
    for record in reversed(fetched.records):
        if record.payload:
            name = names.wal_name(record.wal_id)
            sst = open_sst(name, record.payload, database_id=manifest.database_id)
            recorded_ms = sst.footer.proven_time_ms(manifest.time_reset_wal_id)
            if recorded_ms:
                return recorded_ms
    return 0
