"""Costs in replies: of one call, in the header of its reply; of all calls, in `Admin.Stats`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from shalekv.format.coding import varint
from shalekv.store.api import RequestKind
from shalekv.telemetry.activity import CURRENT, CommitActivity
from shalekv.telemetry.costs import Charges, Costs
from shalekv.telemetry.prices import PriceList, dollars_of
from shalekv.v1 import admin_pb2, kv_pb2

HEADER_TAG = b"\x0a"  # field 1 of each reply, with a length
NO_REQUESTS: Mapping[str, int] = MappingProxyType({})
_Dimension = admin_pb2.OriginCost.Dimension
_KINDS: Mapping[str, admin_pb2.RequestKind.ValueType] = MappingProxyType(
    {
        RequestKind.WRITE: admin_pb2.REQUEST_KIND_WRITE,
        RequestKind.LIST: admin_pb2.REQUEST_KIND_LIST,
        RequestKind.READ: admin_pb2.REQUEST_KIND_READ,
        RequestKind.DELETE: admin_pb2.REQUEST_KIND_DELETE,
        RequestKind.RECORD_WRITE: admin_pb2.REQUEST_KIND_RECORD_WRITE,
        RequestKind.RECORD_READ: admin_pb2.REQUEST_KIND_RECORD_READ,
    }
)
_NAMES: Mapping[int, str] = MappingProxyType({number: kind for kind, number in _KINDS.items()})


def request_counts(
    sent: Mapping[Any, int],
) -> list[admin_pb2.RequestCount]:
    """Convert counts of requests by kind; those of zero are left out."""
    return [
        admin_pb2.RequestCount(kind=_KINDS[kind], requests=count)
        for kind, count in sent.items()
        if count
    ]


def sent_by_running_task() -> Mapping[str, int]:
    """Return the requests that the call of the running task has sent so far.

    A call that is answered at once has no task, and sends none.
    """
    activity = CURRENT.get()
    return NO_REQUESTS if activity is None else activity.sent


def cost_of(
    prices: PriceList, own: Mapping[str, int], group: CommitActivity | None = None
) -> kv_pb2.Cost:
    """Return the cost of a call: its own requests, and those of the group of its commit."""
    sent, shared_by = Counter(own), 0
    own_cost, group_cost = prices.cost(own), 0 if group is None else prices.cost(group.sent)
    if group is not None:
        sent.update(group.sent)
        shared_by = group.commit_count
    dollars = None
    if own_cost is not None and group_cost is not None:
        dollars = dollars_of(own_cost + Fraction(group_cost, max(1, shared_by)))
    return kv_pb2.Cost(
        writes=sent[RequestKind.WRITE],
        lists=sent[RequestKind.LIST],
        reads=sent[RequestKind.READ],
        deletes=sent[RequestKind.DELETE],
        record_writes=sent[RequestKind.RECORD_WRITE],
        record_reads=sent[RequestKind.RECORD_READ],
        shared_by=shared_by,
        dollars=dollars,
    )


def cost_field(cost: kv_pb2.Cost) -> bytes:
    """Encode a cost as one more piece of the header of a reply, to be put behind the first one.

    Whoever decodes it merges both.
    """
    header = kv_pb2.ReplyHeader(cost=cost).SerializeToString()
    return HEADER_TAG + varint(len(header)) + header


def counts_by_kind(requests: Iterable[admin_pb2.RequestCount]) -> Counter[str]:
    """Convert back what `request_counts` has made."""
    return Counter({_NAMES[each.kind]: each.requests for each in requests})


def fill_origins(reply: admin_pb2.StatsReply, costs: Costs, calls: Mapping[str, int]) -> None:
    """Add what all calls have cost. `calls` are all that were made, by method."""
    add_charges(reply, costs.prices, _Dimension.DIMENSION_METHOD, costs.methods(calls))
    add_charges(reply, costs.prices, _Dimension.DIMENSION_PRINCIPAL, costs.principals())
    add_charges(reply, costs.prices, _Dimension.DIMENSION_PREFIX, costs.prefixes())


def add_charges(
    reply: admin_pb2.StatsReply,
    prices: PriceList,
    dimension: _Dimension.ValueType,
    origins: Iterable[Charges],
) -> None:
    """Add the origins of a dimension."""
    for name, calls, sent in origins:
        reply.origins.add(
            dimension=dimension,
            name=name,
            calls=calls,
            requests=request_counts(sent),
            dollars=prices.dollars(sent),
        )
