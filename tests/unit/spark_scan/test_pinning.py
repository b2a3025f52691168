"""Resources that a driver keeps while others work: snapshots, and results of asynchronous work."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import traceback
from collections.abc import AsyncGenerator
from concurrent.futures import Future

import pytest

from shalekv.errors import InvalidSetting, SnapshotNotFound, StoreUnavailable
from shalekv_spark.bridge import AHEAD, iterate, run
from shalekv_spark.place import Place
from shalekv_spark.scanning import pinning
from shalekv_spark.scanning.pinning import PinnedSnapshot, pin, pinned_snapshots
from shalekv_spark.scanning.view import SnapshotPin

PLACE = Place("file:///nowhere")
SOON_S = 20.0


class Keeping:
    """A fake of the store: the results of renewals, one after the other, and removed snapshots."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Exception | None) -> None:
        self.answers = [*answers]
        self.is_answered = threading.Event()
        self.removed: list[bytes] = []
        monkeypatch.setattr(pinning, "_renew", self._renew)
        monkeypatch.setattr(pinning, "_remove", self._remove)

    async def _renew(self, place: Place, pinned: SnapshotPin) -> None:
        assert (place, pinned.ttl_s) == (PLACE, 1)
        answer = self.answers.pop(0) if self.answers else None
        if not self.answers:
            self.is_answered.set()
        if answer is not None:
            raise answer

    async def _remove(self, place: Place, pinned: SnapshotPin) -> None:
        assert place == PLACE
        self.removed.append(pinned.snapshot_id)


def pinned_now() -> PinnedSnapshot:
    """Make a snapshot that has to be renewed three times in a second."""
    return PinnedSnapshot(PLACE, SnapshotPin(b"p" * 16, 7, "p", 1))


@pytest.mark.parametrize(
    "error",
    [StoreUnavailable("file:", "list", "manifest", "no answer"), OSError("too many open files")],
)
def test_a_renewal_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A failed renewal is tried again after any error; in the end the snapshot is removed."""
    keeping = Keeping(monkeypatch, error, None, None)
    with pinned_now() as pinned:
        assert keeping.is_answered.wait(SOON_S)
        assert pinned in pinned_snapshots()
    assert keeping.removed == [b"p" * 16]
    assert pinned.is_released
    assert pinned not in pinned_snapshots()


def test_a_snapshot_that_is_gone_is_not_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that is gone is not renewed, and nothing waits for it."""
    Keeping(monkeypatch, SnapshotNotFound("gone"))
    pinned = pinned_now()
    pinned._thread.join(SOON_S)  # noqa: SLF001 - what `release` waits for
    assert pinned.is_released


def test_a_snapshot_is_kept_if_its_use_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is kept until the end of the process if it is not known whether it is needed."""
    keeping = Keeping(monkeypatch, None, None)

    def unknown() -> bool:
        raise RuntimeError("who knows")

    with pinned_now() as pinned:
        pinned.keep_while(unknown)
        assert keeping.is_answered.wait(SOON_S)
        assert not keeping.removed
    assert keeping.removed


@pytest.mark.parametrize("ttl_s", [0, 10**10])
def test_a_life_that_makes_no_sense_is_refused(ttl_s: int) -> None:
    """An invalid time to live is refused before any request to a store."""
    with pytest.raises(InvalidSetting, match="snapshot_ttl_s"):
        pin("file:///nowhere", ttl_s=ttl_s)


class Counting:
    """A generator of numbers, and how it ended."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count = count
        self.error = error
        self.made = 0
        self.is_closed = False

    async def numbers(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.count):
                self.made += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            await asyncio.to_thread(threading.get_ident)
            self.is_closed = True


@pytest.mark.parametrize("taken", [1, 2, 50])
def test_closing_closes_what_makes_the_results(taken: int) -> None:
    """Closing the iterator closes the generator at any point, and leaves no thread."""
    counting, before = Counting(100), {*threading.enumerate()}
    results = iterate(counting.numbers)
    assert [next(results) for _ in range(taken)] == [*range(taken)]
    results.close()  # type: ignore[attr-defined] # it is a generator
    assert counting.is_closed
    assert counting.made <= taken + AHEAD + 1
    assert {*threading.enumerate()} <= before  # a thread of an earlier test may have ended


def test_results_end_with_the_error_that_ended_them() -> None:
    """An error is raised after the results before it."""
    assert [*iterate(Counting(5).numbers)] == [*range(5)]
    counting = Counting(5, OSError("the disk is gone"))
    results = iterate(counting.numbers)
    assert [next(results) for _ in range(5)] == [*range(5)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)
    assert counting.is_closed


async def test_a_loop_may_be_running() -> None:
    """`run` works where a loop is running, as in a notebook."""
    assert run(asyncio.to_thread(len, "done")) == 4
    assert [*iterate(Counting(3).numbers)] == [0, 1, 2]


def waits_for_a_result(thread_id: int) -> bool:
    frames = traceback.walk_stack(sys._current_frames()[thread_id])  # noqa: SLF001 - no other way
    return any(frame.f_code is Future.result.__code__ for frame, _ in frames)


def test_work_that_nobody_waits_for_any_more_is_ended() -> None:
    """Interrupted work, as by Ctrl-C, is cancelled, closes what it has open, and leaves no
    thread.
    """
    before, ended, main = {*threading.enumerate()}, threading.Event(), threading.get_ident()

    async def work() -> None:
        try:
            while not waits_for_a_result(main):
                pass
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        run(work())
    assert ended.is_set()
    assert {*threading.enumerate()} <= before  # a thread of an earlier test may have ended
