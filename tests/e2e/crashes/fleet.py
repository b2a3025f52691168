"""The processes of one database: each role a process of its own, with settings that make haste.

Ages, leases and lives of snapshots are the shortest that settings allow. A process may be started
so that it stops itself at one of its requests to the store, its `pin`; and collectors keep a copy
of what they delete, for the judgement.
"""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from shalekv.cli.console.exit_codes import ExitCode
from shalekv.settings import StoreSettings
from shalekv.store.local import LocalStore
from shalekv.store.opening import open_store
from tests.kit.constants import variables
from tests.kit.processes.bucket_troubles import TroubledBucket
from tests.kit.processes.child import Child, Line, event
from tests.kit.processes.cluster import Cluster
from tests.kit.processes.in_process import real_runtime
from tests.kit.processes.stalling import start_stalling
from tests.kit.timeouts import until
from tests.servers.proxy import INTERNAL_ERROR, Proxy
from tests.sim.stored import Stored, gather

WITHIN_S = 120.0  # generous: other tests may have the machine
COLLECT_AGE_MS = 1_000
LIFE_S = "2"  # shortest permitted life of leases and of servers' snapshots
LOGS = ("--log-format", "json")
STOPPED = "T"  # state of a stopped process in the kernel's report
# A request that is not answered is soon repeated.
IMPATIENT = ("--request-timeout-ms", "1200")
QUICK = {
    "shalekv.store.retry:CONNECT_TIMEOUT_MS": 1_000,
    "shalekv.store.retry:RETRY_INITIAL_MS": 20,
    "shalekv.store.retry:RETRY_MAX_MS": 200,
}
MANY_LEVELS = {"shalekv.protocol.compaction.policy:LEVEL_MULTIPLIER": 2}
BETWEEN_FAULTS = 10  # requests to the store, on the average
WAITING_FAULTS_MAX = 3
DELAYS_S = (0.1, 3.0)  # the longest are longer than anybody waits for an answer


class Role(enum.Enum):
    """Role of a process."""

    WRITER = "writer"
    COMPACTOR = "compactor"
    COLLECTOR = "collector"
    READER = "reader"


FLAGS = {
    Role.WRITER: (
        *("serve", "--create", "--no-with-compactor", "--no-with-collector"),
        *("--snapshot-ttl-s", LIFE_S, "--flush-interval-ms", "10", "--wal-codec", "none"),
        *("--fence-poll-ms", "500"),
    ),
    Role.COMPACTOR: (
        *("compactor", "--compactor-idle-poll-ms", "100"),
        *("--wal-trigger-bytes", "32768", "--wal-trigger-age-ms", "400", "--l0-trigger-count", "2"),
        *("--base-level-bytes", "65536", "--sst-bytes", "65536"),
        *("--block-bytes", "4096", "--codec", "none"),
        *("--compactor-lease-ttl-s", LIFE_S),
    ),
    Role.COLLECTOR: (
        *("collector", "--collect-interval-ms", "150", "--wal-retention-s", "2"),
        *("--collect-age-s", str(COLLECT_AGE_MS // 1_000)),
    ),
    Role.READER: (
        *("reader", "--poll-interval-ms", "50", "--manifest-interval-ms", "200"),
        *("--reader-snapshot-ttl-s", LIFE_S),
    ),
}
# In the middle of what a process of a role does once it is at work, and how often before. Readers
# are met at any moment: they change nothing but their own snapshots.
PINS = {
    Role.WRITER: [
        ("before create wal/", 15, 40),
        ("after create wal/", 15, 40),
        ("before create manifest/", 6, 9),
        ("after create manifest/", 6, 9),
    ],
    Role.COMPACTOR: [
        ("before create levels/", 1, 6),
        ("after create levels/", 1, 6),
        # Behind its claim, however often that met edits of others: else it is not overtaken there.
        ("before create manifest/", 4, 9),
        ("after create manifest/", 4, 9),
    ],
    Role.COLLECTOR: [("after list levels/", 2, 6), ("after list wal/", 2, 6)],
}


def draw_pin(role: Role, random: Random) -> str:
    """A moment in the middle of the work of a role; empty: any moment."""
    if role not in PINS:
        return ""
    what, first, last = random.choice(PINS[role])
    return f"{what} {random.randint(first, last)}"


def now_us() -> int:
    """Microseconds since an arbitrary moment; the same clock for all processes of the machine."""
    return time.monotonic_ns() // 1_000


@dataclass(slots=True, eq=False)
class Serving:
    """One process that serves, or has served."""

    child: Child
    epoch: int = 0  # of a writer
    is_gone: bool = False  # whether it certainly answers nothing any more


@dataclass(slots=True)
class Fleet:
    """Starts the processes of one database, and follows their logs.

    The database is in a folder, or in a `bucket`. Objects that collectors delete go to the folder
    `kept`.
    """

    cluster: Cluster
    bucket: TroubledBucket | None
    kept: Path
    random: Random
    writers: list[Serving] = field(default_factory=list)  # all that ever served, oldest first
    readers: list[Serving] = field(default_factory=list)  # running ones
    _started: dict[Role, list[Child]] = field(default_factory=lambda: {role: [] for role in Role})

    def start(self, role: Role, *, pin: str = "", listen: str = "127.0.0.1:0") -> Child:
        argv, endpoint = [*FLAGS[role], "--url", self.cluster.url, *LOGS], ""
        if self.bucket is not None:
            argv += IMPATIENT
            endpoint = self.bucket.s3.endpoint
        if role in (Role.WRITER, Role.READER):
            argv += ["--listen", listen]
        if role is Role.WRITER:
            argv += ["--max-parallel-writes", str(self.random.choice([1, 4]))]
        keep = f"{self.kept}#{endpoint}" if role is Role.COLLECTOR else ""
        constants = MANY_LEVELS | (QUICK if self.bucket is not None else {})
        env = self.cluster.env | variables(constants)
        if pin or keep:
            child = start_stalling(self.cluster.processes, pin, *argv, keep=keep, env=env)
        else:
            child = self.cluster.processes.start(*argv, env=env)
        self._started[role].append(child)
        return child

    async def make_store_faults(self) -> None:
        """Delay and refuse requests and lose replies, at random, until cancelled."""
        assert self.bucket is not None
        proxy = self.bucket.proxy
        try:
            while True:
                # After a number of requests, not after a time: a lone client is not to meet each
                # fault.
                await self._requests(self.random.randint(1, 2 * BETWEEN_FAULTS))
                proxy.rules[:] = [rule for rule in proxy.rules if not rule.spent]
                if len(proxy.rules) < WAITING_FAULTS_MAX:
                    self._add_store_fault(proxy)
        finally:
            proxy.heal()

    async def _requests(self, count: int) -> None:
        """Wait until the store was asked so often."""
        assert self.bucket is not None
        seen = self.bucket.proxy.seen
        at = len(seen) + count
        await until(lambda: len(seen) >= at, "requests", within_s=WITHIN_S)

    def _add_store_fault(self, proxy: Proxy) -> None:
        match self.random.randrange(4):
            case 0:
                proxy.lose_reply("", times=1)
            case 1:
                proxy.answer(INTERNAL_ERROR, times=1)
            case _:
                proxy.delay(self.random.uniform(*DELAYS_S), times=1)

    def deletions(self) -> int:
        return sum(
            line["deleted_objects"]
            for child in self._started[Role.COLLECTOR]
            for line in events(child, "collected")
        )

    async def stop(self) -> None:
        """Ask all that run to end, which they must do well."""
        running = [each for some in self._started.values() for each in some if each.running]
        for child in running:
            child.resume()  # it may be stopped at its pin
        codes = await asyncio.gather(*(child.stop(within_s=WITHIN_S) for child in running))
        for child, code in zip(running, codes, strict=True):
            assert code == ExitCode.OK, child.report()

    async def stored(self) -> Stored:
        """All that was ever there: what was deleted, and what there is now that all have ended."""
        with real_runtime() as runtime:
            kept, settings = LocalStore(self.kept, runtime), StoreSettings()
            with pytest.MonkeyPatch.context() as environment:
                if self.bucket is not None:
                    settings = StoreSettings(endpoint_url=self.bucket.s3.endpoint)
                    for name, value in self.bucket.s3.environment.items():
                        environment.setenv(name, value)
                store = open_store(self.cluster.url, runtime, settings)
                try:
                    return await gather(kept, store)
                finally:
                    await store.close()


def events(child: Child, name: str) -> list[Line]:
    return list(filter(event(name), child.lines()))


def is_stopped(child: Child) -> bool:
    try:
        stat = Path(f"/proc/{child.pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] == STOPPED
