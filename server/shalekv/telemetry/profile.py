"""Profiles: in which functions the thread of the event loop spends its processor time.

A timer of the kernel signals the process after each few milliseconds of its processor time, and
Python then shows the stack of its main thread: functions, and neither their arguments nor other
values. While it computes nothing it is not disturbed. pyinstrument, which is imported for the first
profile, makes a text or a page of the stacks. Its own sampler takes part in each call of a
function: the server would be several times slower, and seem to be so where it calls most.

Processes that share a port take samples at the same time. One of them has been asked; the others
send it theirs, and each process is a root of the profile.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from shalekv.errors import InvalidRequest, ProfileRefused

if TYPE_CHECKING:
    from pyinstrument.session import Session

DURATION_MS_MIN, DURATION_MS_MAX, DURATION_MS = 100, 60_000, 10_000
INTERVAL_S: Final = 0.001  # of processor time; Linux rounds it up to its tick, most often 4 ms
SHOWN_SHARE: Final = 0.005  # of the time: functions with less are left out of a text
WAITING: Final = "waiting\0<for calls, the store, or a processor>\x000"

_Stack: TypeAlias = tuple[CodeType, ...]  # the function that runs, and those that have called it


class ProfileFormat(StrEnum):
    """The form of a profile."""

    TEXT = "text"  # a tree for a terminal
    HTML = "html"  # a page for a browser
    SPEEDSCOPE = "speedscope"  # JSON for https://www.speedscope.app


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile in its format, and what it is made of."""

    text: str
    samples: int
    missing: tuple[int, ...] = ()  # numbers of processes that have given no samples


@dataclass(frozen=True, slots=True)
class OtherProcesses:
    """The processes that share a port with this one."""

    own_number: int
    # Takes their samples for a duration in ms: what `take_samples` returns, by number. Empty: none.
    sample: Callable[[int], Awaitable[Mapping[int, bytes]]]


class _Taken(NamedTuple):
    """Samples of one process, as they are told to another one of the same version."""

    stacks: list[tuple[list[str], float]]  # in their order, with the seconds in each
    samples: int
    wall_s: float
    cpu_s: float

    def encode(self) -> bytes:
        """Encode as JSON, each name once."""
        numbers: dict[str, int] = {}
        stacks = [
            ([numbers.setdefault(name, len(numbers)) for name in stack], spent_s)
            for stack, spent_s in self.stacks
        ]
        return json.dumps([[*numbers], stacks, self.samples, self.wall_s, self.cpu_s]).encode()

    @classmethod
    def decode(cls, data: bytes) -> _Taken:
        """Decode what `encode` has made."""
        names, stacks, *rest = json.loads(data)
        return cls([([names[each] for each in stack], spent_s) for stack, spent_s in stacks], *rest)


@dataclass(slots=True)
class _Samples:
    """Stacks of one thread, and the times in which they were seen."""

    began_s: float = field(default_factory=time.time)
    seen: Counter[_Stack] = field(default_factory=Counter)
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def add(self, _number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        stack = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        self.seen[tuple(stack)] += 1

    def taken(self) -> _Taken:
        """Return them with names, equal beginnings of stacks side by side."""
        each_s = self.cpu_s / max(1, self.seen.total())
        stacks = sorted(
            ([_identifier(code) for code in reversed(stack)], count * each_s)
            for stack, count in self.seen.items()
        )
        if stacks:  # leave out what all begin with: from the start of the program to the loop
            first, last = stacks[0][0], stacks[-1][0]  # have in common what all have
            both = zip(first, last, strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
            stacks = [(stack[max(0, common - 1) :], spent_s) for stack, spent_s in stacks]
        stacks.append(([WAITING], max(0.0, self.wall_s - self.cpu_s)))
        return _Taken(stacks, self.seen.total(), self.wall_s, self.cpu_s)


async def take_profile(
    duration_ms: int, form: ProfileFormat, others: OtherProcesses | None = None
) -> Profile:
    """Observe the thread that calls this; 0: for 10 seconds. It ends early if it is cancelled.

    `others` are observed at the same time. Raises `ProfileRefused` without pyinstrument, and while
    another profile is taken.
    """
    duration_ms = duration_ms or DURATION_MS
    if not DURATION_MS_MIN <= duration_ms <= DURATION_MS_MAX:
        problem = f"must be {DURATION_MS_MIN} to {DURATION_MS_MAX}, not {duration_ms}"
        raise InvalidRequest("duration_ms", problem)
    await asyncio.to_thread(_load)
    told: Mapping[int, bytes] = {}
    async with _observed(duration_ms) as samples:
        if others is not None:
            told = await others.sample(duration_ms)
    number = 0 if others is None else others.own_number
    taken = {number: samples.taken()}
    taken |= {number: _Taken.decode(data) for number, data in told.items() if data}
    text = await asyncio.to_thread(_rendered, _session(samples.began_s, taken), form)
    missing = sorted(number for number, data in told.items() if not data)
    return Profile(text, sum(each.samples for each in taken.values()), tuple(missing))


async def take_samples(duration_ms: int) -> bytes:
    """Observe the thread that calls this, for the profile of another process.

    Raises `ProfileRefused` while a profile is taken.
    """
    async with _observed(duration_ms) as samples:
        pass
    return samples.taken().encode()


@asynccontextmanager
async def _observed(duration_ms: int) -> AsyncIterator[_Samples]:
    """Observe this thread while entered, and for so long at least."""
    ends_s = time.monotonic() + duration_ms / 1_000
    with _sampling() as samples:
        yield samples
        await asyncio.sleep(max(0.0, ends_s - time.monotonic()))


def _load() -> None:
    try:
        import pyinstrument  # noqa: F401, PLC0415 - an extra, and slow
    except ImportError:
        raise ProfileRefused(
            "the server has no pyinstrument, which makes profiles. Install it there, and start "
            "the server again: pip install 'shalekv[profile]'"
        ) from None


@contextmanager
def _sampling() -> Iterator[_Samples]:
    """Take samples of this thread."""
    if threading.current_thread() is not threading.main_thread():
        raise ProfileRefused("the server runs in a part of another program: profile that instead")
    if signal.getsignal(signal.SIGPROF) is not signal.SIG_DFL:
        raise ProfileRefused("another profile of this process is being taken: wait for its end")
    samples = _Samples()
    began_wall_s, began_cpu_s = time.perf_counter(), time.thread_time()
    signal.signal(signal.SIGPROF, samples.add)
    signal.siginterrupt(signal.SIGPROF, False)  # noqa: FBT003 - it has no names
    signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
    try:
        yield samples
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        # By default, a signal that is on its way would end the process.
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        samples.wall_s = time.perf_counter() - began_wall_s
        samples.cpu_s = time.thread_time() - began_cpu_s


def _session(began_s: float, taken: Mapping[int, _Taken]) -> Session:
    """Return samples as pyinstrument has them. The number 0 is that of one process alone."""
    from pyinstrument.session import Session  # noqa: PLC0415 - an extra

    samples = sum(each.samples for each in taken.values())
    return Session(
        frame_records=[
            ([*_root(number), *stack], spent_s)
            for number, each in sorted(taken.items())
            for stack, spent_s in each.stacks
        ],
        start_time=began_s,
        duration=sum(each.wall_s for each in taken.values()),
        min_interval=INTERVAL_S,
        max_interval=INTERVAL_S,
        sample_count=samples,
        start_call_stack=[""],  # nothing is left out at its root
        target_description="The thread of the event loop",
        cpu_time=sum(each.cpu_s for each in taken.values()),
        sys_path=sys.path,
        sys_prefixes=Session.current_sys_prefixes(),
    )


def _root(number: int) -> list[str]:
    return [f"process {number}\0<of those that share the port>\x000"] if number else []


def _identifier(code: CodeType) -> str:
    return f"{code.co_qualname}\0{code.co_filename}\0{code.co_firstlineno}"


def _rendered(session: Session, form: ProfileFormat) -> str:
    from pyinstrument import processors, renderers  # noqa: PLC0415 - an extra

    if form is ProfileFormat.HTML:
        return str(renderers.HTMLRenderer().render(session))
    if form is ProfileFormat.SPEEDSCOPE:
        return str(renderers.SpeedscopeRenderer().render(session))
    options = {"filter_threshold": SHOWN_SHARE}
    text = renderers.ConsoleRenderer(unicode=True, processor_options=options)
    # The server would be a library, too, and its functions be hidden as one group.
    text.processors.remove(processors.group_library_frames_processor)
    return text.render(session)
