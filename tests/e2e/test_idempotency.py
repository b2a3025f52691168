"""A request that is repeated with its idempotency key is applied once, whatever died meanwhile."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from shalekv.v1 import kv_pb2
from tests.kit.processes.deaf_proxy import deaf_proxy
from tests.kit.processes.processes import Processes
from tests.kit.processes.stubs import kv_stub
from tests.kit.processes.wal_contents import wal_ids
from tests.kit.serving.rpc import failure

KEY = b"the key of this request"
POLL_S = 0.005
DEADLINE_S = 200
CALL_S = 20  # a server that was killed is noticed at once
KILLS = 6


def add(header: kv_pb2.RequestHeader, delta: int = 7) -> kv_pb2.WriteRequest:
    """A write that shows how often it was applied."""
    change = kv_pb2.Change(add=kv_pb2.AddChange(key=b"counter", delta=delta))
    return kv_pb2.WriteRequest(header=header, changes=[change])


def txn(header: kv_pb2.RequestHeader) -> kv_pb2.TxnRequest:
    """A transaction that would take its other branch the second time."""
    compare = kv_pb2.Compare(key=b"counter", exists=False)
    put = kv_pb2.Change(put=kv_pb2.PutChange(key=b"counter", value=b"\7" + bytes(7)))
    got = kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=b"other"))
    undo = kv_pb2.Change(delete=kv_pb2.DeleteChange(key=b"counter"))
    return kv_pb2.TxnRequest(
        header=header,
        compares=[compare],
        then=[kv_pb2.TxnOperation(change=put), got],
        otherwise=[kv_pb2.TxnOperation(change=undo)],
    )


def put(header: kv_pb2.RequestHeader) -> kv_pb2.PutRequest:
    """A put that its own success would refuse the second time."""
    return kv_pb2.PutRequest(
        header=header,
        key=b"counter",
        value=b"\7" + bytes(7),
        precondition=kv_pb2.Precondition(absent=True),
    )


@dataclass(frozen=True, slots=True)
class Kind:
    """A call that is made and repeated."""

    method: str
    request: Callable[[kv_pb2.RequestHeader], Any]


KINDS = {"Write": Kind("Write", add), "Txn": Kind("Txn", txn), "Put": Kind("Put", put)}


async def durable(folder: Path, before: int) -> None:
    """Wait until the log of the database in `folder` has more than `before` objects."""
    async with asyncio.timeout(DEADLINE_S):
        while len(wal_ids(folder)) <= before:  # noqa: ASYNC110 (another process writes them)
            await asyncio.sleep(POLL_S)


@pytest.mark.parametrize("name", KINDS)
async def test_killed_between_durable_and_reply(
    processes: Processes, tmp_path: Path, name: str
) -> None:
    """A server is killed when a request is durable, before its reply has left; repeated at the
    next one it is not applied again, and gets the reply that the first would have had, twice the
    same. The same key with other content is refused.
    """
    kind, folder = KINDS[name], tmp_path / "db"
    header = kv_pb2.RequestHeader(idempotency_key=KEY)
    server = await processes.serve(f"file://{folder}")
    async with deaf_proxy(server.listen) as proxy, kv_stub(proxy.listen) as kv:
        await kv.Put(kv_pb2.PutRequest(key=b"other", value=b"seen"))  # connects
        before = len(wal_ids(folder))
        proxy.go_deaf()
        call = getattr(kv, kind.method)(kind.request(header))
        await durable(folder, before)
        server.send(signal.SIGKILL)
        assert await server.exited() == -signal.SIGKILL
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    server = await processes.serve(f"file://{folder}")
    async with kv_stub(server.listen) as kv:
        first = await getattr(kv, kind.method)(kind.request(header))
        again = await getattr(kv, kind.method)(kind.request(header))
        assert first == again
        assert first.header.wal_id == before
        counter = await kv.Get(kv_pb2.GetRequest(key=b"counter"))
        assert counter.value == b"\7" + bytes(7)
        assert counter.seq == first.header.seq
        if name == "Write":
            assert list(first.counters) == [7]
        if name == "Txn":
            assert first.succeeded
            assert first.results[1].get.value == b"seen"
        refused = await failure(kv.Write(add(header, delta=8)))
        assert refused.info is not None
        assert refused.info.reason == "IDEMPOTENCY_KEY_REUSED"
    assert await server.stop() == 0, server.report()


async def test_every_add_counts_once(processes: Processes, tmp_path: Path) -> None:
    """Clients that repeat each add with its key until it is answered, while servers are killed
    one after the other, count exactly what they have added.
    """
    folder = tmp_path / "db"
    url = f"file://{folder}"
    server = await processes.serve(url)
    address = [server.listen]
    added = [0] * 8
    stopped = asyncio.Event()

    async def client(name: int) -> int:
        """How often it had to repeat itself."""
        repeated = 0
        while not stopped.is_set():
            header = kv_pb2.RequestHeader(idempotency_key=b"%d/%d" % (name, added[name]))
            while True:
                try:
                    async with kv_stub(address[0]) as kv:
                        await kv.Write(add(header, delta=1), timeout=CALL_S)
                except grpc.aio.AioRpcError:
                    repeated += 1
                    await asyncio.sleep(POLL_S)
                else:
                    added[name] += 1
                    break
        return repeated

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(client(name)) for name in range(len(added))]
        for _ in range(KILLS):
            await durable(folder, len(wal_ids(folder)) + 40)
            server.send(signal.SIGKILL)
            await server.exited()
            server = await processes.serve(url)
            address[0] = server.listen
        stopped.set()
    async with kv_stub(server.listen) as kv:
        counter = await kv.Get(kv_pb2.GetRequest(key=b"counter"))
    assert int.from_bytes(counter.value, "little") == sum(added)
    repeated = sum(each.result() for each in clients)
    assert repeated > 0
    sys.stdout.write(f"{sum(added)} adds, {KILLS} kills, {repeated} repetitions\n")
    assert await server.stop() == 0, server.report()
