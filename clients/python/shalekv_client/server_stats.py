"""What a server has sent to the object store, as `Client.stats` returns it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shalekv.v1 import admin_pb2
from shalekv_client.results import View, view_of


class RequestKind(enum.Enum):
    """What a store charges a request as. The numbers are the wire's."""

    WRITE = 1  # a put, a copy; the beginning, a part or the end of an upload
    LIST = 2  # a page
    READ = 3  # a get or a head
    DELETE = 4
    RECORD_WRITE = 5  # in the transactional store
    RECORD_READ = 6


@dataclass(frozen=True, slots=True)
class ProcessRequests:
    """What one process has sent, and those that had its role before it."""

    role: str  # "writer", "compactor" or "collector"
    uptime_ms: int  # since the server has begun with the role, restarts included
    requests: Mapping[RequestKind, int]  # of every kind that this client knows


@dataclass(frozen=True, slots=True)
class Stats:
    """What was sent to the object store, process by process."""

    view: View
    url: str  # of the database, without credentials
    endpoint: str  # HOST:PORT of the store; empty: that of the provider
    records: str  # the kind of the transactional store, such as "dynamodb"; empty: none
    processes: tuple[ProcessRequests, ...]


def stats_of(reply: admin_pb2.StatsReply) -> Stats:
    """What a reply tells."""
    return Stats(
        view=view_of(reply.header),
        url=reply.url,
        endpoint=reply.endpoint,
        records=reply.records,
        processes=tuple(map(_process, reply.processes)),
    )


def _process(told: admin_pb2.ProcessRequests) -> ProcessRequests:
    requests = dict.fromkeys(RequestKind, 0)
    for count in told.requests:
        if count.kind in _NUMBERS:  # a newer server may know of more
            requests[RequestKind(count.kind)] += count.requests
    return ProcessRequests(told.role, told.uptime_ms, MappingProxyType(requests))


_NUMBERS = frozenset(kind.value for kind in RequestKind)
