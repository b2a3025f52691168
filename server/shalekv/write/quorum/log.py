"""The members of a quorum log: connects to all of them, and watches that a majority answers.

    append      the record goes to every member on its stream; the call does not wait
    committed   a majority has it on disk: in the order of the log, without a task for each call
    archived    members put committed records into the archive, and report how far they are

If a member has promised itself to another writer, the log ends.

`MembershipFollower` is the writer's part in changes of members (`protocol.membership`). The process
that asks for a change makes the first edit. The writer sees it in the manifest, and from then on
commits by majorities of both sets. When a majority of the next members has its log, it makes the
second edit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import structlog

from shalekv.clock import Clock
from shalekv.errors import InvalidRequest, LogFull, QuorumUnavailable, ShaleError, StoreError
from shalekv.protocol.fencing import check_owner
from shalekv.protocol.manifest import Manifest, WalMode
from shalekv.protocol.membership import (
    Appointment,
    Candidate,
    Configuration,
    Member,
    finish_change,
    is_archived,
)
from shalekv.store.manifests import WriterManifest
from shalekv.wording import Trouble
from shalekv.write.quorum.ledger import Ledger
from shalekv.write.quorum.links import CONNECT_TIMEOUT_MS, LinkBroken
from shalekv.write.quorum.peer import Chain, Peer, QuorumContext
from shalekv.write.wal import MemberReport, QuorumReport

log = structlog.get_logger()

CHECKS_PER_TIMEOUT = 8  # checks per `quorum_timeout_ms` whether a timeout has passed
CHECK_MS_MAX = 250.0
ARCHIVE_POLL_MS = 200  # between two requests how far the archive is, while no reply reports it
# The appointed member has archived nothing for so long although records are due: appoint another.
ARCHIVE_TAKEOVER_MS = 5_000
RETRY_AFTER_MS = 500  # retry advice with a refusal
# How long a commit point waits for a record to be sent with. Alone it costs one more message to
# each member, and only the tails of replicas wait for it.
ANNOUNCE_MS = 1.0
MANIFEST_POLL_MS = 100  # of the manifest as this process knows it, which costs no request


def nobody_waits() -> None:
    """Ignore that the log is unavailable, since no call waits for it."""


class QuorumLog:
    """Runs a `Peer` for each member of one log, and appoints the archiver."""

    def __init__(self, ledger: Ledger, context: QuorumContext) -> None:
        """Prepare the peers; connections are made by `run`."""
        self.ledger = ledger
        self._context = context
        self._clock = context.runtime.clock
        self._chain = Chain(context.settings)
        self._peers: dict[bytes, Peer] = {}
        self._following: dict[bytes, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None  # set while `run` runs
        self._appointment = Appointment()
        self._without_majority_since_ms: float | None = None
        self._trouble_since_ms: float | None = None
        self._is_unavailable = False
        self._set_peers()

    @property
    def is_majority_joined(self) -> bool:
        """Return whether a majority follows."""
        joined = {member_id for member_id, peer in self._peers.items() if peer.is_joined}
        return self.ledger.leader.configuration.is_majority(joined)

    async def run(self, on_unavailable: Callable[[], None] = nobody_waits) -> None:
        """Follow all members until cancelled; may be run again.

        `on_unavailable` is called whenever no majority has answered for `quorum_timeout_ms`. Raises
        the error that ends the log.
        """
        ledger = self.ledger
        ledger.check_leading()
        self._without_majority_since_ms = self._clock.monotonic_ms()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._follow_all()
            checking = tasks.create_task(
                self._check_periodically(on_unavailable), name="check the quorum"
            )
            polling = tasks.create_task(self._poll_archive(), name="poll the archive")
            announcing = tasks.create_task(self._announce(), name="announce what is committed")
            try:
                await ledger.ended.wait()
            finally:
                self._tasks = None
                for task in (checking, polling, announcing, *self._following.values()):
                    task.cancel()
                self._following.clear()
        ledger.check_leading()

    def reconfigure(self, configuration: Configuration) -> None:
        """Take over the members that a newer manifest names: they decide from now on."""
        if configuration.generation <= self.ledger.leader.configuration.generation:
            return
        log.info(
            "members changed",
            generation=configuration.generation,
            members=[member.address for member in configuration.members],
            next=[member.address for member in configuration.next],
        )
        self.ledger.reconfigured(configuration)
        self._set_peers()
        self._follow_all()

    @property
    def refusal(self) -> ShaleError | None:
        """The error that ended the log, or says why nothing can be committed for now."""
        return self.ledger.failure or self._problem()

    def trouble(self) -> Trouble | None:
        """The reason why nothing can be committed."""
        problem = self._problem()
        if problem is None:
            self._trouble_since_ms = None
            return None
        now_ms = self._clock.monotonic_ms()
        if self._trouble_since_ms is None:
            self._trouble_since_ms = now_ms - self._silent_ms()
        cause = "log full" if isinstance(problem, LogFull) else "no quorum"
        return Trouble(cause, str(problem), self._trouble_since_ms)

    def report(self) -> QuorumReport:
        ledger = self.ledger
        configuration = ledger.leader.configuration
        next_ids = {member.id for member in configuration.next}
        problem = self.refusal
        return QuorumReport(
            generation=configuration.generation,
            members=tuple(
                MemberReport(
                    peer.member.id,
                    peer.member.address,
                    peer.is_joined,
                    peer.flushed_lsn,
                    peer.archived_wal_id,
                    peer.is_full,
                    peer.member.id in next_ids,
                    peer.problem,
                )
                for peer in self._peers.values()
            ),
            last_lsn=ledger.last_lsn,
            committed_lsn=ledger.committed_lsn,
            last_wal_id=ledger.leader.log.last.wal_id,
            archived_wal_id=ledger.archived_wal_id,
            unarchived_bytes=ledger.held.unarchived_bytes,
            archiver_id=ledger.broadcast.archiver_id,
            problem="" if problem is None else str(problem),
        )

    def _set_peers(self) -> None:
        """Make one peer for each member, and drop those of former members."""
        everyone = {member.id: member for member in self.ledger.leader.configuration.everyone}
        for member_id in [*self._peers]:
            peer = self._peers[member_id]
            if everyone.get(member_id) != peer.member:
                del self._peers[member_id]
                following = self._following.pop(member_id, None)
                if following is not None:
                    following.cancel()
        for member_id, member in everyone.items():
            if member_id not in self._peers:
                self._peers[member_id] = Peer(member, self.ledger, self._context, self._chain)

    def _follow_all(self) -> None:
        if self._tasks is None:
            return
        for member_id, peer in self._peers.items():
            if member_id not in self._following:
                name = f"follow safekeeper {peer.member.address}"
                self._following[member_id] = self._tasks.create_task(peer.run(), name=name)

    def _problem(self) -> ShaleError | None:
        """The error that says why nothing can be committed."""
        peers = self._peers.values()
        configuration = self.ledger.leader.configuration
        full = {peer.member.id for peer in peers if peer.is_full}
        if full and not configuration.is_majority(
            {each.id for each in configuration.everyone} - full
        ):
            names = _names(peer.member for peer in peers if peer.is_full)
            return LogFull(
                f"the safekeepers accept no more records ({names}): their disks are full, or what "
                "they hold is not archived. Try again later",
                retry_after_ms=RETRY_AFTER_MS,
            )
        timeout_ms = self._context.settings.quorum_timeout_ms
        if self._silent_ms() < timeout_ms:
            return None
        joined = sum(peer.is_joined for peer in peers)
        problems = [f"{p.member.address} {p.problem}" for p in peers if p.problem]
        detail = f" ({'; '.join(problems)})" if problems else ""
        return QuorumUnavailable(
            f"no majority of the safekeepers has answered for {timeout_ms} ms: {joined} of "
            f"{len(self._peers)} are connected{detail}"
        )

    def _silent_ms(self) -> float:
        """For how long no majority was joined, or none has stored what was appended."""
        now_ms = self._clock.monotonic_ms()
        if self.is_majority_joined:
            self._without_majority_since_ms = None
        elif self._without_majority_since_ms is None:
            self._without_majority_since_ms = now_ms
        since_ms = self._without_majority_since_ms
        lost_ms = 0.0 if since_ms is None else now_ms - since_ms
        return max(lost_ms, self.ledger.stalled_ms(now_ms))

    async def _check_periodically(self, on_unavailable: Callable[[], None]) -> None:
        """Act on what no message reports: silent members, slow archivers, timeouts."""
        check_ms = min(CHECK_MS_MAX, self._context.settings.quorum_timeout_ms / CHECKS_PER_TIMEOUT)
        while True:
            now_ms = self._clock.monotonic_ms()
            for peer in [*self._peers.values()]:
                await peer.disconnect_if_silent(now_ms)
            self._appoint(now_ms)
            self._update_availability(on_unavailable)
            self.ledger.drop_archived()
            await self._clock.sleep_ms(check_ms)

    def _update_availability(self, on_unavailable: Callable[[], None]) -> None:
        timeout_ms = self._context.settings.quorum_timeout_ms
        was_unavailable = self._is_unavailable
        self._is_unavailable = self._silent_ms() >= timeout_ms
        if self._is_unavailable == was_unavailable:
            return
        if not self._is_unavailable:
            log.info("a majority of the safekeepers is there again")
            return
        problem = self._problem()
        log.error("no majority of the safekeepers", problem=str(problem))
        on_unavailable()
        if problem is not None:
            self.ledger.give_up_archiving(problem)

    def _appoint(self, now_ms: float) -> None:
        """Choose the member that archives."""
        candidates = [
            Candidate(each.member.id, each.is_joined, each.flushed_lsn, each.archived_wal_id)
            for each in self._peers.values()
        ]
        before = self._appointment.member_id
        self._appointment = self._appointment.judged(
            candidates,
            now_ms,
            complete_wal_id=self.ledger.complete_wal_id,
            takeover_ms=ARCHIVE_TAKEOVER_MS,
        )
        if self._appointment.member_id != before:
            self.ledger.broadcast.appoint(self._appointment.member_id)

    async def _announce(self) -> None:
        """Send members those commit points that were not sent with a record."""
        ledger = self.ledger
        while True:
            ledger.broadcast.announce(ledger.committed_lsn)
            try:
                await ledger.wait_committed(ledger.committed_lsn + 1)
            except ShaleError:  # the log has ended
                return
            await self._clock.sleep_ms(ANNOUNCE_MS)

    async def _poll_archive(self) -> None:
        """Ask how far the archive is, while it lags behind and no reply reports it."""
        ledger = self.ledger
        number = 0
        while True:
            ledger.archive_advanced.clear()
            await self._clock.sleep_ms(ARCHIVE_POLL_MS)
            complete = ledger.complete_wal_id
            joined = [peer for peer in self._peers.values() if peer.is_joined]
            is_waiting = complete is not None and not is_archived(complete, ledger.archived_wal_id)
            if ledger.archive_advanced.is_set() or not is_waiting or not joined:
                continue
            number += 1  # ask the archiver, and one other in turn, which may have taken over
            archiver_id = ledger.broadcast.archiver_id
            appointed = [each for each in joined if each.member.id == archiver_id]
            others = [each for each in joined if each.member.id != archiver_id]
            turn = [*appointed, *others[number % len(others) :][:1]] if others else appointed
            for peer in turn:
                await self._poll_member(peer)

    async def _poll_member(self, peer: Peer) -> None:
        context = self._context
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_MS / 1_000):
                node = await context.links.status(peer.member.address, context.place.database_id)
        except (LinkBroken, ShaleError, TimeoutError):
            return  # another member is asked next time
        for status in node.members:
            if status.member_id == peer.member.id and status.archived_wal_id is not None:
                peer.archived_wal_id = status.archived_wal_id
                self.ledger.archived(status.archived_wal_id)


async def until_failed(run: Callable[[], Awaitable[None]]) -> None:
    """Run a log until an error ends it, and only log that: calls that wait for the log get it."""
    try:
        await run()
    except ShaleError as error:
        log.warning("the quorum log has ended", error=str(error))


def _names(members: Iterable[Member]) -> str:
    return ", ".join(member.address for member in members)


class MembershipFollower:
    """Keeps the members of a log equal to those in the manifest."""

    def __init__(self, manifest: WriterManifest, quorum_log: QuorumLog, clock: Clock) -> None:
        """REQUIRES: another task refreshes `manifest`."""
        self._manifest = manifest
        self._log = quorum_log
        self._clock = clock

    async def run(self) -> None:
        """Follow the manifest until cancelled. Raises `Fenced` when it names another writer."""
        seen: Manifest | None = None
        while True:
            manifest = self._manifest.current
            if manifest is not seen:
                # The members of another writer's configuration may have promised nothing yet, and
                # would accept records that may not be committed any more.
                check_owner(manifest, self._manifest.own)
                if manifest.wal_mode is WalMode.QUORUM:
                    self._log.reconfigure(Configuration.of(manifest))
                seen = manifest
            if self._log.ledger.leader.may_finish_change:
                await self._finish(self._log.ledger.leader.configuration)
            await self._clock.sleep_ms(MANIFEST_POLL_MS)

    async def _finish(self, joint: Configuration) -> None:
        """Make the second edit, unless the change was cancelled meanwhile."""

        def has_landed(manifest: Manifest) -> bool:
            members = tuple(map(str, joint.next))
            return manifest.wal_generation > joint.generation and manifest.wal_members == members

        edit = partial(finish_change, own=self._manifest.own, generation=joint.generation)
        try:
            manifest = await self._manifest.edit(edit, has_landed)
        except InvalidRequest as error:  # the next poll sees the outcome
            log.warning("a change of members was not finished", problem=str(error))
            return
        except StoreError as error:
            log.warning("a change of members could not be finished", error=str(error))
            return
        self._log.reconfigure(Configuration.of(manifest))
