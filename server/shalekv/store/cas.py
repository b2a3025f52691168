"""The store of one database as a process uses it: claims, and reads that are repeated.

`ObjectStore` sends one request for each call. `CasStore` is the one layer above it: it counts the
requests, repeats those that failed, and carries a create to a known outcome.

`create` has three outcomes, `claim` has two: the object of this name is ours, or a rival's. The
rule (`server/docs/protocol.md`, "Objects"): when a create returns `Exists` or `Unknown`, the object
is read, and its bytes decide. They are compared before any epoch in them is. If there is no object,
or the create failed, the same bytes are sent again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar, TypeVarTuple

import structlog

from shalekv.errors import ObjectNotFound, StoreBroken, StoreRefused, StoreUnavailable
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import (
    NO_METADATA,
    Created,
    Exists,
    IsCollected,
    ObjectInfo,
    ObjectStore,
    Repaired,
    StoredObject,
    Unknown,
    nothing_is_collected,
)
from shalekv.store.counting import CountedRequest, Operation, StoreCallCounts
from shalekv.store.reachability import Reachability
from shalekv.store.retry import RETRY_INITIAL_MS, RETRY_MAX_MS, Backoff, RefusalPolicy

log = structlog.get_logger()


T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class Claimed:
    """The object of this name is the caller's, and durable."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The object of this name is a rival's, and durable: these are its bytes.

    With `is_first_owner`, ours never existed. Without, the outcome of an earlier attempt was
    unknown: our object may have been created then and collected since, before the rival created
    its own. Whether that is possible depends on when objects of this kind are collected, which the
    caller knows.
    """

    data: bytes
    is_first_owner: bool = True  # no attempt of ours can have created the object


ClaimOutcome = Claimed | Taken

_CLAIMED = Claimed()


class _Absent(Exception):
    """After an attempt to claim a name, there was no object to compare with: try again."""

    def __init__(self, message: str, problem: str) -> None:
        """`problem` is the store's part of the message."""
        super().__init__(message)
        self.problem = problem


class CasStore:
    """The store of one database, with the runtime and the settings for requests to it.

    The methods are those of `ObjectStore`, but for `create`, whose place `claim` takes. All others,
    also `delete`, are tried `read_attempts` times before they raise `StoreUnavailable`; refusals
    are repeated as `refusals` decides. Each attempt counts as a request.
    """

    def __init__(
        self,
        store: ObjectStore,
        runtime: Runtime,
        settings: StoreSettings,
        *,
        backoff: Backoff | None = None,
        counts: StoreCallCounts | None = None,
    ) -> None:
        """`store` sends one request for each attempt. Several stores may count in `counts`."""
        self.runtime = runtime
        self.settings = settings  # with which stores of other databases are opened, too
        self.backoff = backoff or Backoff(RETRY_INITIAL_MS, RETRY_MAX_MS)
        self.url = store.url
        self.cas_mode = store.cas_mode
        self.sent = store.sent
        self.refusals = RefusalPolicy(store.sent, runtime)
        self.counts = counts or StoreCallCounts()
        self.reachability = Reachability(runtime.clock)  # of reads
        self._store = store

    async def claim(
        self,
        name: str,
        data: bytes,
        metadata: Mapping[str, str] = NO_METADATA,
        *,
        is_patient: bool = False,
        uploads: Reachability | None = None,
    ) -> ClaimOutcome:
        """Create `name` with `data` unless a rival has; retry until the owner of the name is known.

        REQUIRES: `data` holds a write id that was drawn for this name and these bytes. Only then do
        identical bytes mean "ours": a lost reply to our own success is not taken for a rival, and
        the same contents written by a rival are not taken for ours.

        There is no deadline, since giving up on a slot would leave a gap or a doubt (I1, I4): the
        owner cancels when it no longer needs the result, and the outcome is then unknown. Failed
        attempts are logged, and recorded in `uploads` for the detection of outages. A refused
        request is repeated as `refusals` decides; if `is_patient`, until an operator has fixed the
        cause. Raises `StoreRefused` otherwise, and `StoreBroken` as `create` does. The outcome is
        unknown after both: this attempt or an earlier one may have created the object.

        Whether an object that is ours *counts* is for the caller to find out: see F1 and F2.
        """
        request = self.counts.begin(Operation.CREATE, name)
        refused_until_ms = self.refusals.until_ms()
        failed_attempts, is_first_owner = 0, True
        upload = uploads.begin() if uploads is not None else 0
        try:
            while True:
                try:
                    request.sends(data)
                    with request:
                        created = await self._store.create(name, data, metadata)
                    request.answered(created)
                    if isinstance(created, Created):
                        outcome: ClaimOutcome = _CLAIMED
                    else:
                        is_first_owner = is_first_owner and isinstance(created, Exists)
                        outcome = await self._compare(
                            name, data, created, is_first_owner=is_first_owner
                        )
                except (StoreUnavailable, StoreRefused, _Absent) as error:
                    failed_attempts += 1
                    if not is_patient and self.refusals.is_final(error, refused_until_ms):
                        raise
                    log_retry(failed_attempts, error)
                    if uploads is not None:
                        uploads.fail(upload, error)
                else:
                    self.refusals.accepted()
                    if uploads is not None:
                        uploads.succeed()
                    return outcome
                await self.pause(failed_attempts)
        finally:
            if uploads is not None:
                uploads.end(upload)

    async def _compare(
        self, name: str, data: bytes, created: Exists | Unknown, *, is_first_owner: bool
    ) -> ClaimOutcome:
        """Read the object that may be ours, and compare it.

        After a `StoreUnavailable` the caller sends the create again, too. That is harmless: it
        replaces no object, and our own object is recognised by its bytes.
        """
        request = self.counts.begin(Operation.GET, name)
        try:
            found = await self._send(request, self._store.get, name, is_read=True)
        except ObjectNotFound as error:
            # Gone after `Exists` means collected, and the next attempt may create the object a
            # second time. Nothing is lost by that. A WAL slot of a fence run is never collected
            # (F1), so a stalled writer keeps failing there. A collected slot lies before the run:
            # if our write had been created there, it was replayed and counts, and the object that
            # we create now is never read. For a manifest, a create proves nothing before a list
            # shows it as the highest (F2).
            if isinstance(created, Exists):
                problem = f"{name} existed, and was gone when it was read"
                raise _Absent(problem, problem) from error
            message = f"it is unknown whether {name} was created, and it is not there: "
            raise _Absent(message + created.cause, created.cause) from error
        request.received(found.data)
        return _CLAIMED if found.data == data else Taken(found.data, is_first_owner)

    async def get(self, name: str) -> StoredObject:
        """Read the whole object."""
        request = self.counts.begin(Operation.GET, name)
        found = await self._repeat(request, self._store.get, name, is_read=True)
        request.received(found.data)
        return found

    async def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Read a part of an object: see `ObjectStore.get_range`."""
        request = self.counts.begin(Operation.GET_RANGE, name)
        get_range = self._store.get_range
        data = await self._repeat(request, get_range, name, offset, length, is_read=True)
        request.received(data)
        return data

    @property
    def reads_now(self) -> bool:
        """Return whether `get_range_now` may return bytes."""
        return self._store.reads_now

    def get_range_now(self, name: str, offset: int, length: int) -> bytes | None:
        """Read a part of an object if that takes no waiting: see `ObjectStore.get_range_now`."""
        data = self._store.get_range_now(name, offset, length)
        if data is not None:
            count = self.counts.of(Operation.GET_RANGE, name)
            count.requests += 1
            count.received(data)
        return data

    async def head(self, name: str) -> ObjectInfo:
        """Read the size and the time of an object."""
        request = self.counts.begin(Operation.HEAD, name)
        info = await self._repeat(request, self._store.head, name, is_read=True)
        request.count.objects += 1
        return info

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """List as `ObjectStore.list`; after a failure, continue behind the last yielded object."""
        counted = self.counts.begin(Operation.LIST, prefix)
        refused_until_ms = self.refusals.until_ms()
        failed_attempts = unanswered = 0
        while True:
            request = self.reachability.begin()
            try:
                with counted:
                    async for info in self._store.list(prefix, start_after=start_after):
                        if failed_attempts:
                            refused_until_ms = self.refusals.until_ms()
                            failed_attempts = unanswered = 0
                        counted.count.objects += 1
                        self.reachability.succeed()
                        start_after = info.name
                        counted.suspend()
                        try:
                            yield info
                        finally:
                            counted.resume()
                self.reachability.succeed()
                self.refusals.accepted()
                return
            except (StoreUnavailable, StoreRefused) as error:
                self.reachability.fail(request, error)
                failed_attempts += 1
                unanswered += isinstance(error, StoreUnavailable)
                if not self._may_repeat(error, unanswered, refused_until_ms):
                    raise
                log_retry(failed_attempts, error)
            except StoreBroken as error:
                self.reachability.fail(request, error)
                raise
            finally:
                self.reachability.end(request)
            await self.pause(failed_attempts)

    async def delete(self, names: Iterable[str]) -> None:
        """Delete objects: see `ObjectStore.delete`."""
        doomed = tuple(names)
        request = self.counts.begin_many(Operation.DELETE, doomed)
        request.count.objects += len(doomed)
        await self._repeat(request, self._store.delete, doomed)

    async def now_ms(self) -> int:
        """Read the store's own clock: milliseconds since the Unix epoch."""
        return await self._repeat(self.counts.begin(Operation.NOW_MS), self._store.now_ms)

    async def repair(self, is_collected: IsCollected = nothing_is_collected) -> Repaired:
        """Complete creates that crashed half-way, and log it: see `ObjectStore.repair`."""
        request = self.counts.begin(Operation.REPAIR)
        repaired = await self._repeat(request, self._store.repair, is_collected)
        request.count.objects += repaired.completed
        if repaired != Repaired():
            log.info("creates recovered", url=self.url, **asdict(repaired))
        return repaired

    async def pause(self, failed_attempts: int) -> None:
        """Wait before the next attempt; `failed_attempts` is at least 1."""
        wait_ms = self.backoff.wait_ms(failed_attempts, self.runtime.random)
        await self.runtime.clock.sleep_ms(wait_ms)

    async def _repeat(
        self,
        request: CountedRequest,
        send: Callable[[*Ts], Awaitable[T]],
        *arguments: *Ts,
        is_read: bool = False,
    ) -> T:
        """Send a request until it succeeds; raise the error that ends it."""
        refused_until_ms = self.refusals.until_ms()
        failed_attempts = unanswered = 0
        while True:
            try:
                answer = await self._send(request, send, *arguments, is_read=is_read)
            except ObjectNotFound:
                self.refusals.accepted()
                raise
            except (StoreUnavailable, StoreRefused) as error:
                failed_attempts += 1
                unanswered += isinstance(error, StoreUnavailable)
                if not self._may_repeat(error, unanswered, refused_until_ms):
                    raise
                log_retry(failed_attempts, error)
            else:
                self.refusals.accepted()
                return answer
            await self.pause(failed_attempts)

    def _may_repeat(
        self, error: StoreUnavailable | StoreRefused, unanswered: int, refused_until_ms: float
    ) -> bool:
        """Return whether to repeat a request of which `unanswered` attempts had no answer."""
        if isinstance(error, StoreUnavailable):
            return unanswered < self.settings.read_attempts
        return not self.refusals.is_final(error, refused_until_ms)

    async def _send(
        self,
        request: CountedRequest,
        send: Callable[[*Ts], Awaitable[T]],
        *arguments: *Ts,
        is_read: bool,
    ) -> T:
        """Send a request once; record in `reachability` whether a read was answered."""
        if not is_read:
            with request:
                return await send(*arguments)
        number = self.reachability.begin()
        try:
            with request:
                answer = await send(*arguments)
        except ObjectNotFound:
            self.reachability.succeed()
            raise
        except (StoreUnavailable, StoreBroken, StoreRefused) as error:
            self.reachability.fail(number, error)
            raise
        else:
            self.reachability.succeed()
            return answer
        finally:
            self.reachability.end(number)


def log_retry(failed_attempts: int, error: BaseException) -> None:
    """Log that a request is repeated, and why.

    Only the attempts that are powers of two are logged, so that a long outage fills no log.
    """
    if failed_attempts & (failed_attempts - 1):  # no power of two
        return
    log.warning("store request repeated", failed_attempts=failed_attempts, error=str(error))
