"""Clients that read from replicas while those are killed, stand still and come back.

Of every answer the number of its state is known. A state must be there that a client knows to be
acknowledged, if it demands so; and no process ever goes back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import grpc

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.e2e.crashes.clients import Clients
from tests.e2e.crashes.moments import now_us, until
from tests.e2e.crashes.workload import KEYS
from tests.kit.processes.stubs import kv_stub, reason_of
from tests.sim.history import Got, Seen

KEYS_AT_ONCE = 5
SCAN_SHARE = 0.15
MIN_SEQ_SHARE = 0.5
DEADLINE_S = 4.0
PAUSE_S = 0.05


@dataclass(slots=True)
class ReplicaReads:
    """All reads of the readers of one database."""

    clients: Clients
    random: Random
    seen: list[Seen] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
    answered: Counter[int] = field(default_factory=Counter)  # by process id
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Read until it is `over`."""
        async with asyncio.TaskGroup() as tasks:
            for seat in range(len(self.clients.servers.readers)):
                tasks.create_task(self._read_from(seat, Random(self.random.getrandbits(64))))

    async def more(self, seat: int, count: int) -> None:
        """Wait until the process in that seat has answered so many more."""
        pid = self.clients.servers.readers[seat].child.pid
        goal = self.answered[pid] + count
        is_read = lambda: self.answered[pid] >= goal  # noqa: E731
        await until(is_read, "reads of a replica", lambda: dict(self.told))

    async def _read_from(self, seat: int, random: Random) -> None:
        servers = self.clients.servers
        while not self.over.is_set():
            server = servers.readers[seat]
            async with kv_stub(server.address) as stub:
                # Another process at its address would not be that one.
                while servers.readers[seat] is server and not self.over.is_set():
                    min_seq = self.clients.newest_seq if random.random() < MIN_SEQ_SHARE else 0
                    try:
                        await self._read(stub, server.child.pid, min_seq, random)
                    except grpc.aio.AioRpcError as error:
                        self.told[reason_of(error) or error.code().name] += 1
                    with suppress(TimeoutError):
                        async with asyncio.timeout(PAUSE_S):
                            await self.over.wait()

    async def _read(self, stub: kv_pb2_grpc.KVStub, pid: int, min_seq: int, random: Random) -> None:
        began_us, asked = now_us(), kv_pb2.RequestHeader(min_seq=min_seq)
        if random.random() < SCAN_SHARE:
            keys = KEYS
            header, found = await _scan(stub, asked)
        else:
            keys = tuple(random.sample(KEYS, KEYS_AT_ONCE))
            header, found = await _batch_get(stub, asked, keys)
        staleness_ms = header.staleness_ms
        name = f"reader {pid}"
        self.seen.append(
            Seen(name, began_us, now_us(), header.seq, staleness_ms, min_seq, keys, found)
        )
        self.answered[pid] += 1


async def _batch_get(
    stub: kv_pb2_grpc.KVStub, asked: kv_pb2.RequestHeader, keys: Sequence[bytes]
) -> tuple[kv_pb2.ReplyHeader, dict[bytes, Got]]:
    request = kv_pb2.BatchGetRequest(header=asked, keys=keys)
    reply = await stub.BatchGet(request, timeout=DEADLINE_S)
    found = {
        key: Got(each.value, each.seq, each.expire_at_ms)
        for key, each in zip(keys, reply.results, strict=True)
        if each.found
    }
    return reply.header, found


async def _scan(
    stub: kv_pb2_grpc.KVStub, asked: kv_pb2.RequestHeader
) -> tuple[kv_pb2.ReplyHeader, dict[bytes, Got]]:
    header = kv_pb2.ReplyHeader()
    found: dict[bytes, Got] = {}
    async for reply in stub.Scan(kv_pb2.ScanRequest(header=asked), timeout=DEADLINE_S):
        header = reply.header
        found |= {e.key: Got(e.value, e.seq, e.expire_at_ms) for e in reply.entries}
    return header, found
