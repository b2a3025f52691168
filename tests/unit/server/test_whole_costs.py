"""The costs of processes that share a port are the sums of theirs, to the last request."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

from shalekv.server.replies.costs import counts_by_kind, fill_origins, request_counts
from shalekv.server.replies.whole_costs import add_statistics, add_unended
from shalekv.store.api import RequestKind
from shalekv.telemetry.activity import Activity
from shalekv.telemetry.costs import BACKGROUND, ORIGINS_MAX, OTHER
from shalekv.telemetry.prices import OBJECTS
from shalekv.v1 import admin_pb2
from tests.unit.telemetry.test_costs import Process

PRICES = OBJECTS["s3"]
METHOD, PRINCIPAL, PREFIX = admin_pb2.OriginCost.Dimension.values()[1:]


def stats_of(process: Process) -> admin_pb2.StatsReply:
    """What a process tells."""
    sent = request_counts(process.sent.by_kind)
    requests = admin_pb2.ProcessRequests(role="reader", requests=sent)
    stats = admin_pb2.StatsReply(processes=[requests], usd_per_1000=PRICES.usd_per_1000)
    fill_origins(stats, process.costs, {"KV.Get": 7})
    return stats


def origins(stats: admin_pb2.StatsReply, dimension: int) -> dict[str, admin_pb2.OriginCost]:
    found = [each for each in stats.origins if each.dimension == dimension]
    named = {each.name: each for each in found}
    assert len(named) == len(found)
    return named


def check_sums(stats: admin_pb2.StatsReply, sent: Counter[str]) -> None:
    """Requests and dollars of each dimension are those of all requests."""
    assert counts_by_kind(stats.processes[0].requests) == +sent
    for dimension in (METHOD, PRINCIPAL, PREFIX):
        found = origins(stats, dimension).values()
        assert sum((counts_by_kind(each.requests) for each in found), Counter()) == +sent
        dollars = sum(Decimal(repr(each.dollars)) for each in found)
        assert dollars == Decimal(repr(PRICES.dollars(sent)))


def test_sums_are_exact_and_origins_bounded() -> None:
    """The origins that have cost most dollars in all remain, also if each process has others that
    have cost more; the others are one.
    """
    whole, sent = admin_pb2.StatsReply(), Counter[str]()
    for number in range(3):
        process = Process()
        process.send(RequestKind.LIST, 5)  # of no call
        process.send(RequestKind.LIST, 4, everywhere := Activity(0))  # dearer than a read
        process.costs.charge("KV.Scan", "token:everywhere", b"everywhere/1", everywhere.sent)
        for other in range(ORIGINS_MAX - 1):
            name = f"{number}-{other}"
            process.call(f"token:{name}", f"{name}/1".encode(), reads=60)
        sent.update({kind.value: count for kind, count in process.sent.by_kind.items()})
        add_statistics(whole, stats_of(process))
        check_sums(whole, sent)
    for dimension, name in ((PRINCIPAL, "token:everywhere"), (PREFIX, "everywhere/")):
        found = origins(whole, dimension)
        assert len(found) == ORIGINS_MAX + len((OTHER, BACKGROUND))
        assert counts_by_kind(found[name].requests) == {"list": 12}
        assert counts_by_kind(found[BACKGROUND].requests) == {"list": 15}
    assert origins(whole, METHOD)["KV.Get"].calls == 3 * 7


def test_requests_of_calls_that_a_process_has_not_ended_become_background() -> None:
    """They have been sent, and paid for: nobody else will be charged."""
    process, running = Process(), Activity(0)
    process.call("token:a", b"a/1", reads=3)
    process.send(RequestKind.READ, 4, running)
    stats = stats_of(process)
    add_unended(stats)
    check_sums(stats, Counter(read=7))
    for dimension in (METHOD, PRINCIPAL, PREFIX):
        assert counts_by_kind(origins(stats, dimension)[BACKGROUND].requests) == {"read": 4}
