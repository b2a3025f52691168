"""Safekeeper node: the members of several databases in one data folder, and their background tasks.

A member is created by `admit`, before any manifest names it. It is deleted by `retire`, after the
manifest has ceased to name it, or by the node itself when no manifest will ever name it
(`membership_status`). The manifest alone decides which members a database has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from contextvars import Context
from pathlib import Path
from typing import TypeAlias

import structlog

from shalekv.errors import (
    DatabaseExists,
    DatabaseMismatch,
    InvalidRequest,
    InvalidUrl,
    NotAMember,
    ShaleError,
    Stopping,
    StoreBroken,
    StoreUnavailable,
)
from shalekv.format.names import MANIFEST_FOLDER
from shalekv.format.quorum.member_files import MemberIdentity
from shalekv.format.quorum.messages import check_id
from shalekv.protocol.membership import MembershipStatus
from shalekv.protocol.quorum_records import LogHealth
from shalekv.runtime import Runtime, Workers
from shalekv.server.metrics import add_node
from shalekv.server.safekeeper.archiver import Archiver
from shalekv.server.safekeeper.member import LocalMember
from shalekv.server.safekeeper.membership_status import (
    HostedMember,
    check_database,
)
from shalekv.server.safekeeper.relaying import Relays
from shalekv.server.status import ProcessUse, StorePlace, StoreUse
from shalekv.settings import MIB, SafekeeperConfig, StoreSettings
from shalekv.store.api import ObjectStore, RequestCounts
from shalekv.store.cas import CasStore
from shalekv.store.counting import StoreCallCounts
from shalekv.store.files import REAL_FILE_SYSTEM, FileSystem
from shalekv.store.opening import open_store
from shalekv.store.safekeeper_log.folder import DataFolder
from shalekv.store.safekeeper_log.log import MemberLog
from shalekv.store.safekeeper_log.syncer import Syncer
from shalekv.store.url import BucketUrl, FileUrl, MemoryUrl, parse_url
from shalekv.telemetry.metrics import Metrics
from shalekv.version import VERSION
from shalekv.write.quorum.links import DatabasePlace, NodeStatus, RelayLinks

_ID_BYTES = 16
# Checks of the manifests for logs that are not needed: a request for each, and disk that is freed
# some minutes later.
LOG_RETIRE_INTERVAL_MS = 60_000
# Appends that wait to be forwarded to one other node: beyond it they are dropped, and the writer
# sends them itself.
RELAY_QUEUE_BYTES_MAX = 16 * MIB

OpenStore: TypeAlias = Callable[[str, Runtime, StoreSettings], ObjectStore]

log = structlog.get_logger()


def check_place(url: str, node_url: str) -> str:
    """Return `url`, which must be at or below the URL of the node, where it archives to.

    Raises `InvalidUrl`.
    """
    if not _is_at_or_below(url, node_url):
        raise InvalidUrl(
            f"{url} is not at or below {node_url}, the --url of this safekeeper: it archives "
            "nowhere else"
        )
    return url


def _is_at_or_below(url: str, node_url: str) -> bool:
    match parse_url(url), parse_url(node_url):
        case FileUrl(path), FileUrl(above):
            return path.is_relative_to(above)
        case BucketUrl() as place, BucketUrl() as above_it:
            is_same_bucket = (place.provider, place.bucket) == (above_it.provider, above_it.bucket)
            return is_same_bucket and f"{place.folder}/".startswith(_with_slash(above_it.folder))
        case MemoryUrl(name), MemoryUrl(other):
            return name == other
        case _:
            return False


def _with_slash(folder: str) -> str:
    return f"{folder}/" if folder else ""


_ROLE = "safekeeper"


class Archives:
    """The stores of databases, and the counts of all requests to them."""

    def __init__(self, settings: SafekeeperConfig, runtime: Runtime, open_store: OpenStore) -> None:
        """Open none yet."""
        self._counts = StoreCallCounts(settings.telemetry.slow_ms)
        self._sent = RequestCounts()
        place = StorePlace.of(settings.database.url, settings.store)
        self._bill = StoreUse(place, runtime.clock, place.prices(settings.telemetry))
        self._bill.measure(lambda: [ProcessUse(_ROLE, 0.0, self._sent.by_kind)])
        self._settings = settings.store
        self._runtime = runtime
        self._open_store = open_store

    def open(self, url: str) -> tuple[ObjectStore, CasStore]:
        """Open the store of a database, which the caller closes."""
        store = self._open_store(url, self._runtime, self._settings)
        store.sent.add_up_in(self._sent)
        return store, CasStore(store, self._runtime, self._settings, counts=self._counts)

    def collect(self, metrics: Metrics) -> None:
        """Add the metrics of all these requests."""
        self._counts.add_to(metrics, _ROLE)
        self._bill.collect(metrics)


class Node:
    """The members of one data folder. It answers requests while `run` runs."""

    def __init__(
        self,
        folder: DataFolder,
        syncer: Syncer,
        settings: SafekeeperConfig,
        runtime: Runtime,
        relays: Relays,
        open_store: OpenStore,
    ) -> None:
        """Compose a node; called by `Node.open`."""
        self.settings = settings
        self.relays = relays
        self._folder = folder
        self._syncer = syncer
        self._runtime = runtime
        self._archives = Archives(settings, runtime, open_store)
        self._hosted: Mapping[bytes, HostedMember] = {}  # by database; replaced, and never changed
        self._membership_lock = asyncio.Lock()  # while members are added or removed
        self._tasks: asyncio.TaskGroup | None = None
        self._closed = asyncio.Event()
        self._failure: ShaleError | None = None
        self._is_released = False

    @classmethod
    async def open(
        cls,
        settings: SafekeeperConfig,
        runtime: Runtime,
        *,
        sync_workers: Workers,
        filesystem: FileSystem = REAL_FILE_SYSTEM,
        links: RelayLinks | None = None,
        open_store: OpenStore = open_store,
    ) -> Node:
        """Open all logs of the data folder. `sync_workers` must do nothing but syncs.

        `links` connect to other nodes, to relay appends if writers ask for it; without them nothing
        is relayed. `open_store` opens the archives.

        Raises `StoreRefused` when another process uses the folder, or the archive refuses access;
        `InvalidUrl`, `InvalidSetting`, `StoreError`.
        """
        await _check_archive(settings, runtime, open_store)
        folder = await runtime.workers.run(_open_folder, settings, filesystem)
        relays = Relays(links, RELAY_QUEUE_BYTES_MAX, runtime)
        syncer = Syncer(sync_workers)
        node = cls(folder, syncer, settings, runtime, relays, open_store)
        logs, set_aside = await runtime.workers.run(folder.open_logs)
        for path in set_aside:
            problem = "the promise of this member cannot be read any more: the member is lost"
            log.error("a log was set aside", folder=str(path), problem=problem)
        for member_log in logs:
            _log_opened(node._host(member_log))
        return node

    # Requests.

    def find(self, database_id: bytes) -> LocalMember:
        """Return the member of a database. Raises `NotAMember`."""
        hosted = self._hosted.get(database_id)
        if hosted is None:
            raise NotAMember(f"this safekeeper has no log of the database {database_id.hex()}")
        return hosted.member

    def find_exactly(self, database_id: bytes, member_id: bytes) -> LocalMember:
        """Return the member with this id. Raises `NotAMember`."""
        member = self.find(database_id)
        if member.identity.member_id != member_id:
            raise NotAMember(
                f"this safekeeper is member {member.identity.member_id.hex()} of the database, "
                f"and not {member_id.hex()}: its disk may have been lost"
            )
        return member

    async def admit(self, place: DatabasePlace, request_id: bytes) -> bytes:
        """Create a member with an empty log, and return its id.

        Returns the id of the present member if no writer has used it, or if the same request has
        created it. Raises `InvalidUrl`, `InvalidRequest`, `DatabaseMismatch`, `DatabaseExists` when
        there is a log in use, and `StoreError`.
        """
        check_id(place.database_id, "database.database_id")
        check_id(request_id, "request_id")
        check_place(place.url, self.settings.database.url)
        async with self._membership_lock:
            hosted = self._hosted.get(place.database_id)
            if hosted is not None:
                identity = hosted.member.identity
                if identity.url != place.url:
                    message = f"this safekeeper has a log of the database for {identity.url}"
                    raise DatabaseMismatch(message)
                if hosted.is_untouched:
                    hosted.expect_to_be_named()
                    return identity.member_id
                if identity.request_id == request_id:
                    return identity.member_id
                await self._free_place(hosted)
            return (await self._create(place, request_id)).member.identity.member_id

    async def retire(self, database_id: bytes, member_id: bytes) -> None:
        """Delete a member that the manifest does not name.

        Raises `NotAMember`; `InvalidRequest` while the manifest names it, or when there is no
        manifest of the database and the log has records that are not in the archive.
        """
        async with self._membership_lock:
            self.find_exactly(database_id, member_id)
            hosted = self._hosted[database_id]
            membership = await hosted.membership()
            if membership is MembershipStatus.NAMED:
                problem = "the manifest names this member: change the members first"
                raise InvalidRequest("member_id", problem)
            if membership is not MembershipStatus.UNNAMED and not hosted.is_archived:
                url = hosted.member.identity.url
                problem = (
                    f"{url} does not hold its database, or an older state of it, and the log has "
                    "records that may be nowhere else: stop this safekeeper, and delete the folder "
                    "if they are of no use"
                )
                raise InvalidRequest("member_id", problem)
            await self._remove(hosted)

    def status(self, database_id: bytes = b"") -> NodeStatus:
        """Report the state of one member, or of all. Raises `NotAMember`."""
        if database_id:
            self.find(database_id)
        chosen = [self._hosted[database_id]] if database_id else self._hosted.values()
        folder = self._folder
        free_bytes = folder.files.filesystem.free_bytes(folder.path)
        return NodeStatus(VERSION, [hosted.status() for hosted in chosen], free_bytes)

    def collect(self, metrics: Metrics) -> None:
        """Add the metrics of all logs, and of the disk."""
        add_node(metrics, self.status())
        self._archives.collect(metrics)

    # Lifecycle.

    async def run(self) -> None:
        """Sync, archive and retire until `close`. Raises the error that has ended it before."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self.relays.begin(tasks)
            syncing = tasks.create_task(self._sync(), name="sync")
            retiring = tasks.create_task(self._retire_loop(), name="retire")
            for hosted in self._hosted.values():
                self._begin_archiver(hosted)
            await self._closed.wait()
            self._tasks = None
            self.relays.end()
            retiring.cancel()
            for hosted in self._hosted.values():
                hosted.stop_archiver()
            with contextlib.suppress(StoreBroken):  # raised below
                for hosted in self._hosted.values():
                    if self._has(hosted):  # else it was retired meanwhile
                        await hosted.member.settle()
            syncing.cancel()
        if self._failure is not None:
            raise self._failure

    async def ended(self) -> ShaleError | None:
        """Wait until no more messages are taken; return the error behind it, None after `close`."""
        await self._closed.wait()
        return self._failure

    def close(self) -> None:
        """Take no more messages; `run` returns when those that were taken are durable."""
        self._end(Stopping("this safekeeper is shutting down"))

    def readiness(self) -> None:
        """Return None: a safekeeper serves neither reads nor writes of clients."""

    async def release(self, timeout_ms: float = 0.0) -> None:
        """Close all files. REQUIRES: `run` has returned, or never began."""
        del timeout_ms  # nothing here waits
        if self._is_released:
            return
        self._is_released = True
        for hosted in self._hosted.values():
            hosted.member.log.close()
            await hosted.store.close()
        self._folder.close()

    def _end(self, error: ShaleError) -> None:
        for hosted in self._hosted.values():
            hosted.member.end(error)
        self._closed.set()

    async def _sync(self) -> None:
        try:
            await self._syncer.run()
        except ShaleError as error:  # nothing may be acknowledged after a failed sync
            self._fail(error)

    async def _archive(self, hosted: HostedMember) -> None:
        try:
            await Archiver(hosted.member, hosted.cas, self.settings.archiving).run()
        except StoreBroken as error:  # an archive on a disk: a new process has to read its state
            self._fail(error)
        except Exception as error:  # a bug with one database must not end the others
            log.exception("ARCHIVING STOPPED", **hosted.log_fields)
            hosted.member.archiver_status.problem = f"unexpected error: {error}"
            hosted.member.archiver_status.is_archiver = False

    def _fail(self, error: ShaleError) -> None:
        self._failure = self._failure or error
        self._end(error)

    def _begin_archiver(self, hosted: HostedMember) -> None:
        if self._tasks is not None:  # else `run` begins it
            archiving, no_call = self._archive(hosted), Context()  # it outlives the call
            hosted.archiver_task = self._tasks.create_task(
                archiving, name="archive", context=no_call
            )

    def _host(self, member_log: MemberLog) -> HostedMember:
        member = LocalMember(member_log, self._syncer, self.settings.safekeeper, self._runtime)
        hosted = HostedMember(member, *self._archives.open(member.identity.url))
        self._hosted = {**self._hosted, member.identity.database_id: hosted}
        return hosted

    async def _create(self, place: DatabasePlace, request_id: bytes) -> HostedMember:
        store, cas = self._archives.open(place.url)
        try:
            await check_database(cas, place.database_id)
        finally:
            await store.close()
        member_id = self._runtime.random.randbytes(_ID_BYTES)
        identity = MemberIdentity(place.database_id, member_id, place.url, request_id)
        hosted = self._host(await self._runtime.workers.run(self._folder.create, identity))
        self._begin_archiver(hosted)
        log.info("member admitted", **hosted.log_fields)
        return hosted

    async def _free_place(self, hosted: HostedMember) -> None:
        """Discard a member so that another can be created. Raises `DatabaseExists`."""
        if await hosted.membership() is not MembershipStatus.UNNAMED:
            identity = hosted.member.identity
            raise DatabaseExists(
                f"this safekeeper has a log of {identity.url} already, as member "
                f"{identity.member_id.hex()}"
            )
        await self._discard(hosted)

    async def _discard(self, hosted: HostedMember) -> None:
        """Remove a member without a request to retire it; set its log aside if it is not archived.

        The member may have been missing when the others were recovered without a majority, and have
        the only copy of the records that were given up. Only the operator may delete those.
        """
        if hosted.is_archived:
            await self._remove(hosted)
            return
        await self._end_member(hosted)
        folder = await self._syncer.workers.run(self._folder.retire, hosted.member.log)
        log.warning(
            "MEMBER SET ASIDE: its log has records that are not archived. Delete the folder if "
            "they are of no use",
            folder=str(folder),
            **hosted.log_fields,
        )

    async def _remove(self, hosted: HostedMember) -> None:
        await self._end_member(hosted)
        await self._syncer.workers.run(self._folder.remove, hosted.member.log)
        log.info("member retired", **hosted.log_fields)

    async def _end_member(self, hosted: HostedMember) -> None:
        """End a member. Its files may only be touched by the sync workers from now on.

        They may still be allocating space for it.
        """
        error = NotAMember("this member was retired: the manifest does not name it any more")
        hosted.member.end(error)
        hosted.stop_archiver()
        await hosted.member.settle()
        self._hosted = {key: each for key, each in self._hosted.items() if each is not hosted}
        await hosted.store.close()

    async def _retire_loop(self) -> None:
        try:
            while True:
                await self._runtime.clock.sleep_ms(LOG_RETIRE_INTERVAL_MS)
                for hosted in self._hosted.values():
                    async with self._membership_lock:
                        if self._has(hosted):
                            await self._retire_if_unnamed(hosted)
                    if self._has(hosted) and hosted.is_overdue:
                        await hosted.prevent_naming()
        except StoreBroken as error:  # of our own disk, or of an archive on a disk
            self._fail(error)

    def _has(self, hosted: HostedMember) -> bool:
        return self._hosted.get(hosted.member.identity.database_id) is hosted

    async def _retire_if_unnamed(self, hosted: HostedMember) -> None:
        try:
            is_unneeded = await hosted.is_unneeded()
        except ShaleError as error:
            log.warning(
                "whether a log is of use is not known", problem=str(error), **hosted.log_fields
            )
            return
        if is_unneeded:
            await self._discard(hosted)


def _open_folder(settings: SafekeeperConfig, filesystem: FileSystem) -> DataFolder:
    path = Path(settings.safekeeper.data).absolute()
    return DataFolder.open(
        path,
        segment_bytes=settings.safekeeper.segment_bytes,
        free_bytes_min=settings.safekeeper.disk_free_bytes_min,
        filesystem=filesystem,
    )


async def _check_archive(
    settings: SafekeeperConfig, runtime: Runtime, open_store: OpenStore
) -> None:
    """Raise an error if the bucket is missing or refuses access, before members depend on it.

    A node starts with a store that does not answer: votes and appends do not need it.
    """
    store = open_store(settings.database.url, runtime, settings.store)
    try:
        async for _ in store.list(MANIFEST_FOLDER):
            break
    except StoreUnavailable as error:
        log.warning("the archive does not answer", problem=str(error))
    finally:
        await store.close()


def _log_opened(hosted: HostedMember) -> None:
    if hosted.member.state.health is not LogHealth.DAMAGED:
        log.info("log opened", **hosted.log_fields)
        return
    problem = hosted.member.log.problem or "this was found before, and nothing has filled the log"
    log.error("records were lost", problem=problem, **hosted.log_fields)
