"""Opening a database whose log is in safekeepers: executor of `protocol.quorum.opening`.

Nothing here judges epochs, votes or logs: each effect is a request to a majority, to one member or
to the store, whose result is the next event (server/docs/safekeepers.md, "Opening").
"""

from __future__ import annotations

import asyncio

import structlog

from shalekv.errors import NotAMember, QuorumUnavailable, ShaleError
from shalekv.format import names
from shalekv.format.block_frame import Codec
from shalekv.format.sst import open_sst
from shalekv.protocol.manifest import Manifest
from shalekv.protocol.opening import (
    CreateFence,
    EpochClaimed,
    FenceCreated,
    FinishOpening,
    ListWal,
    LogReplayed,
    ManifestRead,
    ReadManifest,
    ReplayLog,
    WalListed,
    claim_epoch,
)
from shalekv.protocol.quorum.opening import (
    ClaimEpoch,
    CommitFence,
    FenceCommitted,
    FetchedTail,
    FetchTail,
    GatherVotes,
    GreetMembers,
    ListArchive,
    MembersGreeted,
    PollFailed,
    QuorumEffect,
    QuorumEvent,
    QuorumOpening,
    VotesGathered,
    quorum_configuration,
    step,
)
from shalekv.protocol.quorum.proposer import CHARGED_INTERVAL_MS, FREE_INTERVAL_MS
from shalekv.read.replay import Replayed, apply_object
from shalekv.settings import CacheSettings, QuorumSettings, WriterSettings
from shalekv.store.cas import CasStore
from shalekv.store.disk_cache import DiskCache
from shalekv.store.manifests import StoredManifest, WriterManifest
from shalekv.store.url import UNCHARGED_SCHEMES
from shalekv.write.commit import WalContents
from shalekv.write.logical_time import first_time
from shalekv.write.quorum.electing import TailFetcher, gather_votes, greet
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
from shalekv.write.wal import WAL_BLOCK_BYTES, ObjectStoreWal, list_wal

log = structlog.get_logger()

PARALLEL_APPENDS = 8  # groups of writes in flight to the safekeepers; they become durable in order

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
    opener = _QuorumOpeningExecutor(
        store, stored, settings, context, opening_snapshot, address=address, since_epoch=since_epoch
    )
    return await opener.run(cache, disk)


def with_archive_interval(settings: QuorumSettings, url: str) -> QuorumSettings:
    """Fill in the default interval between archived objects for this kind of store."""
    if settings.archive_interval_ms is not None:
        return settings
    interval_ms = FREE_INTERVAL_MS if url.startswith(UNCHARGED_SCHEMES) else CHARGED_INTERVAL_MS
    return settings.model_copy(update={"archive_interval_ms": interval_ms})


class _QuorumOpeningExecutor:
    """One opening of a database whose log is in safekeepers."""

    def __init__(
        self,
        store: CasStore,
        stored: StoredManifest,
        settings: WriterSettings,
        context: QuorumContext,
        opening_snapshot: OpeningSnapshot,
        *,
        address: str,
        since_epoch: int | None,
    ) -> None:
        """REQUIRES: `stored` was read. Nothing is claimed yet."""
        self._store = store
        self._stored = stored
        self._settings = settings
        self._context = context
        self._opening_snapshot = opening_snapshot
        self._address = address
        self._since_epoch = since_epoch
        self._fetcher = TailFetcher(store, context)
        opening = QuorumOpening(store.runtime.random.randbytes(NONCE_BYTES))
        self._opening, self._effects = step(opening, ManifestRead(stored.current))

    async def run(self, cache: CacheSettings | None, disk: DiskCache | None) -> RecoveredLog:
        """Carry out one effect after another until the writer may serve.

        Raises as `open_quorum_log`.
        """
        time = self._opening_snapshot.time
        await self._advance_to(GatherVotes)
        own, current = self._opening.own, self._opening.known
        log.info("epoch won", epoch=own.epoch, manifest_id=current.manifest_id)
        await self._advance_to(ListWal, ListArchive)
        last_lsn = self._opening.elected.donor_log.last.lsn
        log.info("elected", epoch=own.epoch, last_lsn=last_lsn)
        time.raise_to(current.logical_time_ms)
        await self._advance_to(ListArchive)
        async with self._fetcher.deadline():
            await self._advance_to(CommitFence)
        manifest = WriterManifest(self._stored, own)
        wal = await self._lead(manifest)
        replayed = await self._replay(manifest)
        finish = self._effect
        assert isinstance(finish, FinishOpening)
        fenced = FencedLog(
            replayed,
            wal,
            flush_policy(self._settings, max_parallel_writes=PARALLEL_APPENDS, is_charged=False),
            time,
            self._opening.fence_wal_id,
            last_stored_wal_id=finish.last_wal_id,
            first_seq=finish.first_seq,
            safekeepers=wal,
        )
        served = await serve_replayed(self._store, manifest, self._settings, fenced, cache, disk)
        self._step(ManifestRead(manifest.current))
        return served

    @property
    def _effect(self) -> QuorumEffect:
        """The effect to carry out next."""
        (effect,) = self._effects
        return effect

    def _step(self, event: QuorumEvent) -> None:
        self._opening, self._effects = step(self._opening, event)

    async def _advance_to(self, *kinds: type[QuorumEffect]) -> None:
        """Carry out effects until the next one is of one of these kinds."""
        while not isinstance(self._effect, kinds):
            self._step(await self._execute(self._effect))

    async def _execute(self, effect: QuorumEffect) -> QuorumEvent:
        """Carry out an effect of the election or of a fetch, and return its result."""
        match effect:
            case ReadManifest():
                return ManifestRead(await self._stored.refresh())
            case GreetMembers(configuration):
                try:
                    return MembersGreeted(await greet(self._context, configuration))
                except (NotAMember, QuorumUnavailable) as error:
                    return PollFailed(error)
            case ClaimEpoch(epoch_min):
                return EpochClaimed(await self._claim(epoch_min))
            case GatherVotes(configuration, ballot):
                try:
                    return VotesGathered(await gather_votes(self._context, configuration, ballot))
                except (NotAMember, QuorumUnavailable) as error:
                    return PollFailed(error)
            case ListWal(first) | ListArchive(first):
                return WalListed(await list_wal(self._store, first))
            case CreateFence(slot):
                return FenceCreated(await self._previous_log().create(slot, WalContents()))
            case FetchTail():
                return await self._fetcher.fetch(effect)
        raise ValueError(effect)

    async def _claim(self, epoch_min: int) -> Manifest:
        """Claim an epoch, after half-finished work of other processes in the store is completed."""
        await self._store.repair()
        nonce = self._opening.nonce

        def claim(manifest: Manifest) -> Manifest:
            quorum_configuration(manifest)  # raises if the WAL mode was switched meanwhile (CE15)
            return claim_epoch(
                manifest,
                nonce=nonce,
                max_parallel_writes=1,
                address=self._address,
                snapshot_expire_time_s=self._opening_snapshot.expire_time_s,
                epoch_min=epoch_min,
                since_epoch=self._since_epoch,
            )

        async with opening_deadline(self._store, self._settings):
            return await self._stored.edit(claim, lambda m: m.writer_nonce == nonce)

    def _previous_log(self) -> ObjectStoreWal:
        """The WAL in the object store that the database had before it got safekeepers."""
        return ObjectStoreWal(
            self._store,
            self._opening.own,
            database_id=self._opening.known.database_id,
            block_bytes=WAL_BLOCK_BYTES,
            now_ms=self._opening_snapshot.time.now_ms,
            last_compacted=_nothing,
        )

    async def _lead(self, manifest: WriterManifest) -> QuorumWal:
        """Carry out `CommitFence`: no older writer can commit any more. Return the log."""
        wanted, time, clock = self._effect, self._opening_snapshot.time, self._store.runtime.clock
        assert isinstance(wanted, CommitFence)
        tail, settings = wanted.tail, self._context.settings
        ledger = Ledger(
            wanted.leader,
            HeldRecords(tail.base, tail.records),
            archived_wal_id=tail.archive_tip,
            held_bytes_max=settings.unarchived_log_bytes_max,
            clock=clock,
        )
        quorum_log = QuorumLog(ledger, self._context)
        encoding = GroupEncoding(
            manifest.current.database_id,
            WAL_BLOCK_BYTES,
            Codec[self._settings.wal_codec.name],
            time.now_ms,
        )
        membership = MembershipFollower(manifest, quorum_log, clock)
        wal = QuorumWal(quorum_log, membership, encoding, settings, self._store.runtime)
        time.raise_to(_latest_ms(tail, manifest.current))
        await _fence(quorum_log, wal, wanted.wal_id, self._context)
        if not manifest.own.is_first:
            log.info("older writers fenced", epoch=manifest.own.epoch, wal_id=wanted.wal_id)
        self._step(FenceCommitted())
        return wal

    async def _replay(self, manifest: WriterManifest) -> Replayed:
        """Carry out `ReplayLog`: apply the archive, then the records that are not in it."""
        effect = self._effect
        assert isinstance(effect, ReplayLog)
        replayed = await replay_log(
            self._store, manifest, effect.slots.stop, self._settings, self._opening_snapshot
        )
        database_id = manifest.current.database_id
        await _replay_records(self._store, replayed, self._opening.fetched, database_id)
        self._step(LogReplayed(replayed.last_seq))
        return replayed


async def _nothing() -> None:
    """Report that nothing is compacted: fences are never collected, so no slot is filled again."""


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
    """The logical time of the last record that has one (`Footer.proven_time_ms`); 0: none has.

    The fence must not have an earlier time.
    """
    for record in reversed(fetched.records):
        if record.payload:
            name = names.wal_name(record.wal_id)
            sst = open_sst(name, record.payload, database_id=manifest.database_id)
            recorded_ms = sst.footer.proven_time_ms(manifest.time_reset_wal_id)
            if recorded_ms:
                return recorded_ms
    return 0
