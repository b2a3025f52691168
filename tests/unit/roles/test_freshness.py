"""`min_seq` and `max_staleness_ms` at a reader: waited for, looked for, or refused in time."""

from __future__ import annotations

import asyncio

import pytest

from shalekv.errors import (
    SeqNotReached,
    Stopping,
    TooStale,
)
from shalekv.roles.service import Call
from shalekv.v1 import kv_pb2
from tests.kit.engine.replica import (
    AskedStore,
    ReplicaGround,
    in_virtual_time,
    pass_s,
)
from tests.kit.inline_runtime import gathered
from tests.unit.roles.replica_calls import get, opened, running


@pytest.mark.parametrize("is_scan", [False, True])
def test_min_seq_makes_the_reader_look(*, is_scan: bool) -> None:
    """A read with the number of a write sees it, however seldom the reader looks by itself."""

    async def main() -> None:
        ground = await ReplicaGround.created()
        reader = await opened(ground)
        async with running(reader):
            seq = await ground.put(a=b"1")
            header = kv_pb2.RequestHeader(min_seq=seq)
            if is_scan:
                scan = kv_pb2.ScanRequest(header=header)
                found = [
                    e.value for m in await gathered(reader.kv.scan(scan, Call())) for e in m.entries
                ]
            else:
                found = [(await get(reader, b"a", min_seq=seq)).value]
            assert found == [b"1"]

    in_virtual_time(main)


def test_min_seq_that_is_not_reached_says_how_far_it_got_in_time() -> None:
    """The answer is there before the deadline, so that the caller hears it."""

    async def main() -> None:
        ground = await ReplicaGround.created()
        reader = await opened(ground)
        async with running(reader):
            await ground.put(a=b"1")
            began_s = asyncio.get_running_loop().time()
            call = Call(deadline_ms=reader.clock.monotonic_ms() + 500)
            with pytest.raises(SeqNotReached) as short:
                await get(reader, b"a", call, min_seq=7)
            assert short.value.seq == 1
            assert asyncio.get_running_loop().time() - began_s < 0.5
            assert reader.engine.prefix.waiting_count == 0

    in_virtual_time(main)


def test_min_seq_ends_with_the_reader() -> None:
    """Who waits when it stops, and who comes later, is told at once, not at the deadline."""

    async def main() -> None:
        ground = await ReplicaGround.created()
        await ground.put(a=b"1")
        reader = await opened(ground)
        async with running(reader):
            waiting = asyncio.create_task(get(reader, b"a", min_seq=2))
            await pass_s(1)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(Stopping):
            await waiting
        with pytest.raises(Stopping):
            await get(reader, b"a", min_seq=2)
        with pytest.raises(TooStale):
            await get(reader, b"a", max_staleness_ms=1)
        assert asyncio.get_running_loop().time() == began_s
        assert (await get(reader, b"a")).value == b"1"

    in_virtual_time(main)


def test_max_staleness_makes_the_reader_look_or_refuse() -> None:
    """A state that is new enough is answered at once; another after one look, if that helps."""

    async def main() -> None:
        ground = await ReplicaGround.created()
        store = AskedStore(ground)
        reader = await opened(ground, store)
        async with running(reader):
            await reader.engine.catch_up()
            await pass_s(5)
            await ground.put(a=b"1")
            store.forget()
            assert not (await get(reader, b"a", max_staleness_ms=5_000)).found
            assert store.gets == []
            reply = await get(reader, b"a", max_staleness_ms=4_999)
            assert (reply.value, reply.header.staleness_ms) == (b"1", 0)

            async def slow(_: str) -> None:
                await pass_s(2)

            store.before_get = slow
            await pass_s(2)
            with pytest.raises(TooStale) as stale:
                await get(reader, b"a", max_staleness_ms=1_000)
            assert stale.value.staleness_ms == 2_000

    in_virtual_time(main)


def test_page_says_how_old_its_scan_is() -> None:
    """The state of a scan grows older from page to page, however new the reader is."""

    async def main() -> None:
        ground = await ReplicaGround.created()
        await ground.put(a=b"1", b=b"1")
        reader = await opened(ground)
        async with running(reader):
            await reader.engine.catch_up()
            request = kv_pb2.ScanRequest(limit=1)
            first = (await gathered(reader.kv.scan(request, Call())))[-1]
            assert (first.header.staleness_ms, len(first.entries)) == (0, 1)
            await ground.put(b=b"2")
            await pass_s(9)
            await reader.engine.catch_up()
            request.page_token = first.page_token
            second = (await gathered(reader.kv.scan(request, Call())))[-1]
            assert [e.value for e in second.entries] == [b"1"]
            assert (second.header.seq, second.header.staleness_ms) == (1, 9_000)

    in_virtual_time(main)
