"""Snapshots that this process keeps: each is renewed in a thread as long as it is needed.

A read of a snapshot that has expired fails, so each snapshot is renewed long before. It is removed
when it is not needed any more, and at the end of the process. If the process is killed, it expires.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import structlog

from shalekv.errors import InvalidSetting, SnapshotNotFound
from shalekv_spark.bridge import run
from shalekv_spark.place import Place
from shalekv_spark.scanning.view import TTL_S_MAX, SnapshotPin, pin_new, remove_pin, renew_pin

TTL_S = 300
_RENEW_SHARE = 3  # a snapshot is renewed after this part (1/3) of its time to live
_RETRY_SHARE = 10  # the same after a failed renewal
_CHECK_S = 5.0  # at least so often it is checked whether a snapshot is still needed
_END_S = 30.0  # how long the end of the process waits for a snapshot to be removed

log = structlog.get_logger()


class PinnedSnapshot:
    """A snapshot of a database, for any number of reads: all see the same state.

        with pin("s3://bucket/db") as pinned:
            users = scan(spark, "s3://bucket/db", prefix="user/", snapshot=pinned)
            orders = scan(spark, "s3://bucket/db", prefix="order/", snapshot=pinned)
            ... actions ...

    `snapshot_id` (16 bytes) is the argument of reads through a server. `seq` is the last commit
    that the snapshot includes: the change feed continues behind it.
    """

    def __init__(self, place: Place, made: SnapshotPin) -> None:
        """Keep a snapshot that was created just now."""
        self.place = place
        self.snapshot_id = made.snapshot_id
        self.seq = made.seq
        self._pin = made
        self.needed: Callable[[], bool] = lambda: True
        self._ended = threading.Event()
        name = f"shalekv-pin-{made.snapshot_id.hex()[:8]}"
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
        self._thread.start()
        _kept.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def is_released(self) -> bool:
        """Return whether the snapshot is not renewed any more."""
        return not self._thread.is_alive()

    def keep_while(self, needed: Callable[[], bool]) -> None:
        """Remove the snapshot as soon as `needed`, which is called repeatedly, returns False."""
        self.needed = needed

    def release(self, *, within_s: float = _END_S) -> None:
        """Remove the snapshot; later reads of it fail. A second call is harmless.

        Returns after `within_s` seconds at the latest, however slow the store is.
        """
        self._ended.set()
        self._thread.join(within_s)

    def end(self) -> None:
        """Begin to remove the snapshot, without waiting."""
        self._ended.set()

    def _keep(self) -> None:
        try:
            self._renew()
            self._remove()
        finally:
            _kept.discard(self)

    def _renew(self) -> None:
        """Renew the snapshot until it is not needed any more, or gone."""
        ttl_s = self._pin.ttl_s
        renew_at = time.monotonic() + ttl_s / _RENEW_SHARE
        while not self._ended.wait(min(_CHECK_S, ttl_s / _RETRY_SHARE)):
            if not self._is_needed():
                return
            if time.monotonic() < renew_at:
                continue
            began = time.monotonic()
            try:
                run(_renew(self.place, self._pin))
                renew_at = began + ttl_s / _RENEW_SHARE
            except SnapshotNotFound as error:
                log.warning("a snapshot that is read is gone", error=str(error))
                return
            except Exception as error:  # noqa: BLE001 - of any kind: it is tried at the next check
                log.warning("snapshot not renewed", error=str(error))

    def _is_needed(self) -> bool:
        """Return whether the snapshot is needed; True if that is not known."""
        try:
            return self.needed()
        except Exception as error:  # noqa: BLE001 - whatever it is, the snapshot may be read
            log.warning("it is not known whether a snapshot is needed", error=str(error))
            return True

    def _remove(self) -> None:
        try:
            run(_remove(self.place, self._pin))
        except SnapshotNotFound:
            pass
        except Exception as error:  # noqa: BLE001 - nothing more can be done
            log.warning("snapshot not removed: it will expire", error=str(error))


def pin(
    url: str, *, store: Mapping[str, object] | None = None, ttl_s: int = TTL_S
) -> PinnedSnapshot:
    """Keep the current state of a database until it is released, or this process ends.

    `ttl_s` is the lifetime of the snapshot without a renewal, seconds: so long it outlives this
    process if that is killed. Raises `InvalidSetting`, `InvalidUrl`, and as `pin_new` does.
    """
    return pin_at(Place.of(url, store), ttl_s=ttl_s)


def pin_at(place: Place, *, ttl_s: int) -> PinnedSnapshot:
    """Do the same as `pin`, for a place."""
    if not 1 <= ttl_s <= TTL_S_MAX:
        raise InvalidSetting(f"snapshot_ttl_s: expected 1 to {TTL_S_MAX} seconds, found {ttl_s}")
    return PinnedSnapshot(place, run(_create(place, ttl_s)))


def pinned_snapshots() -> list[PinnedSnapshot]:
    """Return all snapshots that this process keeps."""
    return [*_kept]


async def _create(place: Place, ttl_s: int) -> SnapshotPin:
    async with place.open() as store:
        return await pin_new(store, ttl_s=ttl_s)


async def _renew(place: Place, pinned: SnapshotPin) -> None:
    async with place.open() as store:
        await renew_pin(store, pinned)


async def _remove(place: Place, pinned: SnapshotPin) -> None:
    async with place.open() as store:
        await remove_pin(store, pinned)


_kept: set[PinnedSnapshot] = set()
_owner_pid = os.getpid()


def _release_all() -> None:
    """Remove all snapshots that are left at the end of the process, concurrently."""
    if os.getpid() != _owner_pid:
        return  # a fork: the snapshots belong to the parent
    left = pinned_snapshots()
    for each in left:
        each.end()
    until = time.monotonic() + _END_S
    for each in left:
        each.release(within_s=max(until - time.monotonic(), 0.0))


# At `atexit` it would be too late: threads refuse new work then, and requests need them.
threading._register_atexit(_release_all)  # type: ignore[attr-defined] # noqa: SLF001 - as it says
