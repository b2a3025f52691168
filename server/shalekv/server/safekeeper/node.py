"""A node: the logs of several databases in one folder, and what keeps them.

A member is made by `admit`, before any manifest names it, and deleted by `retire`, after the
manifest has ceased to, or when none will ever name it (`standing`). Which members a database has is
the manifest's word alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import structlog

from shalekv import __version__
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
from shalekv.format.member_files import MemberIdentity
from shalekv.format.names import MANIFEST_FOLDER
from shalekv.format.quorum_messages import check_id
from shalekv.protocol.quorum_records import LogHealth
from shalekv.runtime import Runtime, Workers
from shalekv.server.safekeeper.archiver import Archiver
from shalekv.server.safekeeper.member import LocalMember
from shalekv.server.safekeeper.membership_status import Held, MembershipStatus, check_database
from shalekv.server.safekeeper.relaying import Relays
from shalekv.settings import SafekeepSettings, StoreSettings
from shalekv.store.api import ObjectStore
from shalekv.store.cas import CasStore
from shalekv.store.files import REAL_FILE_SYSTEM, FileSystem
from shalekv.store.opening import open_store
from shalekv.store.safekeeper_log.folder import DataFolder
from shalekv.store.safekeeper_log.log import MemberLog
from shalekv.store.safekeeper_log.syncer import Syncer
from shalekv.store.url import BucketUrl, FileUrl, MemoryUrl, parse_url
from shalekv.write.quorum.links import DatabasePlace, NodeStatus, RelayLinks

# --- places
# Which databases a node takes: those at or below its own URL, where it archives to.


def check_place(url: str, node_url: str) -> str:
    """`url`, if it is at or below that of the node. Raises `InvalidUrl`."""
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


# --- node


_ID_BYTES = 16

OpenStore: TypeAlias = Callable[[str, Runtime, StoreSettings], ObjectStore]

log = structlog.get_logger()


class Node:
    """The members of one data folder. It answers while `run` runs."""

    def __init__(
        self,
        folder: DataFolder,
        syncer: Syncer,
        settings: SafekeepSettings,
        runtime: Runtime,
        relays: Relays,
        sync_workers: Workers,
        open_store: OpenStore,
    ) -> None:
        """Use `Node.open`."""
        self.settings = settings
        self.relays = relays
        self._folder = folder
        self._syncer = syncer
        self._sync_workers = sync_workers
        self._runtime = runtime
        self._open_store = open_store
        self._held: Mapping[bytes, Held] = {}  # by database; replaced, and never changed
        self._changing = asyncio.Lock()  # held by who adds or removes members
        self._tasks: asyncio.TaskGroup | None = None
        self._closed = asyncio.Event()
        self._failure: ShaleError | None = None
        self._has_left = False

    @classmethod
    async def open(
        cls,
        settings: SafekeepSettings,
        runtime: Runtime,
        *,
        sync_workers: Workers,
        filesystem: FileSystem = REAL_FILE_SYSTEM,
        links: RelayLinks | None = None,
        open_store: OpenStore = open_store,
    ) -> Node:
        """Open all logs of the data folder. `sync_workers` are for nothing but syncs.

        By `links` it passes on what writers ask it to; without them it does not. `open_store` opens
        the archives.

        Raises `StoreRefused` when another process has the folder, or the archive refuses us;
        `InvalidUrl`, `InvalidSetting`, `StoreError`.
        """
        await _check_archive(settings, runtime, open_store)
        folder = await runtime.workers.run(_open_folder, settings, filesystem)
        relays = Relays(links, settings.safekeeper.relay_queue_bytes_max, runtime)
        syncer = Syncer(sync_workers)
        node = cls(folder, syncer, settings, runtime, relays, sync_workers, open_store)
        logs, set_aside = await runtime.workers.run(folder.open_logs)
        for path in set_aside:
            problem = "nobody can tell any more what was promised: this member is gone"
            log.error("a log was set aside", folder=str(path), problem=problem)
        for member_log in logs:
            _tell_opened(node._hold(member_log))
        return node

    # What it is asked for.

    def find(self, database_id: bytes) -> LocalMember:
        """The member of a database. Raises `NotAMember`."""
        held = self._held.get(database_id)
        if held is None:
            raise NotAMember(f"this safekeeper has no log of the database {database_id.hex()}")
        return held.member

    def find_exactly(self, database_id: bytes, member_id: bytes) -> LocalMember:
        """The member with this id. Raises `NotAMember`."""
        member = self.find(database_id)
        if member.identity.member_id != member_id:
            raise NotAMember(
                f"this safekeeper is member {member.identity.member_id.hex()} of the database, "
                f"and not {member_id.hex()}: its disk may have been lost"
            )
        return member

    async def admit(self, place: DatabasePlace, request_id: bytes) -> bytes:
        """Make room for a log; the id of the member that this node is from now on.

        Raises `InvalidUrl`, `InvalidRequest`, `DatabaseMismatch`, `DatabaseExists` when there is a
        log that is in use, and `StoreError`.
        """
        check_id(place.database_id, "database.database_id")
        check_id(request_id, "request_id")
        check_place(place.url, self.settings.database.url)
        async with self._changing:
            held = self._held.get(place.database_id)
            if held is not None:
                identity = held.member.identity
                if identity.url != place.url:
                    message = f"this safekeeper has a log of the database for {identity.url}"
                    raise DatabaseMismatch(message)
                if held.is_untouched:
                    held.expect_to_be_named()
                    return identity.member_id
                if identity.request_id == request_id:
                    return identity.member_id
                await self._make_way(held)
            return (await self._create(place, request_id)).member.identity.member_id

    async def retire(self, database_id: bytes, member_id: bytes) -> None:
        """Delete a member that the manifest does not name.

        Raises `NotAMember`, and `InvalidRequest` while the manifest names it, or when there is none
        to ask and the log has records that are not in the archive.
        """
        async with self._changing:
            self.find_exactly(database_id, member_id)
            held = self._held[database_id]
            standing = await held.standing()
            if standing is MembershipStatus.NAMED:
                problem = "the manifest names this member: change the members first"
                raise InvalidRequest("member_id", problem)
            if standing is not MembershipStatus.UNNAMED and not held.is_archived:
                url = held.member.identity.url
                problem = (
                    f"{url} does not hold its database, or an older state of it, and the log has "
                    "records that may be nowhere else: stop this safekeeper, and delete the folder "
                    "if they are of no use"
                )
                raise InvalidRequest("member_id", problem)
            await self._remove(held)

    def status(self, database_id: bytes = b"") -> NodeStatus:
        """What is held, of one database or of all. Raises `NotAMember`."""
        if database_id:
            self.find(database_id)
        chosen = [self._held[database_id]] if database_id else self._held.values()
        folder = self._folder
        free_bytes = folder.files.filesystem.free_bytes(folder.path)
        return NodeStatus(__version__, [held.status() for held in chosen], free_bytes)

    # Its life.

    async def run(self) -> None:
        """Go on until `close`, or raise what has ended it."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self.relays.begin(tasks)
            syncing = tasks.create_task(self._sync(), name="sync")
            retiring = tasks.create_task(self._retire_again_and_again(), name="retire")
            for held in self._held.values():
                self._begin_archiving(held)
            await self._closed.wait()
            self._tasks = None
            self.relays.end()
            retiring.cancel()
            for held in self._held.values():
                held.stop_archiving()
            with contextlib.suppress(StoreBroken):  # which is told below
                for held in self._held.values():
                    if self._has(held):  # else it was retired meanwhile
                        await held.member.settle()
            syncing.cancel()
        if self._failure is not None:
            raise self._failure

    async def ended(self) -> ShaleError | None:
        """Wait until nothing more is taken: what ended it, None after `close`."""
        await self._closed.wait()
        return self._failure

    def close(self) -> None:
        """Take nothing more; `run` returns when what was taken is durable."""
        self._end(Stopping("this safekeeper is shutting down"))

    def readiness(self) -> None:
        """Nothing: a safekeeper answers neither reads nor writes of clients."""

    async def leave(self, timeout_ms: float = 0.0) -> None:
        """Close all files. REQUIRES: `run` has returned, or never began."""
        del timeout_ms  # nothing here waits for anybody
        if self._has_left:
            return
        self._has_left = True
        for held in self._held.values():
            held.member.log.close()
            await held.store.close()
        self._folder.close()

    def _end(self, error: ShaleError) -> None:
        for held in self._held.values():
            held.member.end(error)
        self._closed.set()

    async def _sync(self) -> None:
        try:
            await self._syncer.run()
        except ShaleError as error:  # nothing may be acknowledged any more
            self._fail(error)

    async def _archive(self, held: Held) -> None:
        try:
            await Archiver(held.member, held.cas, self.settings.archiving).run()
        except StoreBroken as error:  # of an archive on a disk: a new process reads what is there
            self._fail(error)
        except Exception as error:  # a bug with one database must not end the others
            log.exception("ARCHIVING STOPPED", **held.told)
            held.member.archiving.problem = f"unexpected error: {error}"
            held.member.archiving.is_archiver = False

    def _fail(self, error: ShaleError) -> None:
        self._failure = self._failure or error
        self._end(error)

    def _begin_archiving(self, held: Held) -> None:
        if self._tasks is not None:  # else `run` begins it
            held.archiving = self._tasks.create_task(self._archive(held), name="archive")

    def _hold(self, member_log: MemberLog) -> Held:
        member = LocalMember(member_log, self._syncer, self.settings.safekeeper, self._runtime)
        store = self._open_store(member.identity.url, self._runtime, self.settings.store)
        held = Held(member, store, CasStore(store, self._runtime, self.settings.store))
        self._held = {**self._held, member.identity.database_id: held}
        return held

    async def _create(self, place: DatabasePlace, request_id: bytes) -> Held:
        store = self._open_store(place.url, self._runtime, self.settings.store)
        try:
            await check_database(
                CasStore(store, self._runtime, self.settings.store), place.database_id
            )
        finally:
            await store.close()
        member_id = self._runtime.random.randbytes(_ID_BYTES)
        identity = MemberIdentity(place.database_id, member_id, place.url, request_id)
        held = self._hold(await self._runtime.workers.run(self._folder.create, identity))
        self._begin_archiving(held)
        log.info("member admitted", **held.told)
        return held

    async def _make_way(self, held: Held) -> None:
        """Let go of a member so that there can be another. Raises `DatabaseExists`."""
        if await held.standing() is not MembershipStatus.UNNAMED:
            identity = held.member.identity
            raise DatabaseExists(
                f"this safekeeper has a log of {identity.url} already, as member "
                f"{identity.member_id.hex()}"
            )
        await self._let_go(held)

    async def _let_go(self, held: Held) -> None:
        """Remove a member that nobody has asked to retire.

        It may have been lost when the others were recovered without a majority, and come back with
        the only copy of what was given up: that is for people to delete.
        """
        if held.is_archived:
            await self._remove(held)
            return
        await self._end_member(held)
        folder = await self._sync_workers.run(self._folder.set_aside, held.member.log)
        log.warning(
            "MEMBER SET ASIDE: its log has records that are not archived. Delete the folder if "
            "they are of no use",
            folder=str(folder),
            **held.told,
        )

    async def _remove(self, held: Held) -> None:
        await self._end_member(held)
        await self._sync_workers.run(self._folder.remove, held.member.log)
        log.info("member retired", **held.told)

    async def _end_member(self, held: Held) -> None:
        """Afterwards its files are touched only behind what the thread of syncs still does for it:
        making room for what would come.
        """
        error = NotAMember("this member was retired: the manifest does not name it any more")
        held.member.end(error)
        held.stop_archiving()
        await held.member.settle()
        self._held = {key: each for key, each in self._held.items() if each is not held}
        await held.store.close()

    async def _retire_again_and_again(self) -> None:
        try:
            while True:
                await self._runtime.clock.sleep_ms(self.settings.safekeeper.retire_interval_ms)
                for held in self._held.values():
                    async with self._changing:
                        if self._has(held):
                            await self._retire_if_unnamed(held)
                    if self._has(held) and held.waits_in_vain:
                        await held.rule_out()
        except StoreBroken as error:  # of our own disk, or of an archive on a disk
            self._fail(error)

    def _has(self, held: Held) -> bool:
        return self._held.get(held.member.identity.database_id) is held

    async def _retire_if_unnamed(self, held: Held) -> None:
        try:
            is_of_no_use = await held.is_of_no_use()
        except ShaleError as error:
            log.warning("whether a log is of use is not known", problem=str(error), **held.told)
            return
        if is_of_no_use:
            await self._let_go(held)


def _open_folder(settings: SafekeepSettings, filesystem: FileSystem) -> DataFolder:
    path = Path(settings.safekeeper.data).absolute()
    return DataFolder.open(
        path,
        segment_bytes=settings.safekeeper.segment_bytes,
        free_bytes_min=settings.safekeeper.disk_free_bytes_min,
        filesystem=filesystem,
    )


async def _check_archive(
    settings: SafekeepSettings, runtime: Runtime, open_store: OpenStore
) -> None:
    """Notice a bucket that is missing, or refuses us, before anybody rests on this node.

    One that does not answer is no reason not to start: votes and appends do without it.
    """
    store = open_store(settings.database.url, runtime, settings.store)
    try:
        async for _ in store.list(MANIFEST_FOLDER):
            break
    except StoreUnavailable as error:
        log.warning("the archive does not answer", problem=str(error))
    finally:
        await store.close()


def _tell_opened(held: Held) -> None:
    if held.member.state.health is not LogHealth.DAMAGED:
        log.info("log opened", **held.told)
        return
    problem = held.member.log.problem or "this was found before, and nothing has filled the log"
    log.error("records were lost", problem=problem, **held.told)
