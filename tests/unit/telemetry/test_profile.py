"""Profiles show functions that compute, and nothing else."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping

import pytest

from shalekv.clock import LoopClock
from shalekv.errors import InvalidRequest, ProfileRefused
from shalekv.telemetry.profile import (
    DURATION_MS_MAX,
    DURATION_MS_MIN,
    OtherProcesses,
    ProfileFormat,
    take_profile,
    take_samples,
)


def computing_function(secret: bytes) -> int:
    return sum(secret * 1_000)


async def half_busy() -> None:
    """Compute for about as long as it waits."""
    clock = LoopClock()
    while True:
        for _ in range(20):
            computing_function(b"do not show")
        await clock.sleep_ms(2)


@pytest.mark.parametrize("form", list(ProfileFormat))
async def test_a_profile_shows_functions_without_values(form: ProfileFormat) -> None:
    """What computes in another task is seen, by its name; arguments are in no format."""
    task = asyncio.create_task(half_busy())
    text, samples = "", 0
    while not samples:  # on a machine that does other work
        profile = await take_profile(150, form)
        text, samples = profile.text, profile.samples
    task.cancel()
    assert "computing_function" in text
    assert "waiting" in text
    assert "do not show" not in text


async def test_processes_are_roots_of_one_profile() -> None:
    """Each process has its own root, with its time; one without samples is named as missing."""
    task = asyncio.create_task(half_busy())
    data = b""
    while b"computing_function" not in data:
        data = await take_samples(150)
    task.cancel()
    asked = []

    async def sample(duration_ms: int) -> Mapping[int, bytes]:
        asked.append((duration_ms, signal.getitimer(signal.ITIMER_PROF)[1]))
        return {1: data, 3: b""}

    form = ProfileFormat.SPEEDSCOPE
    profile = await take_profile(100, form, OtherProcesses(2, sample))
    ((duration_ms, interval_s),) = asked
    assert (duration_ms, interval_s > 0) == (100, True)  # while this process is observed
    assert profile.missing == (3,)
    read = json.loads(profile.text)
    names = [each["name"] for each in read["shared"]["frames"]]
    stack, stacks, (shown,) = list[str](), set[tuple[str, ...]](), read["profiles"]
    for event in shown["events"]:
        if event["type"] == "O":
            stack.append(names[event["frame"]])
            stacks.add(tuple(stack[1:]))
        else:
            stack.pop()
    assert {("process 1", "waiting"), ("process 2", "waiting")} <= stacks
    assert any(each[:1] == ("process 1",) and each[-1] == "computing_function" for each in stacks)
    assert {each[0] for each in stacks if each} == {"process 1", "process 2"}
    assert shown["endValue"] == pytest.approx(shown["events"][-1]["at"], rel=0.1)


async def test_one_profile_at_a_time() -> None:
    """A second profile is refused; when the first is cancelled, its timer ends, and others may."""
    first = asyncio.create_task(take_profile(60_000, ProfileFormat.TEXT))
    while not signal.getitimer(signal.ITIMER_PROF)[1]:
        await LoopClock().sleep_ms(1)
    with pytest.raises(ProfileRefused, match="another profile"):
        await take_profile(100, ProfileFormat.TEXT)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not signal.getitimer(signal.ITIMER_PROF)[1]
    assert (await take_profile(100, ProfileFormat.TEXT)).text


async def test_another_thread_is_not_observed() -> None:
    """A server in a thread of another program refuses: only the main thread can be observed."""

    def serve() -> None:
        with pytest.raises(ProfileRefused, match="part of another program"):
            asyncio.run(take_profile(100, ProfileFormat.TEXT))

    await asyncio.to_thread(serve)


@pytest.mark.parametrize("duration_ms", [DURATION_MS_MIN - 1, DURATION_MS_MAX + 1])
async def test_the_duration_is_bounded(duration_ms: int) -> None:
    """A profile of no time, or of more than a minute, is refused with the bounds."""
    with pytest.raises(InvalidRequest, match="must be 100 to 60000"):
        await take_profile(duration_ms, ProfileFormat.TEXT)
