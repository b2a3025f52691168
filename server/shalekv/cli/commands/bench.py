"""`shalekv bench`: how many operations a server does, and how long each takes."""

from __future__ import annotations

import asyncio
import enum
import math
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import click

from shalekv.cli.console.connection import (
    Target,
    durability_option,
    exit_codes_of_calls,
    talk,
    target_options,
)
from shalekv.cli.console.option_groups import grouped_options
from shalekv.cli.console.output import Format, format_option, print_rows, printing
from shalekv.cli.console.units import duration
from shalekv_client import (
    Client,
    Durability,
    Exists,
    Get,
    InvalidRequest,
    NotSent,
    OutcomeUnknown,
    Put,
    RetryPolicy,
    Session,
    ShaleKVError,
    Unimplemented,
)

# --- latencies
# Latencies in bounded memory, as three digits of microseconds: percentiles are right to 1 %.


EXACT_BELOW_US = 1_000


class Latencies:
    """Counts latencies, however many there are."""

    def __init__(self) -> None:
        """There are none yet."""
        self.count = 0
        self.max_us = 0
        self._counts: Counter[int] = Counter()

    def record(self, latency_s: float) -> None:
        """One more."""
        latency_us = int(latency_s * 1e6)
        self.count += 1
        self.max_us = max(self.max_us, latency_us)
        if latency_us >= EXACT_BELOW_US:
            unit = 10 ** (len(str(latency_us)) - 3)
            latency_us = latency_us // unit * unit
        self._counts[latency_us] += 1

    def percentile_ms(self, percent: float) -> float | None:
        """The latency that `percent` of all don't exceed; None when there are none."""
        if not self.count:
            return None
        wanted = math.ceil(self.count * percent / 100.0)
        seen = 0
        for latency_us, count in sorted(self._counts.items()):
            seen += count
            if seen >= wanted:
                return latency_us / 1000.0
        return self.max_us / 1000.0


# --- work
# What the clients of `shalekv bench` do: a closed loop each, over random keys.


FILL_COUNT = 1_000  # puts of one write while keys are made
FILL_BYTES = 1024 * 1024
AFTER_ERROR_S = 0.05  # a server that refuses is not asked again at once

Caller: TypeAlias = Client | Session


class BenchLoad(enum.Enum):
    """What is asked of the server, again and again."""

    PUT = "put"
    GET = "get"
    MIXED = "mixed"
    TXN = "txn"
    SCAN = "scan"

    @property
    def needs_keys(self) -> bool:
        """Whether there must be something before it begins."""
        return self is not BenchLoad.PUT


class Through(enum.Enum):
    """How operations travel."""

    UNARY = "unary"
    COALESCED = "coalesced"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class WorkloadShape:
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

    def __init__(self, client: Client, shape: WorkloadShape, prefix: bytes) -> None:
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

    async def run(self, work: BenchLoad) -> Measured:
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

    async def _work(self, work: BenchLoad, measured: Measured) -> None:
        while self._is_on():
            async with self._caller() as caller:
                await self._ask_again_and_again(work, caller, measured)

    async def _ask_again_and_again(
        self, work: BenchLoad, caller: Caller, measured: Measured
    ) -> None:
        """Until the end, or until the caller may be of no use any more."""
        while self._is_on():
            self._left -= 1
            operation = self._operation(work)
            label = work.value if work is not BenchLoad.MIXED else f"mixed {operation.value}"
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

    def _operation(self, work: BenchLoad) -> BenchLoad:
        if work is not BenchLoad.MIXED:
            return work
        return (
            BenchLoad.GET
            if self._chance.random() * 100.0 < self._shape.read_percent
            else BenchLoad.PUT
        )

    async def _ask(self, operation: BenchLoad, caller: Caller) -> None:
        key = self._key(self._chance.randrange(self._shape.keys))
        durability = self._shape.durability
        match operation:
            case BenchLoad.PUT:
                await caller.put(key, self._value, durability=durability)
            case BenchLoad.GET:
                await caller.get(key)
            case BenchLoad.TXN:
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


# --- options
# The options of `shalekv bench` that say how much of what.


CommandT = TypeVar("CommandT", bound=Callable[..., Any])

DURATION_MS = 5_000
DURATION_MS_MAX = 3_600_000
NAMES = tuple(
    "clients through duration_ms count keys value_bytes read_percent scan_rows durability".split()
)

_OPTIONS = (
    click.option(
        "--clients",
        type=click.IntRange(1, 10_000),
        default=16,
        show_default=True,
        metavar="COUNT",
        help="How many ask at the same time.",
    ),
    click.option(
        "--through",
        type=click.Choice([way.value for way in Through]),
        default=Through.COALESCED.value,
        show_default=True,
        help="A call for each operation; operations of all clients together, as the Python client "
        "does; or a session for each client.",
    ),
    click.option(
        "--duration",
        "duration_ms",
        callback=duration,
        metavar="TIME",
        help="How long each of OPERATIONS is asked for, such as 500ms, 10s, 5m.  [default: 5s]",
    ),
    click.option(
        "--count",
        type=click.IntRange(min=1),
        metavar="COUNT",
        help="How often each of OPERATIONS is asked for, instead of --duration.",
    ),
    click.option(
        "--keys",
        type=click.IntRange(1, 10**9),
        default=10_000,
        show_default=True,
        metavar="COUNT",
        help="How many keys there are.",
    ),
    click.option(
        "--value-bytes",
        type=click.IntRange(min=0),
        default=100,
        show_default=True,
        metavar="BYTES",
        help="How large each value is.",
    ),
    click.option(
        "--read-percent",
        type=click.IntRange(0, 100),
        default=50,
        show_default=True,
        metavar="PERCENT",
        help="How many operations of mixed are gets.",
    ),
    click.option(
        "--scan-rows",
        type=click.IntRange(min=1),
        default=100,
        show_default=True,
        metavar="ROWS",
        help="How many rows a scan reads.",
    ),
    durability_option,
)


def shape_options(command: CommandT) -> CommandT:
    """A decorator that adds all of them, as the argument `shape`."""
    command = grouped_options("shape", NAMES, _shape)(command)
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _shape(
    *, through: str, duration_ms: int | None, count: int | None, **given: Any
) -> WorkloadShape:
    if duration_ms is not None and count is not None:
        raise click.UsageError("--duration and --count exclude each other")
    if (duration_ms or 0) > DURATION_MS_MAX:
        raise click.UsageError("--duration: an hour is the most")
    duration_s = None if count else (duration_ms or DURATION_MS) / 1000.0
    return WorkloadShape(through=Through(through), duration_s=duration_s, count=count, **given)


# --- bench


PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9}
COLUMNS = (
    "operation",
    "count",
    "per_s",
    *(f"{name}_ms" for name in PERCENTILES),
    "max_ms",
    "errors",
)

_HELP = """Ask a server for OPERATIONS (put, get, mixed, txn, scan; put and get if there are none).

Each client waits for its answer before it asks again. Keys are random; they have a prefix of their
own, and are deleted at the end. A txn reads and replaces a key that exists. Nothing is repeated:
what fails is counted under its reason.

\b
Examples:
  shalekv bench
  shalekv bench put --clients 200 --duration 30s --through unary
  shalekv bench mixed --read-percent 95 --value-bytes 1000 --keys 100000
  shalekv bench scan --scan-rows 1000 --count 500 --format json
"""


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("operations", nargs=-1, type=click.Choice([work.value for work in BenchLoad]))
@shape_options
@click.option("--keep", is_flag=True, help="Leave the keys where they are, and say their prefix.")
@format_option
@target_options
def bench(
    *,
    operations: Sequence[str],
    shape: WorkloadShape,
    keep: bool,
    output_format: Format,
    target: Target,
) -> None:
    """Measure, clean up, and print a row for each kind of operation."""
    works = [BenchLoad(name) for name in operations] or [BenchLoad.PUT, BenchLoad.GET]
    prefix = f"shalekv-bench/{uuid.uuid4().hex}/"

    async def call(client: Client) -> list[Measured]:
        try:
            return await _measured(client, target, works, shape, prefix.encode())
        finally:
            if keep:
                click.echo(f"kept: all keys that begin with {prefix}", err=True)
            else:
                await _cleaned_up(client, prefix)

    click.echo(
        f"{', '.join(target.addresses)}: {shape.clients:,} clients, {shape.through.value}; "
        f"{shape.keys:,} keys, values of {shape.value_bytes:,} bytes",
        err=True,
    )
    found = talk(target, call)
    with printing():
        rows = [row for measured in found for row in _rows(measured, output_format)]
        print_rows(output_format, COLUMNS, rows)


async def _measured(
    client: Client, target: Target, works: Sequence[BenchLoad], shape: WorkloadShape, prefix: bytes
) -> list[Measured]:
    async with Client(
        target.addresses,
        timeout_ms=target.timeout_ms,
        retry=RetryPolicy(attempts_max=1),
        reads=target.reads,
        coalesce=shape.through is Through.COALESCED,
    ) as measured_client:
        run = Bench(measured_client, shape, prefix)
        if any(work.needs_keys for work in works):
            await run.fill(client)
        return [await run.run(work) for work in works]


async def _cleaned_up(client: Client, prefix: str) -> None:
    try:
        await client.delete_range(prefix=prefix.encode())
    except ShaleKVError as error:
        advice = f"`shalekv delete --prefix {prefix}` deletes what is left"
        click.echo(f"Error: {error}\n{advice}", err=True)


def _rows(measured: Measured, output_format: Format) -> list[Sequence[Any]]:
    rows: list[Sequence[Any]] = []
    for label, latencies in measured.latencies.items():
        errors: Mapping[str, int] = measured.errors.get(label, {})
        listed = ", ".join(f"{reason}: {count:,}" for reason, count in errors.items())
        milliseconds = [latencies.percentile_ms(percent) for percent in PERCENTILES.values()]
        milliseconds.append(latencies.max_us / 1000.0 if latencies.count else None)
        rows.append(
            (
                label,
                latencies.count,
                round(latencies.count / max(measured.elapsed_s, 1e-9)),
                *milliseconds,
                dict(errors) if output_format is Format.JSON else listed or None,
            )
        )
    return rows
