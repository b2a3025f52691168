"""Tries each kind of request once, on one small object: which of them the credentials allow.

It is a short form of the checks of `verify`, which says more about whether a store is fit. Each
request is sent once, so that a refusal shows at once.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass

from shalekv.errors import ObjectNotFound, StoreError, StoreUnavailable
from shalekv.format.names import VERIFY_FOLDER
from shalekv.protocol.manifest import CasMode
from shalekv.runtime import Runtime
from shalekv.store.api import Created, Exists, ObjectStore, Unknown
from shalekv.store.verify.scratch import OWN, RANDOM_BITS

PROBE = b"shalekv doctor"


class TrialOutcome(enum.Enum):
    """The outcome of a request that was tried."""

    DONE = "done"
    REFUSED = "refused"
    UNANSWERED = "unanswered"
    UNFIT = "unfit"  # it does not do what a database needs


@dataclass(frozen=True, slots=True)
class Trial:
    """A request that was tried: ``list``, ``get``, ``put``, ``put if absent`` or ``delete``."""

    operation: str
    outcome: TrialOutcome
    detail: str = ""  # of a failure: the error


async def try_all(store: ObjectStore, runtime: Runtime, *, may_write: bool) -> AsyncIterator[Trial]:
    """Try what a reader needs, and then, if the store answers, what a writer needs.

    Writes are about one object in the folder of `store verify`, which is deleted. Without
    `may_write` nothing is written.
    """
    listed = await _tried("list", _list(store))
    yield listed
    if listed.outcome is TrialOutcome.UNANSWERED:
        return
    yield await _tried("get", _get_missing(store, f"{VERIFY_FOLDER}{OWN}missing"))

    if not may_write:
        return
    name = f"{VERIFY_FOLDER}{OWN}{runtime.random.getrandbits(RANDOM_BITS):016x}-doctor"
    created = await _tried("put", _create(store, name))
    yield created
    if created.outcome is not TrialOutcome.DONE:
        return
    yield await _tried("put if absent", _create_again(store, name))
    yield await _tried("read back", _read_back(store, name))
    deleted = await _tried("delete", _delete(store, name))
    if deleted.outcome is TrialOutcome.DONE:
        yield deleted
        yield await _tried("read after delete", _gone(store, name))
    else:
        detail = f"{deleted.detail}. {name} is left behind"
        yield Trial(deleted.operation, deleted.outcome, detail)


class _Unfit(Exception):
    """The request does not do what it must."""


async def _tried(operation: str, request: Awaitable[None]) -> Trial:
    try:
        await request
    except _Unfit as unfit:
        return Trial(operation, TrialOutcome.UNFIT, str(unfit))
    except StoreUnavailable as error:
        return Trial(operation, TrialOutcome.UNANSWERED, str(error))
    except StoreError as error:
        return Trial(operation, TrialOutcome.REFUSED, str(error))
    return Trial(operation, TrialOutcome.DONE)


async def _list(store: ObjectStore) -> None:
    async for _ in store.list(VERIFY_FOLDER):
        return


async def _get_missing(store: ObjectStore, name: str) -> None:
    try:
        await store.get(name)
    except ObjectNotFound:
        return


async def _create(store: ObjectStore, name: str) -> None:
    match await store.create(name, PROBE):
        case Created():
            return
        case Exists():
            raise _Unfit("it says that an object exists which was never created")
        case Unknown(cause):
            raise StoreUnavailable(store.url, "create", name, cause)


async def _create_again(store: ObjectStore, name: str) -> None:
    match await store.create(name, PROBE[::-1]):
        case Exists():
            return
        case Created():
            raise _Unfit("it replaced an object although that existed")
        case Unknown(cause):
            raise StoreUnavailable(store.url, "create", name, cause)


async def _read_back(store: ObjectStore, name: str) -> None:
    if (await store.get(name)).data != PROBE:
        raise _Unfit("the object has other bytes than were written")


async def _delete(store: ObjectStore, name: str) -> None:
    await store.delete([name])
    if store.cas_mode is CasMode.TWO_PHASE:  # its record outlives the object
        await store.repair(lambda found: found == name)


async def _gone(store: ObjectStore, name: str) -> None:
    try:
        await store.get(name)
    except ObjectNotFound:
        return
    raise _Unfit("the object is still there")
