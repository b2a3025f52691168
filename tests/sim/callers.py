"""Clients: they write and read at writers at random, and repeat what they were not told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random

from shalekv.v1 import kv_pb2
from tests.kit.model import watched_keys
from tests.sim.calls import Calls
from tests.sim.cluster import Cluster
from tests.sim.history import Operation, Outcome, WriteRequest
from tests.sim.invariants.peace import check_i13_reads_are_answered, check_i13_writes_succeed
from tests.sim.requests import KEYS, Requests
from tests.sim.script import Gate

ATTEMPTS_MAX = 4
TTL_SHARES = (0.05, 0.2, 0.6)  # of what is put in a run, that expires
REPEATS_AT_ONCE = 20  # when all are repeated
TIMEOUTS_MS = (50.0, 2_000.0, 30_000.0)
PATIENT_MS = TIMEOUTS_MS[-1]
SETTLED = (Outcome.ACKNOWLEDGED, Outcome.IN_MEMORY, Outcome.REFUSED)


class Callers:
    """The clients of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        """None of them does anything yet."""
        self._cluster = cluster
        self._world = cluster.world
        self._operations = cluster.history.operations
        self._calls = Calls(cluster)
        self._ttl_share = cluster.world.random_for("expiry").choice(TTL_SHARES)

    async def client(self, number: int) -> None:
        """Use writers at random, until cancelled."""
        random = self._world.random_for(f"client {number}")
        while True:
            await self._world.sleep_ms(random.choice([0.0, 20.0, 1_000.0]) * self._cluster.pace)
            name = await self._any_writer(random)
            async with asyncio.TaskGroup() as tasks:  # what is asked at once may commit at once
                for _ in range(random.choice([1, 2, 4])):
                    key, drawn = random.choice(KEYS), random.random()
                    if drawn < 0.8:
                        tasks.create_task(self._change(random, name))
                    elif drawn < 0.88:
                        level = kv_pb2.READ_LEVEL_COMMITTED
                        tasks.create_task(self._calls.get(key, level, name))
                    elif drawn < 0.96:
                        level = kv_pb2.READ_LEVEL_LINEARIZABLE
                        tasks.create_task(self._calls.get(key, level, name))
                    else:
                        tasks.create_task(self._calls.scan(name))

    async def contend(self, random: Random, name: str, gate: Gate, count: int) -> None:
        """Ask for what rests on the state, then change that while the first is on its way.

        `gate` holds the object that it is in.
        """
        requests = self._requests(random)
        first = self._begin(requests.draw_resting, random)
        async with asyncio.TaskGroup() as tasks:
            if random.random() < 0.3:
                before = self._begin(partial(requests.draw_plain, keys=KEYS), random)
                tasks.create_task(self._calls.attempt(before, name, PATIENT_MS))
            tasks.create_task(self._attempt_twice(first, name, random))
            await self._cluster.reached(gate)
            for _ in range(count):
                plain = partial(requests.draw_plain, keys=watched_keys(first.request, KEYS))
                other = self._begin(plain, random)
                tasks.create_task(self._calls.attempt(other, name, random.choice(TIMEOUTS_MS)))

    async def ask_once(self, random: Random, name: str) -> None:
        """Ask for what reads the state, and do not repeat it."""
        operation = self._begin(self._requests(random).draw_reading, random)
        await self._calls.attempt(operation, name, PATIENT_MS)

    async def write_once(self, random: Random, name: str) -> None:
        """Write what does not rest on the state, often only to memory, and do not repeat it."""
        operation = self._begin(partial(self._requests(random).draw_plain, keys=KEYS), random)
        if random.random() < 0.4:
            operation.request.durability = kv_pb2.DURABILITY_MEMORY
        await self._calls.attempt(operation, name, PATIENT_MS)

    async def put_one(self, name: str) -> None:
        """Put a key and be told so (I13)."""
        check_i13_writes_succeed(await self.try_to_put(name))

    async def try_to_put(self, name: str) -> Operation:
        """Put a key; what became of it."""
        operation = self._begin(lambda n: kv_pb2.PutRequest(key=KEYS[0], value=b"v%d" % n), None)
        await self._calls.attempt(operation, name, PATIENT_MS)
        return operation

    async def read_all(self, name: str) -> None:
        """Get every key, and scan (I13)."""
        history = self._cluster.history
        before = len(history.reads), len(history.scans)
        for key in KEYS:
            await self._calls.get(key, kv_pb2.READ_LEVEL_LINEARIZABLE, name)
        await self._calls.scan(name)
        answered = len(history.reads) - before[0], len(history.scans) - before[1]
        check_i13_reads_are_answered(name, answered, (len(KEYS), 1))

    async def repeat_all(self, name: str) -> None:
        """Send every request that has an idempotency key once more."""
        keyed = [operation for operation in self._operations if operation.key]
        for first in range(0, len(keyed), REPEATS_AT_ONCE):
            async with asyncio.TaskGroup() as tasks:
                for operation in keyed[first : first + REPEATS_AT_ONCE]:
                    tasks.create_task(self._calls.attempt(operation, name, PATIENT_MS))

    async def _change(self, random: Random, name: str) -> None:
        """One operation, at any writer that serves by then, until it is told or given up.

        At times it is sent twice at once, and at times repeated although it was told.
        """
        operation = self._begin(self._requests(random).draw, random)
        for _ in range(ATTEMPTS_MAX):
            timeout_ms = random.choice(TIMEOUTS_MS)
            names = [name]
            if operation.key and random.random() < 0.1:
                names.append(random.choice([name, await self._any_writer(random)]))
            async with asyncio.TaskGroup() as tasks:
                for each in names:
                    tasks.create_task(self._calls.attempt(operation, each, timeout_ms))
            is_settled = any(attempt.outcome in SETTLED for attempt in operation.attempts)
            if not operation.key or random.random() < (0.9 if is_settled else 0.1):
                return
            await self._world.sleep_ms(random.choice([0.0, 20.0, 1_000.0]))
            name = await self._any_writer(random)

    async def _attempt_twice(self, operation: Operation, name: str, random: Random) -> None:
        await self._calls.attempt(operation, name, PATIENT_MS)
        if operation.key and random.random() < 0.7:
            await self._calls.attempt(operation, name, PATIENT_MS)

    async def _any_writer(self, random: Random) -> str:
        """One of those that serve, as soon as there is one; mostly the newest."""
        cluster = self._cluster
        while not (names := [name for name in cluster.writers if name not in cluster.avoided]):
            await cluster.serving.wait()
            await self._world.sleep_ms(100.0 * cluster.pace)
        if random.random() < 0.6:
            return max(names, key=lambda name: cluster.writers[name].epoch)
        return random.choice(names)

    def _begin(self, draw: Callable[[int], WriteRequest], random: Random | None) -> Operation:
        """The next operation, in most cases with an idempotency key if `random` draws one."""
        number = len(self._operations) + 1
        operation = Operation(number, draw(number))
        if random is not None and random.random() < 0.75:
            key = bytearray(self._world.store.clock_ms().to_bytes(6, "big") + random.randbytes(10))
            key[6], key[8] = 0x70 | key[6] & 0xF, 0x80 | key[8] & 0x3F  # a UUID of version 7
            operation.request.header.idempotency_key = bytes(key)
        self._operations.append(operation)
        return operation

    def _requests(self, random: Random) -> Requests:
        return Requests(random, self._calls.known, self._ttl_share)
