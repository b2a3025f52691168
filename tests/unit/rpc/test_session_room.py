"""What all sessions hold together is bounded, and none of them is stopped by the others."""

from __future__ import annotations

from contextlib import AsyncExitStack

from shalekv.engine.result_room import SMALL_BYTES, ResultRoom
from shalekv.settings import KIB, LimitSettings
from shalekv.v1 import kv_pb2
from tests.kit.engine.running_log import quiesce
from tests.unit.rpc.memory_service import MemoryKv
from tests.unit.rpc.sessions import driven, operation

VALUE = b"x" * 4 * KIB
ONE_BYTES = 2 * len(VALUE)  # more than what a get and its result hold
ALL_BYTES = 64 * KIB
SESSIONS = 10
LIMITS = LimitSettings(session_bytes_max=64 * KIB)


async def test_sessions_share_their_room() -> None:
    """Ten clients that take nothing hold no more than all of it, and one operation each; a client
    that comes later and takes its results gets all of them; in the end everything is given back.
    """
    service = MemoryKv()
    service.values[b"a"] = VALUE
    room = ResultRoom(ALL_BYTES)
    async with AsyncExitStack() as stack:
        silent = [
            await stack.enter_async_context(driven(service, limits=LIMITS, room=room))
            for _ in range(SESSIONS)
        ]
        for session in silent:
            for number in range(100):
                session.send(operation(number, kv_pb2.GetRequest(key=b"a")))
        for _ in range(50):
            await quiesce()
        held = [session.session.held_bytes for session in silent]
        assert all(each > SMALL_BYTES for each in held)
        assert room.used_bytes == sum(held)
        assert ALL_BYTES < room.used_bytes <= ALL_BYTES + SESSIONS * ONE_BYTES
        async with driven(service, limits=LIMITS, room=room) as late:
            for number in range(20):
                late.send(operation(number, kv_pb2.GetRequest(key=b"a")))
            assert len(await late.rest()) == 20
    assert room.used_bytes == 0
