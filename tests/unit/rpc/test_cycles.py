"""Calls that end with an error leave nothing that only a garbage collection would free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias

import pytest
from google.protobuf.message import Message

from shalekv.errors import ShaleError
from shalekv.v1 import kv_pb2
from tests.kit.constants import set_constants
from tests.kit.cycles import cycles_of
from tests.kit.serving.roles import (
    COMMITTED,
    Calls,
    absent,
    add,
    header,
    key_header,
    present,
    put,
    seq_equals,
    serving,
)
from tests.kit.serving.rpc import Serving, failure
from tests.unit.rpc.sessions import SocketSession, operation, served_writer

MIB = 1 << 20
COUNT = 20  # calls at once
SMALL: dict[str, Any] = {"memtable_bytes_max": MIB, "admission_timeout_ms": 1}
Put = kv_pb2.PutRequest

REFUSED: dict[str, Message] = {
    "condition": Put(key=b"k", precondition=absent()),
    "condition, not linearizable": Put(
        header=header(COMMITTED), key=b"k", precondition=seq_equals(9)
    ),
    "condition, repeated": Put(header=key_header(b"r" * 16), key=b"k", precondition=absent()),
    "counter": kv_pb2.WriteRequest(changes=[add(b"k")]),
    "delete": kv_pb2.DeleteRequest(key=b"none", precondition=present()),
    "field": Put(key=b""),
    "reused": Put(header=key_header(b"used"), key=b"other"),
    "full": Put(key=b"k", value=bytes(MIB)),
    "read": kv_pb2.GetRequest(key=b""),
    "txn": kv_pb2.TxnRequest(),
}
Act: TypeAlias = Callable[[Serving[Any]], Coroutine[Any, Any, object]]


async def _prepare(writer: Calls) -> None:
    await writer.put(b"k")
    await writer.put(b"k", header=key_header(b"used"))


async def _refused(writer: Calls, request: Message) -> None:
    """A refused call without a transport; its caller must not keep what it awaited either."""
    answer = None
    try:
        answer = writer.begin(request)
        assert not isinstance(answer, Message), "it was answered"
        await answer
    except ShaleError:
        return
    finally:
        del answer
    raise AssertionError("it was not refused")


@pytest.mark.parametrize("kind", REFUSED)
async def test_refusals_leave_nothing_to_the_collector(kind: str) -> None:
    """A refused call of a service, without a transport, leaves no cycles of references."""
    async with serving(**SMALL) as writer:
        await _prepare(writer)

        async def act() -> None:
            await asyncio.gather(*(_refused(writer, REFUSED[kind]) for _ in range(COUNT)))

        await act()
        assert not await cycles_of(act)


async def test_a_refused_batch_leaves_nothing_to_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch whose files are refused leaves no cycles of references."""
    set_constants(monkeypatch, {"shalekv.write.admission:UNCOMPACTED_LOADS_MAX": 0})
    batch = kv_pb2.WriteRequest(header=key_header(b"b" * 16), changes=[put(b"k", bytes(100_000))])
    async with serving(**SMALL, direct_ingest_bytes=65_536) as writer:

        async def act() -> None:
            await asyncio.gather(*(_refused(writer, batch) for _ in range(COUNT)))

        await act()
        assert not await cycles_of(act)


async def test_writes_leave_nothing_to_the_collector() -> None:
    """An acknowledged write, with its requests to the store, leaves no cycles of references."""
    async with serving() as writer:
        keys = iter(range(9))

        async def act() -> None:
            await writer.put(b"k")
            await writer.put(b"k", header=key_header(b"%016d" % next(keys)))
            await writer.put(b"k", precondition=present())

        await act()
        assert not await cycles_of(act)


async def _call(it: Serving[Any], kind: str) -> None:
    request = REFUSED[kind]
    assert isinstance(request, Put)
    await failure(it.kv.Put(request))


async def _get(it: Serving[Any]) -> None:
    await it.kv.Get(kv_pb2.GetRequest(key=b"k"))


async def _scan(it: Serving[Any]) -> None:
    await failure(it.kv.Scan(kv_pb2.ScanRequest(page_token=b"no token")))


async def _session_of_refusals(it: Serving[Any]) -> None:
    session = SocketSession(it.kv)
    await session.send(*(operation(number, each) for number, each in enumerate(REFUSED.values())))
    results = await session.take(len(REFUSED))
    assert all(result.HasField("error") for result in results.values())
    await session.rest()


async def _session_that_ends(it: Serving[Any]) -> None:
    session = SocketSession(it.kv)
    await session.send()
    await session.failure()


async def _session_that_is_left(it: Serving[Any]) -> None:
    session = SocketSession(it.kv)
    await session.send(operation(1, kv_pb2.GetRequest(key=b"k")))
    await session.take(1)
    session.call.cancel()


async def _watch(it: Serving[Any]) -> None:
    call = it.kv.Watch()
    await call.write(kv_pb2.WatchRequest())
    await failure(call)


ENDS: dict[str, Act] = {
    "scan": _scan,
    "session of refusals": _session_of_refusals,
    "session that ends": _session_that_ends,
    "session that is left": _session_that_is_left,
    "watch": _watch,
    "condition": partial(_call, kind="condition"),
    "condition, repeated": partial(_call, kind="condition, repeated"),
    "full": partial(_call, kind="full"),
}


@pytest.mark.parametrize("kind", ENDS)
async def test_refused_calls_leave_what_any_call_leaves(kind: str) -> None:
    """A refused call leaves only the small cycle that grpc makes for any call."""
    async with served_writer(**SMALL) as (it, writer):
        await _prepare(writer)

        async def at_once(act: Act) -> None:
            await asyncio.gather(*(act(it) for _ in range(COUNT)))
            await _get(it)
            await it.server.drain(10_000)

        await at_once(ENDS[kind])
        of_any = await cycles_of(lambda: at_once(_get))
        left = await cycles_of(lambda: at_once(ENDS[kind]))
        assert not left - of_any
