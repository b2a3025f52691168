"""What the processes of a server have sent to the object store: what its bill is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shalekv.clock import Clock
from shalekv.settings import StoreSettings
from shalekv.store.requests import RequestKind
from shalekv.v1 import admin_pb2, kv_pb2

_KINDS: Mapping[RequestKind, admin_pb2.RequestKind.ValueType] = MappingProxyType(
    {
        RequestKind.WRITE: admin_pb2.REQUEST_KIND_WRITE,
        RequestKind.LIST: admin_pb2.REQUEST_KIND_LIST,
        RequestKind.READ: admin_pb2.REQUEST_KIND_READ,
        RequestKind.DELETE: admin_pb2.REQUEST_KIND_DELETE,
        RequestKind.RECORD_WRITE: admin_pb2.REQUEST_KIND_RECORD_WRITE,
        RequestKind.RECORD_READ: admin_pb2.REQUEST_KIND_RECORD_READ,
    }
)


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Which store it is, as far as prices depend on it. Nothing here is a secret."""

    url: str  # of the database, without credentials
    endpoint: str = ""  # HOST:PORT; empty: that of the provider
    records: str = ""  # the kind of the transactional store; empty: none

    @classmethod
    def of(cls, url: str, settings: StoreSettings) -> StorePlace:
        """That of a store that was opened with `settings`."""
        host_and_path = settings.endpoint_url.partition("://")[2]
        return cls(
            url=url,
            endpoint=host_and_path.partition("/")[0].rpartition("@")[2],
            records=settings.records_url.partition("://")[0],  # the rest may hold a password
        )


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one role has sent so far."""

    role: str
    began_ms: float  # on the clock of the runtime
    sent: Mapping[RequestKind, int]


class StoreUse:
    """A place, and who tells what was sent there."""

    def __init__(self, place: StorePlace, clock: Clock) -> None:
        """Nobody tells anything yet."""
        self._place = place
        self._clock = clock
        self._sources: list[Callable[[], Iterable[ProcessUse]]] = []

    def measure(self, processes: Callable[[], Iterable[ProcessUse]]) -> None:
        """Ask `processes` as well, whenever somebody wants to know."""
        self._sources.append(processes)

    def reply(self, header: kv_pb2.ReplyHeader) -> admin_pb2.StatsReply:
        """As it is now."""
        now_ms = self._clock.monotonic_ms()
        return admin_pb2.StatsReply(
            header=header,
            url=self._place.url,
            endpoint=self._place.endpoint,
            records=self._place.records,
            processes=[
                _requests(process, now_ms) for source in self._sources for process in source()
            ],
        )


def _requests(process: ProcessUse, now_ms: float) -> admin_pb2.ProcessRequests:
    return admin_pb2.ProcessRequests(
        role=process.role,
        uptime_ms=max(0, int(now_ms - process.began_ms)),
        requests=[
            admin_pb2.RequestCount(kind=_KINDS[kind], requests=requests)
            for kind, requests in process.sent.items()
            if requests
        ],
    )
