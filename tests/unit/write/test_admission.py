"""Back-pressure: bounds, order, and bytes that are always released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from shalekv.errors import MemtableFull, QueueFull, Stopping
from shalekv.settings import WriterSettings
from shalekv.write.admission import RETRY_AFTER_MS, Admission
from tests.kit.engine.running_log import quiesce
from tests.kit.virtual_time import virtual_time

QUEUED_MAX = 1 << 20
WAITING_MAX = 1_000
MEMTABLE_MAX = 4 << 20


def admission_of(memtable_bytes: Callable[[], int] = lambda: 0, **changes: int) -> Admission:
    limits = {
        "queued_bytes_max": QUEUED_MAX,
        "admission_waiting_bytes_max": WAITING_MAX,
        "memtable_bytes_max": MEMTABLE_MAX,
        "admission_timeout_ms": 1_000,
    }
    bounds = WriterSettings.model_validate(limits | changes)
    return Admission(bounds, memtable_bytes=memtable_bytes)


def full_admission(*, admission_timeout_ms: int = 1_000) -> Admission:
    """An admission whose queue is full to the last byte."""
    admission = admission_of(admission_timeout_ms=admission_timeout_ms)
    assert admission.try_admit(QUEUED_MAX)
    return admission


async def admit(admission: Admission, size_bytes: int) -> None:
    if not admission.try_admit(size_bytes):
        await admission.wait(size_bytes)


@virtual_time(10)
async def test_memtable_is_full_at_its_bound() -> None:
    """Queue and memtable together hold `memtable_bytes_max`; beyond it writes wait."""
    admission = admission_of(lambda: MEMTABLE_MAX - 100)
    assert admission.try_admit(60)
    assert not admission.try_admit(41)
    with pytest.raises(MemtableFull, match="not compacted") as caught:
        await admission.wait(41)
    assert caught.value.retry_after_ms == RETRY_AFTER_MS
    assert admission.try_admit(40)
    assert (admission.queued_bytes, admission.waiting_bytes) == (100, 0)


def test_write_larger_than_the_memtable_is_refused_at_once() -> None:
    """A write that can never fit does not wait."""
    admission = admission_of()
    with pytest.raises(MemtableFull):
        admission.try_admit(MEMTABLE_MAX + 1)


async def test_shrinking_memtable_admits_waiting_writes() -> None:
    """Writes that wait for memory are admitted at once when compaction frees it."""
    held = [MEMTABLE_MAX]
    admission = admission_of(lambda: held[0])
    assert not admission.try_admit(1)
    waiting = asyncio.create_task(admission.wait(1))
    await quiesce()
    held[0] = 0
    admission.admit_waiting()
    await waiting
    assert admission.queued_bytes == 1


@virtual_time(10)
async def test_full_memtable_refuses_waiting_writes() -> None:
    """A write that waited for the queue is refused if the memtable has filled up meanwhile."""
    held = [0]
    admission = admission_of(lambda: held[0])
    assert admission.try_admit(QUEUED_MAX)
    waiting = asyncio.create_task(admission.wait(10))
    await quiesce()
    held[0] = MEMTABLE_MAX
    admission.release(QUEUED_MAX)
    with pytest.raises(MemtableFull):
        await waiting
    assert (admission.queued_bytes, admission.waiting_bytes) == (0, 0)


async def test_waiting_bytes_are_bounded() -> None:
    """A write beyond `admission_waiting_bytes_max` is refused at once, with a retry delay."""
    admission = full_admission()
    first = asyncio.create_task(admission.wait(WAITING_MAX - 1))
    last = asyncio.create_task(admission.wait(1))
    await quiesce()
    with pytest.raises(QueueFull, match="1000 bytes wait already") as caught:
        await admission.wait(1)
    assert caught.value.retry_after_ms == RETRY_AFTER_MS
    admission.release(QUEUED_MAX)
    await asyncio.gather(first, last)
    assert (admission.queued_bytes, admission.waiting_bytes) == (WAITING_MAX, 0)


@virtual_time(10)
async def test_wait_ends_after_its_time() -> None:
    """A write waits for `admission_timeout_ms` and is then refused; its place goes to the next."""
    loop = asyncio.get_running_loop()
    admission = full_admission(admission_timeout_ms=500)
    began = loop.time()
    with pytest.raises(QueueFull, match="no room within 500 ms"):
        await admission.wait(10)
    assert loop.time() - began == pytest.approx(0.5)
    assert admission.waiting_bytes == 0
    admission.release(QUEUED_MAX)
    assert admission.try_admit(QUEUED_MAX)


@virtual_time(10)
async def test_space_granted_at_a_timeout_is_not_lost() -> None:
    """Space granted at the moment of a timeout is used or returned."""
    admission = full_admission(admission_timeout_ms=500)
    asyncio.get_running_loop().call_later(0.5, admission.release, QUEUED_MAX)
    (refusal,) = await asyncio.gather(admission.wait(10), return_exceptions=True)
    assert refusal is None or isinstance(refusal, QueueFull)
    await quiesce()
    assert admission.queued_bytes == (10 if refusal is None else 0)
    assert admission.waiting_bytes == 0


def test_error_that_is_raised_often_does_not_grow() -> None:
    """The error of a closed admission keeps no frames of the callers that it is raised to."""
    admission = admission_of()
    reason = Stopping("closed")
    admission.close(reason)
    depths = set()
    for _ in range(5):
        with pytest.raises(Stopping) as caught:
            admission.try_admit(1)
        depths.add(len(caught.traceback))
    assert len(depths) == 1


class AdmissionMachine(RuleBasedStateMachine):
    """Writes arrive, give up and end in any order, several of these within one step of the loop.

    The model is a queue and a number of bytes, without tasks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.admission = admission_of(
            admission_waiting_bytes_max=1 << 30, admission_timeout_ms=600_000
        )
        self.tasks: dict[asyncio.Task[None], int] = {}
        self.line: list[asyncio.Task[None]] = []
        self.inside: list[asyncio.Task[None]] = []
        self.closed = False
        self.is_quiet = True

    @rule(size_bytes=st.sampled_from([1, QUEUED_MAX // 3, QUEUED_MAX // 2, QUEUED_MAX + 1]))
    def come(self, size_bytes: int) -> None:
        if self.closed:
            return
        task = self.loop.create_task(admit(self.admission, size_bytes))
        self.tasks[task] = size_bytes
        self.line.append(task)
        self.turn()
        self.model_admits()

    @precondition(lambda self: bool(self.line))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.line), label="who")
        self.line.remove(task)
        task.cancel()
        self.model_admits()

    @precondition(lambda self: any(not task.done() for task in self.inside))
    @rule(data=st.data())
    def give_up_when_let_in(self, data: st.DataObject) -> None:
        """Cancel a write after it was admitted, and before its task has run."""
        task = data.draw(st.sampled_from([t for t in self.inside if not t.done()]), label="who")
        self.inside.remove(task)
        task.cancel()
        self.model_admits()

    @precondition(lambda self: any(task.done() for task in self.inside))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from([t for t in self.inside if t.done()]), label="who")
        self.inside.remove(task)
        self.is_quiet = False
        self.admission.release(self.tasks[task])
        self.model_admits()

    @rule()
    def close(self) -> None:
        self.turn()  # else a write behind one that has just given up may be admitted, or still wait
        self.closed = True
        self.admission.close(Stopping("closed"))
        self.turn()
        for task in self.line:
            assert isinstance(task.exception(), Stopping)
        self.line.clear()

    @rule()
    def turn(self) -> None:
        self.loop.run_until_complete(quiesce())
        self.is_quiet = True

    @invariant()
    def bytes_are_those_of_the_writes(self) -> None:
        if not self.is_quiet:
            return
        assert self.admission.queued_bytes == sum(self.tasks[task] for task in self.inside)
        assert self.admission.waiting_bytes == sum(self.tasks[task] for task in self.line)
        assert all(task.done() for task in self.inside)
        assert not any(task.done() for task in self.line)

    def model_admits(self) -> None:
        self.is_quiet = False
        while self.line and not self.closed:
            queued = sum(self.tasks[task] for task in self.inside)
            if queued and queued + self.tasks[self.line[0]] > QUEUED_MAX:
                return
            self.inside.append(self.line.pop(0))

    def teardown(self) -> None:
        for task in [*self.line, *self.inside]:
            task.cancel()
        self.turn()
        for task in self.inside:
            if not task.cancelled():
                self.admission.release(self.tasks[task])
        self.turn()
        self.loop.close()
        assert (self.admission.queued_bytes, self.admission.waiting_bytes) == (0, 0)


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_small_write_is_admitted_by_one_comparison() -> None:
    """While there is much room, the memtable is looked at for the first write alone."""
    looks: list[int] = []

    def memtable_bytes() -> int:
        looks.append(0)
        return 0

    admission = admission_of(memtable_bytes)
    assert admission.try_admit(50)
    first_looks = len(looks)
    for _ in range(100):
        assert admission.try_admit(50)
        admission.release(50)
    assert (len(looks), admission.queued_bytes) == (first_looks, 50)
    admission.close(Stopping("stopped"))
    with pytest.raises(Stopping):
        admission.try_admit(50)
