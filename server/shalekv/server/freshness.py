"""How new the state must be that a read sees: `min_seq` and `max_staleness_ms` of its header."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from shalekv.clock import Clock
from shalekv.errors import SeqNotReached, TooStale
from shalekv.read.engine import ReadEngine
from shalekv.server.service import Call
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2


class Freshness:
    """Waits until the state of an engine is as new as a read demands."""

    def __init__(self, engine: ReadEngine, limits: LimitSettings, clock: Clock) -> None:
        """Calls without a deadline wait for `limits.seq_wait_ms_max`."""
        self._engine = engine
        self._limits = limits
        self._clock = clock

    def judge(self, header: kv_pb2.RequestHeader) -> int | None:
        """The staleness of the state, which the reply must tell; None: the read has to `reach`.

        It is measured once. Measured again for the reply, later, it could exceed what was judged;
        what is read after this call is at least as new.
        """
        if header.min_seq > self._engine.prefix.seq:
            return None
        staleness_ms = self._engine.staleness_ms
        return None if _is_too_stale(header, staleness_ms) else staleness_ms

    async def reach(self, header: kv_pb2.RequestHeader, call: Call) -> int:
        """Return the staleness, as `judge` does, when the state is as new as demanded.

        Raises `SeqNotReached` and `TooStale`.
        """
        engine, min_seq = self._engine, header.min_seq
        with suppress(TimeoutError):  # it holds this task, and so must not stand behind ours
            async with asyncio.timeout(self._wait_ms(call) / 1_000):
                is_behind = header.min_seq > engine.prefix.seq and not engine.is_told
                if is_behind or _is_too_stale(header, engine.staleness_ms):
                    await engine.catch_up()
                await engine.prefix.cover(min_seq)
        if min_seq > engine.prefix.seq:
            raise SeqNotReached(min_seq=min_seq, seq=engine.prefix.seq)
        staleness_ms = engine.staleness_ms
        if _is_too_stale(header, staleness_ms):
            raise TooStale(staleness_ms=staleness_ms, max_staleness_ms=header.max_staleness_ms)
        return staleness_ms

    def _wait_ms(self, call: Call) -> float:
        left_ms = call.answer_within_ms(self._clock.monotonic_ms())
        return self._limits.seq_wait_ms_max if left_ms is None else left_ms


def _is_too_stale(header: kv_pb2.RequestHeader, staleness_ms: int) -> bool:
    return 0 < header.max_staleness_ms < staleness_ms
