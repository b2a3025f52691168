"""Reads of replicas beside a mixed load on their writer: whole scans, and reads of what was just
written. Whatever a replica tells must be a state of the log, and never older than one before.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Sequence
from random import Random

import grpc

from shalekv.v1 import kv_pb2, kv_pb2_grpc
from tests.e2e.mixed_load import SLACK_MS, MixedLoad, draw_key
from tests.judging.commits import Between, Row, SeenView, Told, Violation
from tests.kit.processes.stubs import kv_stub, reason_of

# A replica takes the time from the log, which may be so much behind while nothing is written.
BEHIND_MS = 8_000
PACE = 25  # commits between two scans of one replica
KEYS_AT_ONCE = 5
DEADLINE_S = 120.0


class ReplicaLoad:
    """Reads of some replicas, and what they told."""

    def __init__(
        self, load: MixedLoad, addresses: Sequence[str], seed: int, *, lazy: Collection[str] = ()
    ) -> None:
        """Nothing is read yet; `load` judges what is told at its end.

        Scans of `lazy` readers, which protect nothing, may end with an error that says so.
        """
        self._lazy = lazy
        self.done: Counter[str] = Counter()
        self._load = load
        self._addresses = addresses
        self._seed = seed
        self._seen: dict[str, int] = dict.fromkeys(addresses, 0)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Read until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            for number, address in enumerate(self._addresses):
                tasks.create_task(self._scan_all(address))
                tasks.create_task(self._read_own_writes(address, Random(self._seed + number)))

    def stop(self) -> None:
        """Begin nothing more; `run` returns soon."""
        self._stop.set()

    async def _scan_all(self, address: str) -> None:
        async with kv_stub(address) as stub:
            while not self._stop.is_set():
                await self._load.passed(PACE)
                reverse = self.done[address] % 2 == 1
                sent_ms, known = _now_ms(), self._seen[address]
                rows: list[Row] = []
                header = kv_pb2.ReplyHeader()
                request = kv_pb2.ScanRequest(reverse=reverse)
                try:
                    async for reply in stub.Scan(request, timeout=DEADLINE_S):
                        header = reply.header
                        rows += [
                            Row(e.key, e.value, e.seq, e.expire_at_ms or None)
                            for e in reply.entries
                        ]
                except grpc.aio.AioRpcError as error:
                    if address not in self._lazy or reason_of(error) != "SNAPSHOT_NOT_FOUND":
                        raise
                    self.done["scans that lost their levels"] += 1
                    continue
                self._check_header(address, header, known)
                self._load.views.views.append(SeenView(header.seq, _since(sent_ms), rows))
                self.done[address] += 1

    async def _read_own_writes(self, address: str, random: Random) -> None:
        """Read with the number of the newest commit that was acknowledged anywhere."""
        async with kv_stub(address) as stub:
            while not self._stop.is_set():
                await self._load.passed(1)
                min_seq = self._load.commits.last_seq if len(self._load.commits) else 0
                await self._read(stub, address, min_seq, random)
                self.done["reads of the newest"] += 1

    async def _read(
        self, stub: kv_pb2_grpc.KVStub, address: str, min_seq: int, random: Random
    ) -> None:
        keys = [draw_key(random) for _ in range(KEYS_AT_ONCE)]
        header = kv_pb2.RequestHeader(min_seq=min_seq)
        sent_ms, known = _now_ms(), self._seen[address]
        request = kv_pb2.BatchGetRequest(header=header, keys=keys)
        reply = await stub.BatchGet(request, timeout=DEADLINE_S)
        if reply.header.seq < min_seq:
            raise Violation(f"{address} shows {reply.header.seq}, and not {min_seq}")
        self._check_header(address, reply.header, known)
        now = _since(sent_ms)
        for key, found in zip(keys, reply.results, strict=True):
            told = Told(found.value, found.seq) if found.found else None
            self._load.expect(reply.header.seq, key, now, told)

    def _check_header(self, address: str, header: kv_pb2.ReplyHeader, known: int) -> None:
        """`known` is what the replica had shown before it was asked."""
        if header.role != kv_pb2.ROLE_READER:
            raise Violation(f"{address} is no reader: {header}")
        if header.seq < known:
            raise Violation(f"{address} went back from {known} to {header.seq}")
        self._seen[address] = max(self._seen[address], header.seq)


def _now_ms() -> float:
    return time.time() * 1_000


def _since(sent_ms: float) -> Between:
    return Between(sent_ms - SLACK_MS - BEHIND_MS, _now_ms() + SLACK_MS)
