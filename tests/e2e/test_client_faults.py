"""The Python client when its server is killed, started again, or asked to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from shalekv.v1 import kv_pb2
from shalekv_client import Client, ConditionFailed, OutcomeUnknown, RetryPolicy, SeqIs
from tests.kit.processes.deaf_proxy import deaf_proxy
from tests.kit.processes.processes import Processes
from tests.kit.processes.stubs import kv_stub
from tests.kit.processes.wal_contents import wal_ids
from tests.kit.seeds import random_of
from tests.kit.serving.rpc import failure
from tests.kit.timeouts import until
from tests.servers.process import free_port

DEADLINE_S = 200
STOP_S = 40  # far less than the grace that a server gives to calls
PATIENT = RetryPolicy(attempts_max=1_000, backoff_max_ms=200)
TASKS, ADDS_EACH, KILLS = 8, 30, 2
COUNTER = b"counter"
SEVEN = (7).to_bytes(8, "little")


async def test_every_write_is_applied_once(processes: Processes, tmp_path: Path) -> None:
    """A write that a killed server had applied without an answer is not applied again: calls do not
    even notice the kill.
    """
    random = random_of("kills of a client's server")
    url = f"file://{tmp_path}/db"
    counts: list[int] = []
    seqs: list[int] = []

    async def work(client: Client, task: int) -> None:
        own = b"own/%d" % task
        seq = (await client.put(own, b"0")).seq
        for number in range(ADDS_EACH):
            counts.append(await client.add(b"n"))
            # Applied twice, the second time would fail, since it changes what it demands.
            seq = (await client.put(own, b"%d" % number, condition=SeqIs(seq=seq))).seq
            seqs.append(seq)

    async with asyncio.timeout(DEADLINE_S):
        listen = f"127.0.0.1:{free_port()}"
        server = await processes.serve(url, "--listen", listen)
        async with Client(listen, retry=PATIENT, timeout_ms=120_000) as client:
            async with asyncio.TaskGroup() as tasks:
                for task in range(TASKS):
                    tasks.create_task(work(client, task))
                for _ in range(KILLS):
                    goal = len(counts) + random.randrange(20, 80)
                    await until(lambda: len(counts) >= goal, "adds")  # noqa: B023 (used at once)
                    await server.kill()
                    server = await processes.serve(url, "--listen", listen)
            assert sorted(counts) == list(range(1, TASKS * ADDS_EACH + 1))
            assert len(set(seqs)) == TASKS * ADDS_EACH
            assert await client.add(b"n", 0) == TASKS * ADDS_EACH


def repeatable() -> list[tuple[str, Any]]:
    """Requests that show how often they were applied, with their keys."""

    def header(key: bytes) -> kv_pb2.RequestHeader:
        return kv_pb2.RequestHeader(idempotency_key=key)

    put = kv_pb2.Change(put=kv_pb2.PutChange(key=b"txn", value=SEVEN))
    undo = kv_pb2.Change(delete=kv_pb2.DeleteChange(key=b"txn"))
    got = kv_pb2.TxnOperation(get=kv_pb2.GetRequest(key=b"other"))
    absent = kv_pb2.Precondition(absent=True)
    return [
        ("Write", add(header(b"1"))),
        # It would take its other branch the second time.
        (
            "Txn",
            kv_pb2.TxnRequest(
                header=header(b"2"),
                compares=[kv_pb2.Compare(key=b"txn", exists=False)],
                then=[kv_pb2.TxnOperation(change=put), got],
                otherwise=[kv_pb2.TxnOperation(change=undo)],
            ),
        ),
        ("Put", kv_pb2.PutRequest(header=header(b"3"), key=b"put", precondition=absent)),
    ]


def add(header: kv_pb2.RequestHeader, delta: int = 7) -> kv_pb2.WriteRequest:
    change = kv_pb2.Change(add=kv_pb2.AddChange(key=COUNTER, delta=delta))
    return kv_pb2.WriteRequest(header=header, changes=[change])


async def test_killed_between_durable_and_reply(processes: Processes, tmp_path: Path) -> None:
    """A server is killed when requests are durable, before their replies have left; repeated at the
    next one they are not applied again, and get the replies that the first would have had, twice
    the same. The same key with other content is refused.
    """
    folder, url = tmp_path / "db", f"file://{tmp_path}/db"
    server = await processes.serve(url, "--max-parallel-writes", "1")
    async with deaf_proxy(server.listen) as proxy, kv_stub(proxy.listen) as kv:
        await kv.Put(kv_pb2.PutRequest(key=b"other", value=b"seen"))  # connects
        proxy.go_deaf()
        calls, slots = [], []
        for method, request in repeatable():
            before = len(wal_ids(folder))
            slots.append(before)
            calls.append(getattr(kv, method)(request))
            await until(lambda: len(wal_ids(folder)) > before, "a WAL object")  # noqa: B023
        await server.kill()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    server = await processes.serve(url)
    async with kv_stub(server.listen) as kv:
        replies = []
        for (method, request), slot in zip(repeatable(), slots, strict=True):
            first = await getattr(kv, method)(request)
            assert first == await getattr(kv, method)(request)
            assert first.header.wal_id == slot
            replies.append(first)
        assert list(replies[0].counters) == [7]
        assert replies[1].succeeded
        assert replies[1].results[1].get.value == b"seen"
        for key in (COUNTER, b"txn"):
            assert (await kv.Get(kv_pb2.GetRequest(key=key))).value == SEVEN
        refused = await failure(kv.Write(add(kv_pb2.RequestHeader(idempotency_key=b"1"), 8)))
        assert refused.info is not None
        assert refused.info.reason == "IDEMPOTENCY_KEY_REUSED"
    assert await server.stop() == 0, server.report()


async def test_sessions_of_a_server_that_ends(processes: Processes, tmp_path: Path) -> None:
    """Answered operations of a session are there when its server was killed; each of the others
    ends as unknown or as never sent, and the latter is not there. A server that is stopped ends at
    once although clients have sessions open.
    """
    url = f"file://{tmp_path}/db"
    async with asyncio.timeout(DEADLINE_S):
        server = await processes.serve(url)
        async with Client(server.listen) as client, client.session(bytes_max=20_000) as session:
            puts = [session.put(b"%05d" % n, bytes(100)) for n in range(5_000)]
            await puts[300]
            await server.kill()
        again = await processes.serve(url, "--shutdown-grace-ms", "600000")
        async with Client(again.listen) as client, client.session() as session:
            found = {entry.key async for entry in client.scan()}
            await session.put(b"b", b"2")
            async with asyncio.timeout(STOP_S):
                assert await again.stop() == 0, again.report()
            late = session.put(b"c", b"3")
            await session.drain()
            assert late.exception() is not None
    keys = {b"%05d" % n: put for n, put in enumerate(puts)}
    answered = {key for key, put in keys.items() if put.exception() is None}
    unknown = {key for key, put in keys.items() if isinstance(put.exception(), OutcomeUnknown)}
    assert len(answered) > 300
    assert answered <= found <= answered | unknown
    assert not any(isinstance(put.exception(), ConditionFailed) for put in puts)
