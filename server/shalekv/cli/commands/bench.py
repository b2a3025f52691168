"""`shalekv bench`: measure the throughput and the latencies of a server.

Each client runs a closed loop over random keys. Latencies are recorded with three significant
digits of microseconds, so memory is bounded and percentiles are exact to 1 %.
"""

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
    target_options,
)
from shalekv.cli.console.option_groups import grouped_options
from shalekv.cli.console.output import Format, format_option, print_rows, printing
from shalekv.cli.console.talking import talk
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

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
Caller: TypeAlias = Client | Session

EXACT_BELOW_US = 1_000
FILL_COUNT = 1_000  # puts in one write while the keys are created
FILL_BYTES = 1024 * 1024
AFTER_ERROR_S = 0.05  # delay of a client after an error
DURATION_MS = 5_000
DURATION_MS_MAX = 3_600_000
NAMES = tuple(
    "clients through duration_ms count keys value_bytes read_percent scan_rows durability".split()
)
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9}
COLUMNS = (
    "operation",
    "count",
    "per_s",
    *(f"{name}_ms" for name in PERCENTILES),
    "max_ms",
    "errors",
)

_HELP = """Measure the throughput and the latencies of OPERATIONS on a server.

OPERATIONS are put, get, mixed, txn and scan; the default is put and get. Each client waits for the
reply before it sends the next operation. Keys are random, have their own prefix, and are deleted at
the end. A txn reads and replaces an existing key. Nothing is retried: failed operations are counted
by reason.

\b
Examples:
  shalekv bench
  shalekv bench put --clients 200 --duration 30s --through unary
  shalekv bench mixed --read-percent 95 --value-bytes 1000 --keys 100000
  shalekv bench scan --scan-rows 1000 --count 500 --format json
"""


class Latencies:
    """A histogram of latencies in bounded memory."""

    def __init__(self) -> None:
        self.count = 0
        self.max_us = 0
        self._counts: Counter[int] = Counter()

    def record(self, latency_s: float) -> None:
        """Add a latency."""
        latency_us = int(latency_s * 1e6)
        self.count += 1
        self.max_us = max(self.max_us, latency_us)
        if latency_us >= EXACT_BELOW_US:
            unit = 10 ** (len(str(latency_us)) - 3)
            latency_us = latency_us // unit * unit
        self._counts[latency_us] += 1

    def percentile_ms(self, percent: float) -> float | None:
        """The latency that `percent` of all do not exceed; None without latencies."""
        if not self.count:
            return None
        wanted = math.ceil(self.count * percent / 100.0)
        seen = 0
        for latency_us, count in sorted(self._counts.items()):
            seen += count
            if seen >= wanted:
                return latency_us / 1000.0
        return self.max_us / 1000.0


class BenchLoad(enum.Enum):
    """The kinds of operations that can be measured."""

    PUT = "put"
    GET = "get"
    MIXED = "mixed"
    TXN = "txn"
    SCAN = "scan"

    @property
    def needs_keys(self) -> bool:
        """Return whether the keys must exist before the measurement."""
        return self is not BenchLoad.PUT


class Through(enum.Enum):
    """The ways of sending operations."""

    UNARY = "unary"
    COALESCED = "coalesced"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """The parameters of a measurement."""

    through: Through
    clients: int
    duration_s: float | None
    count: int | None  # of operations; either this or the duration is given
    value_bytes: int
    keys: int
    scan_rows: int
    read_percent: int
    durability: Durability


@dataclass(slots=True)
class Measured:
    """The result of one measurement."""

    elapsed_s: float = 0.0
    latencies: dict[str, Latencies] = field(default_factory=dict)
    errors: dict[str, Counter[str]] = field(default_factory=dict)

    def succeeded(self, name: str, latency_s: float) -> None:
        """Record a success of the operation called `name`."""
        self.latencies.setdefault(name, Latencies()).record(latency_s)

    def failed(self, name: str, error: ShaleKVError) -> None:
        """Record a failure of the operation called `name`."""
        self.latencies.setdefault(name, Latencies())
        self.errors.setdefault(name, Counter())[error.reason or type(error).__name__] += 1


class Bench:
    """Runs measurements against a server, with keys under one prefix."""

    def __init__(self, client: Client, shape: WorkloadShape, prefix: bytes) -> None:
        """`client` must not retry, so that failures are counted; `prefix` must be unused."""
        self._client = client
        self._shape = shape
        self._prefix = prefix
        self._random = random.Random(1)  # noqa: S311 (for spreading load, not for secrets)
        self._value = self._random.randbytes(shape.value_bytes)
        self._end_s = 0.0
        self._left = 0

    async def fill(self, client: Client) -> None:
        """Put all keys once, with a client that may retry."""
        step = max(1, min(FILL_COUNT, FILL_BYTES // max(1, self._shape.value_bytes)))
        for first in range(0, self._shape.keys, step):
            numbers = range(first, min(first + step, self._shape.keys))
            await client.write([Put(self._key(number), self._value) for number in numbers])

    async def run(self, work: BenchLoad) -> Measured:
        """Run all clients until the duration or the count is reached.

        Raises the error if the server refuses such operations altogether.
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
                await self._run_loop(work, caller, measured)

    async def _run_loop(self, work: BenchLoad, caller: Caller, measured: Measured) -> None:
        """Run operations until the end, or until an error after which a session is unusable."""
        while self._is_on():
            self._left -= 1
            operation = self._operation(work)
            label = work.value if work is not BenchLoad.MIXED else f"mixed {operation.value}"
            began_s = time.perf_counter()
            try:
                await self._call(operation, caller)
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
            if self._random.random() * 100.0 < self._shape.read_percent
            else BenchLoad.PUT
        )

    async def _call(self, operation: BenchLoad, caller: Caller) -> None:
        key = self._key(self._random.randrange(self._shape.keys))
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
        end = self._prefix + b"~"  # sorts after all digits
        async with self._client.scan(start=start, end=end, limit=self._shape.scan_rows) as scan:
            while await scan.read():
                pass

    def _key(self, number: int) -> bytes:
        return self._prefix + b"%010d" % number


_OPTIONS = (
    click.option(
        "--clients",
        type=click.IntRange(1, 10_000),
        default=16,
        show_default=True,
        metavar="COUNT",
        help="Number of concurrent clients.",
    ),
    click.option(
        "--through",
        type=click.Choice([way.value for way in Through]),
        default=Through.COALESCED.value,
        show_default=True,
        help="Send operations each in a call, coalesced over all clients (as the Python client "
        "does by default), or in a session for each client.",
    ),
    click.option(
        "--duration",
        "duration_ms",
        callback=duration,
        metavar="TIME",
        help="How long to run each of OPERATIONS, such as 500ms, 10s, 5m.  [default: 5s]",
    ),
    click.option(
        "--count",
        type=click.IntRange(min=1),
        metavar="COUNT",
        help="How many times to run each of OPERATIONS, instead of --duration.",
    ),
    click.option(
        "--keys",
        type=click.IntRange(1, 10**9),
        default=10_000,
        show_default=True,
        metavar="COUNT",
        help="Number of keys.",
    ),
    click.option(
        "--value-bytes",
        type=click.IntRange(min=0),
        default=100,
        show_default=True,
        metavar="BYTES",
        help="Size of each value.",
    ),
    click.option(
        "--read-percent",
        type=click.IntRange(0, 100),
        default=50,
        show_default=True,
        metavar="PERCENT",
        help="Share of gets among the operations of mixed.",
    ),
    click.option(
        "--scan-rows",
        type=click.IntRange(min=1),
        default=100,
        show_default=True,
        metavar="ROWS",
        help="Number of rows that a scan reads.",
    ),
    durability_option,
)


def shape_options(command: CommandT) -> CommandT:
    """A decorator that adds the options of the workload, as the argument `shape`."""
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
        raise click.UsageError("--duration: the maximum is one hour")
    duration_s = None if count else (duration_ms or DURATION_MS) / 1000.0
    return WorkloadShape(through=Through(through), duration_s=duration_s, count=count, **given)


@click.command(help=_HELP, epilog=exit_codes_of_calls())
@click.argument("operations", nargs=-1, type=click.Choice([work.value for work in BenchLoad]))
@shape_options
@click.option("--keep", is_flag=True, help="Do not delete the keys; print their prefix.")
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
    async with target.client(
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
