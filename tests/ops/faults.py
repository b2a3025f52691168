"""Faults, and the alerts that each has to fire. A fault is there while its context is entered."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shalekv_client import Client, RetryPolicy, ShaleKVError
from tests.kit.processes.child import Child, Line, event
from tests.kit.processes.cluster import ALONE
from tests.kit.timeouts import until
from tests.ops.prometheus import SPEED
from tests.ops.site import (
    CLOCK,
    TIMEOUT_MS,
    Elected,
    Guarded,
    Main,
    Quorum,
    by_way_of,
)
from tests.servers.debian import run
from tests.servers.proxy import ACCESS_DENIED, INTERNAL_ERROR, Proxy

ONCE = RetryPolicy(attempts_max=1)
STALL_S = 0.8
MOUNT_S = 10.0
LARGE = b"y" * 100_000
RECORD = b"z" * 4_096  # of which a group has one, with the smallest --flush-bytes
LANES = 64
EARLIER_MS = 120_000 / SPEED  # so that a range of time has some scrapes before a fault


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong, and what has to be told about it."""

    title: str
    alerts: tuple[str, ...]
    inject: Callable[[], AbstractAsyncContextManager[object]]
    more_s: float = 0.0  # that it takes on a busy machine, before the condition of the alert holds


def of_main(main: Main) -> list[Fault]:
    """Faults of the store, of a reader, and of the processes of a writer."""
    return [
        Fault(
            "one PUT of the log is stalled for 800 ms", ("SlowStoreRequest",), lambda: stall(main)
        ),
        Fault(
            "each PUT of the log takes 1.5 s",
            ("SlowCalls", "CommitsSlow"),
            lambda: delayed(main.proxy, 1.5, "^PUT .*/wal/"),
        ),
        Fault(
            "the store answers 500 to everything",
            ("StoreErrors", "WritesFail", "ReadsFail", "CallsFail"),
            lambda: refusing(main.proxy, ""),
        ),
        Fault(
            "a reader is cut off from the store", ("ReaderStale",), lambda: refusing(main.far, "")
        ),
        Fault(
            "the writer is killed, and stays down",
            ("TargetDown", "NoWriter"),
            lambda: killed(main),
        ),
        Fault("the writer is paused by SIGSTOP", ("TargetDown",), lambda: paused(main)),
        Fault("the writer is killed four times", ("Restarts",), lambda: restarted(main)),
        Fault("the event loop stops for 0.7 s at a time", ("EventLoopLag",), lambda: late(main)),
        Fault("the compactor is killed three times", ("ChildCrashes",), lambda: crashing(main)),
        Fault(
            "the compactor hangs, and large values are written",
            ("WritesNearLimit", "Overloaded"),
            lambda: overloaded(main),
        ),
        Fault(
            "the store refuses SSTs and deletes (403)",
            ("CompactionFails", "CollectionFails"),
            lambda: refused_jobs(main),
        ),
        Fault("another compactor has taken over", ("ChildDown",), lambda: superseded(main)),
        Fault("SSTs of L0 are not merged", ("CompactionBehind",), lambda: unmerged(main)),
        Fault("a write to the store costs a dollar", ("CostHigh",), lambda: dear(main)),
    ]


def of_quorum(quorum: Quorum) -> list[Fault]:
    """Faults of safekeepers."""
    return [
        Fault("a safekeeper is killed", ("SafekeeperDisconnected",), lambda: without(quorum, 1)),
        Fault("two safekeepers are killed", ("QuorumLost",), lambda: without(quorum, 2)),
        Fault(
            "safekeepers are cut off from the store",
            ("LogUnarchived",),
            lambda: refusing(quorum.proxy, ""),
        ),
        Fault(
            "a safekeeper is paused by SIGSTOP, and much is written",
            ("SafekeeperLags",),
            lambda: lagging(quorum),
            more_s=900.0,
        ),
        Fault(
            "the disk of a safekeeper has 64 MiB",
            ("SafekeeperDiskNearlyFull",),
            lambda: on_small_disk(quorum),
        ),
    ]


def of_guarded(guarded: Guarded) -> list[Fault]:
    """Faults of certificates, callers, and what is written about calls."""
    return [
        Fault(
            "the certificate expires tomorrow",
            ("CertificateExpires", "CertificateExpiresNow"),
            lambda: expiring(guarded),
        ),
        Fault("a caller has no role", ("CallsDenied",), lambda: calling(guarded, "stranger")),
        Fault("a caller exceeds its quota", ("QuotaExceeded",), lambda: calling(guarded, "greedy")),
        Fault("the disk of the audit log is full", ("AuditLinesLost",), lambda: unaudited(guarded)),
        Fault("the collector of traces is away", ("SpansDropped",), lambda: untraced(guarded)),
    ]


def of_elected(elected: Elected) -> list[Fault]:
    """Faults that another writer makes."""
    return [
        Fault("another writer opens the database", ("Fenced",), lambda: fenced(elected, 1)),
        Fault(
            "other writers open the database, four times",
            ("ElectionsFlap",),
            lambda: fenced(elected, 4),
        ),
        # The last one: the database is lost.
        Fault("every SST is damaged", ("InternalErrors",), lambda: damaged(elected)),
    ]


# The store.


@asynccontextmanager
async def stall(main: Main) -> AsyncIterator[None]:
    main.proxy.delay(STALL_S, when="^PUT .*/wal/", times=1)
    yield


@asynccontextmanager
async def delayed(proxy: Proxy, delay_s: float, when: str) -> AsyncIterator[None]:
    proxy.delay(delay_s, when=when)
    try:
        yield
    finally:
        proxy.heal()


@asynccontextmanager
async def refusing(proxy: Proxy, when: str) -> AsyncIterator[None]:
    proxy.answer(INTERNAL_ERROR, when=when)
    try:
        yield
    finally:
        proxy.heal()


@asynccontextmanager
async def refused_jobs(main: Main) -> AsyncIterator[None]:
    main.proxy.answer(ACCESS_DENIED, when="^PUT .*/levels/")
    main.proxy.answer(ACCESS_DENIED, when="^(DELETE|POST .*[?&]delete)")
    try:
        yield
    finally:
        main.proxy.heal()


# The processes of a writer.


@asynccontextmanager
async def killed(main: Main) -> AsyncIterator[None]:
    await main.site.children["writer"].kill()
    yield
    await main.start_writer()


@asynccontextmanager
async def paused(main: Main) -> AsyncIterator[None]:
    writer = main.site.children["writer"]
    writer.pause()
    try:
        yield
    finally:
        writer.resume()


@asynccontextmanager
async def restarted(main: Main) -> AsyncIterator[None]:
    for _ in range(4):
        await main.site.children["writer"].kill()
        await main.start_writer()
        await CLOCK.sleep_ms(EARLIER_MS / 4)  # so that it is scraped
    yield


@asynccontextmanager
async def late(main: Main) -> AsyncIterator[None]:
    pid = main.site.children["writer"].pid  # without its children

    async def stop_and_go() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await CLOCK.sleep_ms(700)
            os.kill(pid, signal.SIGCONT)
            await CLOCK.sleep_ms(3_000)

    async with beside(stop_and_go()):
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def crashing(main: Main) -> AsyncIterator[None]:
    writer = main.site.children["writer"]
    for _ in range(3):
        has_started = grown(lambda: len(starts_of_compactor(writer)))
        os.kill(starts_of_compactor(writer)[-1], signal.SIGKILL)
        await writer.line(has_started)
    yield


@asynccontextmanager
async def overloaded(main: Main) -> AsyncIterator[None]:
    pid = starts_of_compactor(main.site.children["writer"])[-1]
    os.kill(pid, signal.SIGSTOP)
    try:
        async with (
            Client(main.site.address("writer"), timeout_ms=TIMEOUT_MS, retry=ONCE) as client,
            beside(*(put_large(client, number) for number in range(8))),
        ):
            yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def put_large(client: Client, lane: int) -> None:
    number = 0
    while True:
        number += 1
        try:
            await client.put(b"large/%d/%d" % (lane, number), LARGE)
        except ShaleKVError:
            await CLOCK.sleep_ms(200)


@asynccontextmanager
async def superseded(main: Main) -> AsyncIterator[None]:
    env = by_way_of(main.proxy)
    argv = ("compactor", "--url", main.url, "--log-format", "json")
    other = main.site.processes.start(*argv, env=env)
    try:
        yield
    finally:
        await other.stop()
        await main.site.children["writer"].stop()
        await main.start_writer()


@asynccontextmanager
async def unmerged(main: Main) -> AsyncIterator[None]:
    await main.site.children["writer"].stop()
    flags = ("--l0-trigger-count", "1000", "--wal-trigger-age-ms", "500")
    await main.start_writer(*flags, "--compactor-idle-poll-ms", "500")
    yield
    await main.site.children["writer"].stop()
    await main.start_writer()


@asynccontextmanager
async def dear(main: Main) -> AsyncIterator[None]:
    await main.site.children["writer"].stop()
    await main.start_writer("--usd-per-1000", "writes=1000")
    yield
    await main.site.children["writer"].stop()
    await main.start_writer()


def grown(count: Callable[[], int]) -> Callable[[Line], bool]:
    """Whether a count is greater than now, asked at each line of a log."""
    before = count()
    return lambda _: count() > before


def starts_of_compactor(writer: Child) -> list[int]:
    """The process ids of the compactors that it has started."""
    return [
        int(line["pid"])
        for line in writer.lines()
        if line.get("event") == "child process started" and line.get("child") == "compactor"
    ]


# Safekeepers.


@asynccontextmanager
async def without(quorum: Quorum, count: int) -> AsyncIterator[None]:
    for number in range(count):
        await quorum.site.children[f"safekeeper-{number}"].kill()
    yield
    for number in range(count):
        await quorum.start_safekeeper(number)


@asynccontextmanager
async def lagging(quorum: Quorum) -> AsyncIterator[None]:
    """Each put is a record of its own, so that there are many soon."""
    await quorum.site.children["writer-quorum"].stop()
    await quorum.start_writer("--flush-bytes", str(len(RECORD)))
    async with Client(quorum.addresses, timeout_ms=TIMEOUT_MS) as client:

        async def write(lane: int) -> None:
            while True:
                with suppress(ShaleKVError):
                    await client.put(b"lag/%d" % lane, RECORD)

        quorum.site.children["safekeeper-2"].pause()
        try:
            async with beside(*map(write, range(LANES))):
                yield
        finally:
            quorum.site.children["safekeeper-2"].resume()
    await quorum.site.children["writer-quorum"].stop()
    await quorum.start_writer()


@asynccontextmanager
async def on_small_disk(quorum: Quorum) -> AsyncIterator[None]:
    """A safekeeper of no database, on a disk of its own; needs root."""
    disk = quorum.site.folder / "small"
    disk.mkdir()
    run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(disk)], within_s=MOUNT_S)
    try:
        argv = ("safekeeper", "--data", f"{disk}/data", "--url", f"file://{disk}/bucket")
        small = await quorum.site.start("safekeepers", "safekeeper-small", *argv)
        yield
        await small.stop()
    finally:
        run(["umount", "--lazy", str(disk)], within_s=MOUNT_S)


# Callers and credentials.


@asynccontextmanager
async def expiring(guarded: Guarded) -> AsyncIterator[None]:
    guarded.renew(1)
    yield
    guarded.renew(90)


@asynccontextmanager
async def calling(guarded: Guarded, name: str) -> AsyncIterator[None]:
    async with guarded.client(name) as client:

        async def call() -> None:
            while True:
                with suppress(ShaleKVError):
                    await client.get(b"key", timeout_ms=200)
                await CLOCK.sleep_ms(50)

        async with beside(call(), call()):
            yield


@asynccontextmanager
async def unaudited(guarded: Guarded) -> AsyncIterator[None]:
    await guarded.site.children["guarded"].stop()
    await guarded.start_writer("--audit-log", "/dev/full", "--audit-level", "all")
    yield
    await guarded.site.children["guarded"].stop()
    await guarded.start_writer()


@asynccontextmanager
async def untraced(guarded: Guarded) -> AsyncIterator[None]:
    await guarded.site.children["guarded"].stop()
    await guarded.start_writer("--otlp-endpoint", "http://127.0.0.1:9", "--trace-ratio", "1")
    yield
    await guarded.site.children["guarded"].stop()
    await guarded.start_writer()


# Another writer.


@asynccontextmanager
async def fenced(elected: Elected, times: int) -> AsyncIterator[None]:
    child = elected.site.children["elected"]

    def count_of(name: str) -> Callable[[], int]:
        return lambda: sum(map(event(name), child.lines()))

    for _ in range(times):
        is_fenced, serves_again = grown(count_of("standing by again")), grown(count_of("serving"))
        other = await elected.site.processes.serve(elected.url, *ALONE)
        await child.line(is_fenced)
        await other.stop()
        await child.line(serves_again)
    yield


@asynccontextmanager
async def damaged(elected: Elected) -> AsyncIterator[None]:
    levels = Path(elected.url.removeprefix("file://")) / "levels"
    await until(lambda: any(levels.glob("*.sst")), "an SST")
    await elected.site.children["elected"].stop()
    for file in levels.glob("*.sst"):
        data = bytearray(file.read_bytes())
        data[: len(data) // 2] = bytes(len(data) // 2)
        file.write_bytes(data)
    await elected.start()
    yield


@asynccontextmanager
async def beside(*running: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """These coroutines run while entered."""
    async with asyncio.TaskGroup() as tasks:
        started_tasks = [tasks.create_task(each) for each in running]
        try:
            yield
        finally:
            for task in started_tasks:
                task.cancel()
