"""The Python client when its server is killed, started again, or asked to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from shalekv_client import Client, ConditionFailed, OutcomeUnknown, RetryPolicy, SeqEquals
from tests.kit.processes.processes import Processes

DEADLINE_S = 200
STOP_S = 40  # far less than the grace that a server gives to calls
PATIENT = RetryPolicy(attempts_max=1_000, backoff_max_ms=200)
TASKS = 16
ADDS_EACH = 60
KILLS = 3


async def test_every_write_is_applied_once(processes: Processes, tmp_path: Path) -> None:
    """Whatever a server that is killed had applied without an answer is not applied again: calls
    do not even notice that it was gone.
    """
    random = Random(seed := 3)
    url = f"file://{tmp_path}/db"
    counts: list[int] = []
    seqs: list[int] = []

    async def work(client: Client, task: int) -> None:
        own = b"own/%d" % task
        seq = (await client.put(own, b"0")).seq
        for number in range(ADDS_EACH):
            counts.append(await client.add(b"n"))
            # Applied twice, the second time would fail, since it changes what it demands.
            seq = (await client.put(own, b"%d" % number, condition=SeqEquals(seq))).seq
            seqs.append(seq)

    async with asyncio.timeout(DEADLINE_S):
        server = await processes.serve(url)
        listen = server.listen
        async with Client(listen, retry=PATIENT, timeout_ms=120_000) as client:
            async with asyncio.TaskGroup() as tasks:
                for task in range(TASKS):
                    tasks.create_task(work(client, task))
                for _ in range(KILLS):
                    goal = len(counts) + random.randrange(20, 150)
                    while len(counts) < goal:
                        await client.get(b"n")
                    await server.kill()
                    server = await processes.serve(url, "--listen", listen)
            assert sorted(counts) == list(range(1, TASKS * ADDS_EACH + 1)), f"seed {seed}"
            assert len(set(seqs)) == TASKS * ADDS_EACH
            assert await client.add(b"n", 0) == TASKS * ADDS_EACH


async def test_key_outlives_the_server(processes: Processes, tmp_path: Path) -> None:
    """A write is repeated with its key at a server that was started after the first one died."""
    url = f"file://{tmp_path}/db"
    async with asyncio.timeout(DEADLINE_S):
        server = await processes.serve(url)
        async with Client(server.listen) as client:
            first = await client.put(b"k", b"1", idempotency_key=b"noted")
            await client.put(b"k", b"2", condition=SeqEquals(first.seq))
        await server.kill()
        again = await processes.serve(url)
        async with Client(again.listen) as client:
            assert (await client.put(b"k", b"1", idempotency_key=b"noted")).seq == first.seq
            found = await client.get(b"k")
        assert found is not None
        assert found.value == b"2"


async def test_clients_do_not_keep_a_server_from_stopping(
    processes: Processes, tmp_path: Path
) -> None:
    """A server whose clients have sessions open, idle or not, ends as soon as it is asked to."""
    async with asyncio.timeout(DEADLINE_S):
        server = await processes.serve(f"file://{tmp_path}/db", "--shutdown-grace-ms", "600000")
        async with Client(server.listen) as client, client.session() as session:
            await client.put(b"a", b"1")
            await session.put(b"b", b"2")
            async with asyncio.timeout(STOP_S):
                assert await server.stop() == 0, server.report()
            with_failure = session.put(b"c", b"3")
            await session.drain()
            assert with_failure.exception() is not None


async def test_session_that_breaks_says_what_it_does_not_know(
    processes: Processes, tmp_path: Path
) -> None:
    """What a session had answered when its server was killed is there; of the rest each operation
    says that nobody knows, or that it was never sent, and what was never sent is not there.
    """
    url = f"file://{tmp_path}/db"
    async with asyncio.timeout(DEADLINE_S):
        server = await processes.serve(url)
        async with Client(server.listen) as client, client.session(bytes_max=20_000) as session:
            puts = [session.put(b"%05d" % n, bytes(100)) for n in range(20_000)]
            await puts[500]
            await server.kill()
        again = await processes.serve(url)
        async with Client(again.listen) as client:
            found = {entry.key async for entry in client.scan()}
    keys = {b"%05d" % n: put for n, put in enumerate(puts)}
    answered = {key for key, put in keys.items() if put.exception() is None}
    unknown = {key for key, put in keys.items() if isinstance(put.exception(), OutcomeUnknown)}
    assert len(answered) > 500
    assert answered <= found <= answered | unknown
    assert not any(isinstance(put.exception(), ConditionFailed) for put in puts)
