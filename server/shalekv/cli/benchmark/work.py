"""What the clients of `shalekv bench` do: a closed loop each, over random keys."""

from __future__ import annotations

import asyncio
import enum
import math
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from shalekv.cli.benchmark.latencies import Latencies
from shalekv_client import (
    Client,
    Durability,
    Exists,
    Get,
    InvalidRequest,
    NotSent,
    OutcomeUnknown,
    Put,
    Session,
    ShaleKVError,
    Unimplemented,
)

FILL_COUNT = 1_000  # puts of one write while keys are made
FILL_BYTES = 1024 * 1024
AFTER_ERROR_S = 0.05  # a server that refuses is not asked again at once

Caller: TypeAlias = Client | Session


class Work(enum.Enum):
    """What is asked of the server, again and again."""

    PUT = "put"
    GET = "get"
    MIXED = "mixed"
    TXN = "txn"
    SCAN = "scan"

    @property
    def needs_keys(self) -> bool:
        """Whether there must be something before it begins."""
        return self is not Work.PUT


class Through(enum.Enum):
    """How operations travel."""

    UNARY = "unary"
    COALESCED = "coalesced"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of what."""

    through: Through
    clients: int
    duration_s: float | None
    count: int | None  # of operations; this or the duration is given
    value_bytes: int
    keys: int
    scan_rows: int
    read_percent: int
    durability: Durability


@dataclass(slots=True)
class Measured:
    """What came of one kind of work."""

    elapsed_s: float = 0.0
    latencies: dict[str, Latencies] = field(default_factory=dict)
    errors: dict[str, Counter[str]] = field(default_factory=dict)

    def succeeded(self, name: str, latency_s: float) -> None:
        """An operation called `name` took this long."""
        self.latencies.setdefault(name, Latencies()).record(latency_s)

    def failed(self, name: str, error: ShaleKVError) -> None:
        """An operation called `name` failed."""
        self.latencies.setdefault(name, Latencies())
        self.errors.setdefault(name, Counter())[error.reason or type(error).__name__] += 1


class Bench:
    """Asks one server, with keys under one prefix."""

    def __init__(self, client: Client, shape: Shape, prefix: bytes) -> None:
        """`client` repeats nothing, so that what fails is seen; `prefix` is nobody else's."""
        self._client = client
        self._shape = shape
        self._prefix = prefix
        self._chance = random.Random(1)  # noqa: S311 (it spreads load; nothing is kept secret)
        self._value = self._chance.randbytes(shape.value_bytes)
        self._end_s = 0.0
        self._left = 0

    async def fill(self, client: Client) -> None:
        """Put all keys once, with a client that may repeat."""
        step = max(1, min(FILL_COUNT, FILL_BYTES // max(1, self._shape.value_bytes)))
        for first in range(0, self._shape.keys, step):
            numbers = range(first, min(first + step, self._shape.keys))
            await client.write([Put(self._key(number), self._value) for number in numbers])

    async def run(self, work: Work) -> Measured:
        """Let all clients work, to the end of the time or the count.

        Raises what makes all of it futile: that the server refuses such operations.
        """
        measured = Measured()
        began_s = time.perf_counter()
        self._end_s = began_s + (self._shape.duration_s or math.inf)
        self._left = self._shape.count or sys.maxsize
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._shape.clients):
                    tasks.create_task(self._work(work, measured))
        except BaseExceptionGroup as group:
            refusals, others = group.split(ShaleKVError)
            if refusals is None or others is not None:
                raise
            raise refusals.exceptions[0] from None
        measured.elapsed_s = time.perf_counter() - began_s
        return measured

    async def _work(self, work: Work, measured: Measured) -> None:
        while self._is_on():
            async with self._caller() as caller:
                await self._ask_again_and_again(work, caller, measured)

    async def _ask_again_and_again(self, work: Work, caller: Caller, measured: Measured) -> None:
        """Until the end, or until the caller may be of no use any more."""
        while self._is_on():
            self._left -= 1
            operation = self._operation(work)
            label = work.value if work is not Work.MIXED else f"mixed {operation.value}"
            began_s = time.perf_counter()
            try:
                await self._ask(operation, caller)
            except (Unimplemented, InvalidRequest):
                raise
            except ShaleKVError as error:
                measured.failed(label, error)
                await asyncio.sleep(AFTER_ERROR_S)
                if isinstance(error, OutcomeUnknown | NotSent):
                    return
            else:
                measured.succeeded(label, time.perf_counter() - began_s)

    def _is_on(self) -> bool:
        return self._left > 0 and time.perf_counter() < self._end_s

    @asynccontextmanager
    async def _caller(self) -> AsyncIterator[Caller]:
        if self._shape.through is Through.SESSION:
            async with self._client.session() as session:
                yield session
        else:
            yield self._client

    def _operation(self, work: Work) -> Work:
        if work is not Work.MIXED:
            return work
        return Work.GET if self._chance.random() * 100.0 < self._shape.read_percent else Work.PUT

    async def _ask(self, operation: Work, caller: Caller) -> None:
        key = self._key(self._chance.randrange(self._shape.keys))
        durability = self._shape.durability
        match operation:
            case Work.PUT:
                await caller.put(key, self._value, durability=durability)
            case Work.GET:
                await caller.get(key)
            case Work.TXN:
                put = Put(key, self._value)
                await caller.txn([Exists(key)], [Get(key), put], [put], durability=durability)
            case _:
                await self._scan(key)

    async def _scan(self, start: bytes) -> None:
        end = self._prefix + b"~"  # behind all digits
        async with self._client.scan(start=start, end=end, limit=self._shape.scan_rows) as scan:
            while await scan.read():
                pass

    def _key(self, number: int) -> bytes:
        return self._prefix + b"%010d" % number
