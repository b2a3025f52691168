"""Objects for the checks of a store, under names of their own; all are deleted at the end.

They are in one folder beside those of the database, which no role reads. Each name begins with a
number that is drawn for the run, so that several processes can verify one store at once. Some
checks need an object in a folder of the database: its name is none that a database uses, so that
the collector deletes it if the check could not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from shalekv.errors import StoreError, StoreRefused, StoreUnavailable
from shalekv.format.names import VERIFY_FOLDER, parse_temporary_name
from shalekv.protocol.manifest import CasMode
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.api import (
    NO_METADATA,
    Created,
    CreateOutcome,
    ObjectInfo,
    ObjectStore,
    Unknown,
)
from shalekv.store.cas import CasStore
from shalekv.store.two_phase.store import TwoPhaseStore

T = TypeVar("T")

# Called before each wait with the number of failed attempts and the error of the last one.
RetryListener = Callable[[int, StoreError], None]

OWN = "verify-"  # prefix of the names, by which they are recognised in any folder
RANDOM_BITS = 64  # in the names of a run
PARALLEL_CREATES = 32  # where many objects are needed


class StoreViolation(Exception):
    """The store does not fulfil the requirement of a check."""

    def __init__(self, operation: str, name: str, problem: str) -> None:
        super().__init__(f"{operation} {name}: {problem}")
        self.operation = operation
        self.name = name
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Effort:
    """Extent of the checks."""

    racers: int = 8  # creates of one name at once
    rounds: int = 50  # races, each for another name
    large_object_bytes: int = 64 << 20
    create_attempts: int | None = 8  # attempts while the store does not answer; None: no limit


class Scratch:
    """Names for the objects of checks, and the stores on which they run.

    The stores are *views* of one database. The parameter `at` of methods and checks is the number
    of the view that sends the request, modulo their count.
    """

    def __init__(
        self,
        stores: Sequence[ObjectStore],
        runtime: Runtime,
        settings: StoreSettings,
        effort: Effort,
        listener: RetryListener = lambda _failed_attempts, _error: None,
    ) -> None:
        """`stores` have connections of their own where possible.

        `listener` is called for creates that are repeated.
        """
        self.stores = stores
        self.runtime = runtime
        self.effort = effort
        self.own = f"{OWN}{runtime.random.getrandbits(RANDOM_BITS):016x}-"
        self._readers = [CasStore(store, runtime, settings) for store in stores]
        self._listener = listener
        self._names: list[str] = []

    def reader(self, number: int) -> CasStore:
        """Return one of the views, with retries of reads; `number` is taken modulo their count."""
        return self._readers[number % len(self._readers)]

    def name(self, label: str, *, folder: str = VERIFY_FOLDER) -> str:
        """Return a new name, which is deleted at the end. REQUIRES: `label` was not used before."""
        name = f"{folder}{self.own}{label}"
        self._names.append(name)
        return name

    async def create_until_answered(
        self,
        name: str,
        data: bytes,
        metadata: Mapping[str, str] = NO_METADATA,
        *,
        at: int = 0,
    ) -> tuple[CreateOutcome, bool]:
        """Create an object, retrying until the store answers.

        Returns the outcome, and whether the first attempt was answered. If it was not, `Exists` may
        mean our own object, and an attempt may still take effect after a delete.
        """
        store, cas = self.stores[at % len(self.stores)], self.reader(at)
        refused_until_ms = cas.refusals.until_ms()
        failed_attempts, is_first = 0, True
        while True:
            failure: StoreError
            try:
                outcome = await store.create(name, data, metadata)
                if not isinstance(outcome, Unknown):
                    return outcome, is_first
                is_first = False
                failure = StoreUnavailable(store.url, "create", name, outcome.cause)
            except (StoreUnavailable, StoreRefused) as error:
                failure = error
            failed_attempts += 1
            is_last = failed_attempts == self.effort.create_attempts
            if isinstance(failure, StoreRefused):
                is_last = cas.refusals.is_final(failure, refused_until_ms)
            if is_last:
                raise failure
            self._listener(failed_attempts, failure)
            await cas.pause(failed_attempts)

    async def create_new(
        self,
        label: str,
        data: bytes,
        metadata: Mapping[str, str] = NO_METADATA,
        *,
        at: int = 0,
        folder: str = VERIFY_FOLDER,
    ) -> str:
        """Create an object; return its name, of which no create can be in flight any more."""
        attempt = 0
        while True:
            name = self.name(f"{label}~{attempt}" if attempt else label, folder=folder)
            outcome, is_first = await self.create_until_answered(name, data, metadata, at=at)
            if is_first and isinstance(outcome, Created):
                return name
            if is_first:
                raise StoreViolation(
                    "create", name, "says that an object exists which was never created"
                )
            attempt += 1

    async def create_many(self, names: Sequence[str]) -> None:
        """Create an object for each of these names, which come from `name`, some at a time."""
        for first in range(0, len(names), PARALLEL_CREATES):
            some = names[first : first + PARALLEL_CREATES]
            await all_of([self._put(name, at) for at, name in enumerate(some)])

    async def _put(self, name: str, at: int) -> None:
        store = self.stores[at % len(self.stores)]
        if isinstance(store, TwoPhaseStore):  # one request is enough: other checks cover races
            await store.plain.put(name, name.encode())
        else:
            await self.create_until_answered(name, name.encode(), at=at)

    async def list_own(
        self, label: str = "", *, at: int = 0, start_after: str = "", folder: str = VERIFY_FOLDER
    ) -> list[ObjectInfo]:
        """List the objects of this run whose label begins with `label`, in the store's order."""
        own = f"{folder}{self.own}{label}"
        before = own[:-1]  # the name of an object may be the label itself
        found = self.reader(at).list(folder, start_after=start_after or before)
        return [
            info
            async for info in found
            if info.name.startswith(own) and parse_temporary_name(info.name) is None
        ]

    async def clear(self) -> Sequence[str]:
        """Delete all objects of this run; return the names of those that may still exist."""
        if not self._names:
            return []
        try:
            await self.delete_all()
            # Objects of cancelled creates that ended only now, and temporary two-phase objects.
            late = await self._remaining()
            if late:
                await self.reader(0).delete(late)
                late = await self._remaining()
        except StoreError:
            return self._names
        else:
            return late

    async def delete_all(self) -> None:
        """Delete all objects of this run. Raises the errors of the store."""
        await self.reader(0).delete(self._names)
        if self.stores[0].cas_mode is CasMode.TWO_PHASE:  # its records outlive the objects
            await self.reader(0).repair(lambda name: name.partition("/")[2].startswith(self.own))

    async def _remaining(self) -> list[str]:
        folders = sorted({f"{name.partition('/')[0]}/" for name in self._names})
        return [
            info.name
            for folder in folders
            async for info in self.reader(0).list(folder, start_after=f"{folder}{OWN}")
            if info.name.startswith(f"{folder}{self.own}")
        ]


async def all_of(requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run requests in parallel and return their results; raise the first error when all have ended.

    No request is left in flight, since it might create an object after all were deleted.
    """
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


@asynccontextmanager
async def stores_of(
    open_one: Callable[[], ObjectStore], count: int
) -> AsyncIterator[list[ObjectStore]]:
    """Open `count` views of one database; close them at the end."""
    stores: list[ObjectStore] = []
    try:
        stores.extend(open_one() for _ in range(count))
        yield stores
    finally:
        for store in stores:
            await store.close()
