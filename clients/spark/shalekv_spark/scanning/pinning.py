"""Snapshots that this process keeps: renewed in a thread for as long as somebody needs them.

Whoever reads a snapshot beyond its time to live would find that it is gone, and an error; so it is
renewed long before. It is removed when nobody needs it any more, and at the end of the process; if
that is killed, the snapshot expires.
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
_RENEW_SHARE = 3  # of its time to live, after which it is renewed
_RETRY_SHARE = 10  # the same after a renewal that failed
_LOOK_S = 5.0  # so often it is asked whether it is still needed, or more often
_END_S = 30.0  # so long the end of the process waits for a snapshot to be removed

log = structlog.get_logger()


class PinnedSnapshot:
    """A snapshot of a database, for as many reads as one likes: all see the same state.

        with pin("s3://bucket/db") as pinned:
            users = scan(spark, "s3://bucket/db", prefix="user/", snapshot=pinned)
            orders = scan(spark, "s3://bucket/db", prefix="order/", snapshot=pinned)
            ... actions ...

    `snapshot_id` (16 bytes) is what reads through a server take, `seq` the last commit that it
    shows: the change feed goes on behind it.
    """

    def __init__(self, place: Place, made: SnapshotPin) -> None:
        """Of a snapshot that was made just now."""
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
        """Whether nobody renews it any more."""
        return not self._thread.is_alive()

    def keep_while(self, needed: Callable[[], bool]) -> None:
        """Remove the snapshot as soon as `needed`, which is asked again and again, says no."""
        self.needed = needed

    def release(self, *, within_s: float = _END_S) -> None:
        """Remove the snapshot: what reads it from now on fails. Harmless when repeated.

        Returns after `within_s` seconds at the latest, however slow the store is.
        """
        self._ended.set()
        self._thread.join(within_s)

    def end(self) -> None:
        """Begin to remove it, and don't wait."""
        self._ended.set()

    def _keep(self) -> None:
        try:
            self._renew()
            self._remove()
        finally:
            _kept.discard(self)

    def _renew(self) -> None:
        """Returns when it is not needed any more, or gone."""
        ttl_s = self._pin.ttl_s
        renew_at = time.monotonic() + ttl_s / _RENEW_SHARE
        while not self._ended.wait(min(_LOOK_S, ttl_s / _RETRY_SHARE)):
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
            except Exception as error:  # noqa: BLE001 - of any kind: it is tried at the next look
                log.warning("snapshot not renewed", error=str(error))

    def _is_needed(self) -> bool:
        """Whether it is, or nobody can tell."""
        try:
            return self.needed()
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody may be reading
            log.warning("it is not known whether a snapshot is needed", error=str(error))
            return True

    def _remove(self) -> None:
        try:
            run(_remove(self.place, self._pin))
        except SnapshotNotFound:
            pass
        except Exception as error:  # noqa: BLE001 - nobody is left who could do more
            log.warning("snapshot not removed: it will expire", error=str(error))


def pin(
    url: str, *, store: Mapping[str, object] | None = None, ttl_s: int = TTL_S
) -> PinnedSnapshot:
    """Keep the current state of a database until it is released, or this process ends.

    `ttl_s` is how long it is kept without a renewal, seconds: that many it outlives this process if
    that is killed. Raises `InvalidSetting`, `InvalidUrl`, and as `pin_new` does.
    """
    return pin_at(Place.of(url, store), ttl_s=ttl_s)


def pin_at(place: Place, *, ttl_s: int) -> PinnedSnapshot:
    """The same, at a place."""
    if not 1 <= ttl_s <= TTL_S_MAX:
        raise InvalidSetting(f"snapshot_ttl_s: expected 1 to {TTL_S_MAX} seconds, found {ttl_s}")
    return PinnedSnapshot(place, run(_create(place, ttl_s)))


def pinned_snapshots() -> list[PinnedSnapshot]:
    """All that this process keeps."""
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
    """Remove what is left at the end of the process, all at once."""
    if os.getpid() != _owner_pid:
        return  # a fork: the snapshots are the parent's
    left = pinned_snapshots()
    for each in left:
        each.end()
    until = time.monotonic() + _END_S
    for each in left:
        each.release(within_s=max(until - time.monotonic(), 0.0))


# At `atexit` it would be too late: threads refuse new work then, and requests need them.
threading._register_atexit(_release_all)  # type: ignore[attr-defined] # noqa: SLF001 - as it says
