"""Costs of the calls of several processes that share a port, from the statistics of each.

Requests are added as whole numbers, by kind. So the sums of each dimension stay equal to the
requests that were counted, whatever becomes a part of "other".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from decimal import Decimal

from shalekv.server.replies.costs import add_charges, counts_by_kind, request_counts
from shalekv.telemetry.costs import BACKGROUND, ORIGINS_MAX, OTHER, Charges
from shalekv.telemetry.prices import PriceList
from shalekv.v1 import admin_pb2

_METHOD = admin_pb2.OriginCost.DIMENSION_METHOD
_DIMENSIONS = (
    _METHOD,
    admin_pb2.OriginCost.DIMENSION_PRINCIPAL,
    admin_pb2.OriginCost.DIMENSION_PREFIX,
)
_OWN_NAMES = (BACKGROUND, OTHER)  # which are kept, whatever they cost


def add_statistics(whole: admin_pb2.StatsReply, other: admin_pb2.StatsReply) -> None:
    """Add the statistics of another process, the requests of both as those of one."""
    whole.usd_per_1000.update(other.usd_per_1000)
    if not whole.processes:
        whole.processes.add()
    sent = _sum_of(each for reply in (whole, other) for each in reply.processes)
    del whole.processes[0].requests[:]
    whole.processes[0].requests.extend(request_counts(sent))
    add_origins(whole, other.origins)


def add_origins(whole: admin_pb2.StatsReply, others: Iterable[admin_pb2.OriginCost]) -> None:
    """Add what the calls of other processes have cost.

    A hundred principals, and prefixes, remain: those that have cost most.
    """
    prices = PriceList.of("", {kind: Decimal(str(usd)) for kind, usd in whole.usd_per_1000.items()})
    found = [*whole.origins, *others]
    del whole.origins[:]
    for dimension in _DIMENSIONS:
        added = _added(_charges(each) for each in found if each.dimension == dimension)
        if dimension != _METHOD:
            added = _bounded(added, prices)
        add_charges(whole, prices, dimension, added)


def add_unended(stats: admin_pb2.StatsReply) -> None:
    """Add to the background what a process that has ended had sent for calls that had not."""
    sent = _sum_of(stats.processes)
    missing = []
    for dimension in _DIMENSIONS:
        left = Counter(sent)
        for origin in stats.origins:
            if origin.dimension == dimension:
                left.subtract(counts_by_kind(origin.requests))
        background = admin_pb2.OriginCost(dimension=dimension, name=BACKGROUND)
        background.requests.extend(request_counts(left))
        missing.append(background)
    add_origins(stats, missing)


def _sum_of(processes: Iterable[admin_pb2.ProcessRequests]) -> Counter[str]:
    sent = Counter[str]()
    for process in processes:
        sent.update(counts_by_kind(process.requests))
    return sent


def _charges(origin: admin_pb2.OriginCost) -> Charges:
    return Charges(origin.name, origin.calls, counts_by_kind(origin.requests))


def _added(origins: Iterable[Charges]) -> list[Charges]:
    """Return the sums of those with the same name."""
    calls, sent = Counter[str](), defaultdict[str, Counter[str]](Counter)
    for origin in origins:
        calls[origin.name] += origin.calls
        sent[origin.name].update(origin.sent)
    return [Charges(name, calls[name], each) for name, each in sent.items()]


def _bounded(origins: Iterable[Charges], prices: PriceList) -> list[Charges]:
    """Return those that have cost most, and the others as one."""

    def weight(origin: Charges) -> int:
        return prices.cost(origin.sent) or sum(origin.sent.values())

    found = [*origins]
    named = [each for each in found if each.name not in _OWN_NAMES]
    named.sort(key=weight, reverse=True)
    others = [each for each in found if each.name in _OWN_NAMES]
    others += (each._replace(name=OTHER) for each in named[ORIGINS_MAX:])
    return [*named[:ORIGINS_MAX], *_added(others)]
