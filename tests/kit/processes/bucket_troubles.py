"""A database in a bucket whose store gets into trouble, the load on it, and the judgement over it.

Between its processes and a real S3 server stands a proxy, which a test tells what to do and which
can go away as a whole. Clients write, count and read all the time; whatever they were told must
hold to the end, as seen through a server and by `shalekv fsck`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from urllib.parse import urlsplit
from uuid import uuid4

from shalekv.cli.exit_codes import ExitCode
from shalekv_client import (
    Client,
    DeadlinePassed,
    OutcomeUnknown,
    ReadLevel,
    RetryPolicy,
    ShaleKVError,
)
from tests.kit.processes.child import Child, Line
from tests.kit.processes.history import Attempt, History
from tests.kit.processes.load import ONE_ATTEMPT, Load, read_state, send
from tests.kit.processes.processes import Processes
from tests.servers.proxy import Proxy, proxy_before
from tests.servers.s3 import S3Server

COUNTER = b"counted"  # by clients that repeat what they were not answered
COUNTING_TASKS = 4
PATIENT = RetryPolicy(attempts_max=1_000, backoff_max_ms=200)
COUNT_MS = 120_000
READ_MS = 5_000
STORE_UNAVAILABLE = "STORE_UNAVAILABLE"  # the reason of such an answer
IMPATIENT_MS = 5_000  # a deadline that passes while the store is in trouble

# Compactions and collections come within seconds, and so does what is repeated.
RESTLESS = (
    *("--compactor-poll-ms", "100", "--compactor-idle-poll-ms", "200"),
    *("--wal-trigger-age-ms", "200", "--collect-interval-ms", "200", "--collect-age-s", "1"),
    *("--wal-retention-s", "0"),
    *("--snapshot-ttl-s", "2", "--fence-poll-ms", "200", "--child-restart-initial-ms", "100"),
    *("--flush-interval-ms", "5", "--retry-max-ms", "200"),
)


class TroubledBucket:
    """A bucket of its own on an S3 server, reached by way of a proxy."""

    def __init__(self, s3: S3Server, records: Path | None) -> None:
        """With `records`, a file of SQLite decides who was first, in two phases."""
        self.url = f"s3://troubled-{uuid4().hex}/a/database"
        self.proxy: Proxy
        self._s3 = s3
        self._port = 0
        self._records = records
        self._stack = AsyncExitStack()

    async def appear(self) -> None:
        """The store can be reached; the first time at a port of its own choice."""
        self.proxy = await self._stack.enter_async_context(proxy_before(self._s3, self._port))
        self._port = urlsplit(self.proxy.server.endpoint).port or 0

    async def vanish(self) -> None:
        """All connections break, and no new one is accepted."""
        await self._stack.aclose()

    @property
    def troubled(self) -> Mapping[str, str]:
        """The environment of a process that meets what the proxy does."""
        return self._environment(self.proxy.server)

    @property
    def untroubled(self) -> Mapping[str, str]:
        """The environment of one that asks the server itself."""
        return self._environment(self._s3)

    def _environment(self, server: S3Server) -> dict[str, str]:
        environment = server.environment | {"SHALEKV_STORE__ENDPOINT_URL": server.endpoint}
        if self._records is not None:
            environment["SHALEKV_STORE__CAS"] = "two_phase"
            environment["SHALEKV_STORE__RECORDS_URL"] = f"sqlite://{self._records}"
        return environment


@asynccontextmanager
async def troubled_bucket(s3: S3Server, records: Path | None) -> AsyncIterator[TroubledBucket]:
    """A new bucket, in no trouble yet."""
    bucket = TroubledBucket(s3, records)
    s3.create_bucket(urlsplit(bucket.url).netloc)
    await bucket.appear()
    try:
        yield bucket
    finally:
        await bucket.vanish()


class Household:
    """The server of a database in a troubled bucket, all of its clients, and what they know."""

    def __init__(
        self, processes: Processes, bucket: TroubledBucket, tasks: asyncio.TaskGroup
    ) -> None:
        """Nothing runs yet; clients will run in `tasks`."""
        self.bucket = bucket
        self.history = History(seed=1)
        self.counts: list[int] = []  # what the counting clients were answered
        self.reads = 0  # that were answered
        self._random = Random(1)
        self._processes = processes
        self._tasks = tasks
        self._is_over = asyncio.Event()
        self._beside: list[asyncio.Task[None]] = []

    async def serve(self, *flags: str, listen: str = "127.0.0.1:0") -> Child:
        """A server with its compactor and its collector."""
        return await self._processes.serve(
            self.bucket.url, *RESTLESS, *flags, "--listen", listen, env=self.bucket.troubled
        )

    def load(self, server: Child) -> Load:
        """Put load on a server; it lasts until it is told to stop, or meets an error."""
        load = Load(self.history, server.listen, self._random, clients=6)
        self._tasks.create_task(load.run(), name=f"load on {server.listen}")
        return load

    def count_and_read(self, address: str) -> None:
        """Let clients count and read at an address, whatever becomes of the server there."""
        works = [self._count] * COUNTING_TASKS + [self._read]
        self._beside += [self._tasks.create_task(work(address)) for work in works]

    async def rest(self, load: Load) -> None:
        """End the load and what is beside it; all of it must have been answered."""
        load.stop()
        self._is_over.set()
        await load.ended.wait()
        await asyncio.gather(*self._beside)
        assert load.ended_by == []

    async def times_out(self, server: Child) -> None:
        """A write with a short deadline: it is unknown, at the deadline, what will become of it."""
        attempt = self.history.begin([b"short of time"])
        problem = await _unanswered(server.listen, attempt)
        self.history.lost_sight(attempt, problem.code)
        assert problem.code == "DEADLINE_EXCEEDED", problem

    async def is_healthy(self, server: Child) -> bool:
        """What the health service says."""
        asked = await self._processes.run("health", "--addr", server.listen)
        return await asked.exited() == ExitCode.OK

    async def judge(self, server: Child) -> None:
        """What the server shows is what clients were told, each count stands for one add."""
        state = await read_state(server.listen)
        counted = state.pop(COUNTER, None)
        self.history.check_state(state)
        assert sorted(self.counts) == list(range(1, len(self.counts) + 1))
        if self.counts:
            assert counted is not None
            assert number(counted.value) == len(self.counts)

    async def end(self, server: Child) -> None:
        """End the server: all objects are sound, and the next server shows the same."""
        await self.judge(server)
        assert await server.stop() == ExitCode.OK, server.report()
        await self.check()
        again = await self.serve("--no-with-compactor", "--no-with-collector")
        await self.judge(again)
        assert await again.stop() == ExitCode.OK, again.report()

    async def check(self) -> None:
        """Every object is as it has to be; nobody may be collecting."""
        argv = ("fsck", "--deep", "--url", self.bucket.url)
        fsck = await self._processes.run(*argv, env=self.bucket.untroubled)
        assert await fsck.exited() == ExitCode.OK, fsck.report()

    async def _count(self, address: str) -> None:
        async with Client(address, timeout_ms=COUNT_MS, retry=PATIENT) as client:
            while not self._is_over.is_set():
                self.counts.append(await client.add(COUNTER))

    async def _read(self, address: str) -> None:
        """Read what was counted: never less than what was answered before."""
        async with Client(address, timeout_ms=READ_MS, retry=PATIENT) as client:
            while not self._is_over.is_set():
                known = max(self.counts, default=0)
                try:
                    found = await client.get(COUNTER, read_level=ReadLevel.LINEARIZABLE)
                except ShaleKVError as error:
                    if not _is_of_trouble(error):
                        raise
                    continue
                assert (number(found.value) if found else 0) >= known
                self.reads += 1


def _is_of_trouble(error: ShaleKVError) -> bool:
    """Whether this is how a read may end while the store is in trouble.

    Its last attempt met the deadline, or had been told by then what the server was told.
    """
    if isinstance(error, OutcomeUnknown | DeadlinePassed):
        return True
    return error.reason == STORE_UNAVAILABLE


async def _unanswered(address: str, attempt: Attempt) -> ShaleKVError:
    async with Client(address, timeout_ms=IMPATIENT_MS, retry=ONE_ATTEMPT) as client:
        try:
            commit = await send(client, attempt)
        except OutcomeUnknown as error:
            return error
    raise AssertionError(f"acknowledged in the middle of the trouble: {commit}")


def number(value: bytes) -> int:
    """What a counter holds."""
    return int.from_bytes(value, "little", signed=True)


def event(name: str) -> Callable[[Line], bool]:
    """Accepts the log lines of one event."""
    return lambda line: line.get("event") == name


def is_collection(line: Line) -> bool:
    """Whether this log line tells of a collection that has deleted something."""
    return line.get("event") == "collected" and line["deleted_objects"] > 0
