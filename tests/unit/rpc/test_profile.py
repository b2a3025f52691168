"""`Admin.Profile` over a socket."""

from __future__ import annotations

import signal

import pytest

from shalekv.clock import LoopClock
from shalekv.rpc.call_telemetry import Recorders
from shalekv.telemetry.slow_calls import SlowCalls
from shalekv.v1 import admin_pb2
from shalekv_client import Client, NotApplied, ProfileFormat
from tests.kit.serving.memory_service import MemoryKv
from tests.kit.serving.rpc import serving, serving_of


async def until_sampling(*, is_so: bool) -> None:
    while bool(signal.getitimer(signal.ITIMER_PROF)[1]) is not is_so:
        await LoopClock().sleep_ms(1)


async def test_a_client_gets_a_profile() -> None:
    """The reply has the profile in the format that was asked for, within a longer deadline."""
    async with serving() as it, Client(it.server.listen, timeout_ms=5_000) as client:
        assert "event loop" in (await client.profile(100)).text
        page = await client.profile(100, profile_format=ProfileFormat.HTML)
        assert page.text.startswith("<!DOCTYPE html>")
        with pytest.raises(NotApplied, match="duration_ms: must be 100 to 60000, not 99"):
            await client.profile(99)


async def test_a_profile_is_no_slow_call() -> None:
    """It takes as long as its caller says; an alert about slow calls must not fire for it."""
    slow_calls = SlowCalls(1, LoopClock())
    async with (
        serving_of(MemoryKv(), recorders=Recorders(slow_calls)) as it,
        Client(it.server.listen) as client,
    ):
        await client.profile(100)
    assert "Admin.Profile" not in slow_calls.counts


async def test_a_second_profile_is_refused_with_the_reason() -> None:
    """While a profile is taken, another call says so; when its client goes, sampling ends."""
    async with serving() as it, Client(it.server.listen) as client:
        call = it.admin.Profile(admin_pb2.ProfileRequest(duration_ms=60_000))
        await until_sampling(is_so=True)
        with pytest.raises(NotApplied, match="another profile of this process"):
            await client.profile(100)
        call.cancel()
        await until_sampling(is_so=False)
