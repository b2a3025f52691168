"""Rates of requests, from what a server has told once or twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shalekv_client import ProcessRequests, RequestKind, Stats

ALL = "all"
_MINUTE_MS = 60_000


@dataclass(frozen=True, slots=True)
class Rate:
    """What a process has sent of one kind; `ALL`: of all of them."""

    process: str
    kind: str
    requests: int
    per_minute: Mapping[str, float]  # by kind


def since_start(stats: Stats) -> list[Rate]:
    """The averages since the start, by process and kind, and their totals."""
    return _with_totals(_rates(stats.processes))


def between(before: Stats, after: Stats) -> list[Rate]:
    """What was sent in between. A process that was started in between has sent all of it then."""
    begun = {process.role: process for process in before.processes}
    return _with_totals(
        _rates(_since(begun.get(process.role), process) for process in after.processes)
    )


def _since(before: ProcessRequests | None, after: ProcessRequests) -> ProcessRequests:
    if before is None or before.uptime_ms > after.uptime_ms:
        return after
    return ProcessRequests(
        after.role,
        after.uptime_ms - before.uptime_ms,
        {kind: max(0, sent - before.requests[kind]) for kind, sent in after.requests.items()},
    )


def _rates(processes: Iterable[ProcessRequests]) -> Iterator[Rate]:
    for process in processes:
        for kind, sent in process.requests.items():
            if sent:
                per_minute = sent * _MINUTE_MS / max(1, process.uptime_ms)
                yield Rate(process.role, _name(kind), sent, {_name(kind): per_minute})


def _with_totals(rates: Iterable[Rate]) -> list[Rate]:
    """The rates, then those of each kind over all processes, then the sum of everything."""
    found = list(rates)
    kinds = [_name(kind) for kind in RequestKind]
    totals = [
        _sum(kind, members)
        for kind in kinds
        if (members := [rate for rate in found if rate.kind == kind])
    ]
    return [*found, *totals, _sum(ALL, totals)]


def _sum(kind: str, rates: Iterable[Rate]) -> Rate:
    requests, per_minute = 0, dict[str, float]()
    for rate in rates:
        requests += rate.requests
        for each, value in rate.per_minute.items():
            per_minute[each] = per_minute.get(each, 0.0) + value
    return Rate(ALL, kind, requests, per_minute)


def _name(kind: RequestKind) -> str:
    return kind.name.lower()
