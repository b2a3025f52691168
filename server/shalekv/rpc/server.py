"""The server: it binds first, serves from `start` on, and is drained at its end.

    bound ---- start -----> serving ---- refuse, drain, stop ----> closed
      |                      |   ^
      |               stand_by   start
      |                      v   |
      +----- stand_by ---> standing by ---- stop ----> closed
                             each call is refused

The address is bound before the writer opens: the port is then known (it is advertised in the
manifest), and a port that is in use is noticed before another writer is fenced for nothing. Until
`start` or `stand_by`, connections wait in the backlog.

One of two transports carries the calls; what answers them is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from shalekv.errors import ShaleError, WrongRole
from shalekv.read.memory_budget import MemoryBudget, Stalls
from shalekv.rpc.adapter import Adapter
from shalekv.rpc.call_counts import CallCounts
from shalekv.rpc.call_telemetry import Recorders
from shalekv.rpc.calls import Find, Method, logged
from shalekv.rpc.methods import (
    ADMIN_SERVICE,
    KV_SERVICE,
    SAFEKEEPER_SERVICE,
    admin_methods,
    kv_methods,
    safekeeper_methods,
)
from shalekv.rpc.native_server import Door, NativeServer, listening
from shalekv.rpc.standard_services import (
    HEALTH_SERVICE,
    WHOLE_SERVER,
    HealthService,
    ReflectionService,
)
from shalekv.runtime import Runtime
from shalekv.server.access.guard import Guard
from shalekv.server.readiness import Readiness
from shalekv.server.service import AdminService, KvService, WatchService
from shalekv.settings import EndpointSettings, LimitSettings, LogLevel, Wire
from shalekv.settings.security import TlsSettings
from shalekv.telemetry.metrics import Metrics
from shalekv.v1.admin_pb2 import (
    CallStatus,
    ListSlowCallsReply,
    StatsReply,
    StatusReply,
    StatusRequest,
)
from shalekv.wording import READ, WRITE
from shalekv_wire.tls import TlsContexts

if TYPE_CHECKING:
    from shalekv.server.safekeeper.service import SafekeeperService

# Time for replies at the end: one that was made may not be on the wire yet. Health watches never
# end by themselves.
LAST_REPLIES_S = 0.25
# Time in which new calls are still refused with a reason, because their senders could not know yet
# that the server ends. After it the port closes; then such calls are cancelled, and their outcome
# is unknown.
LAST_CALLS_S = 0.1
# Time for the ends of watches, which update the leases of their consumers with some requests to the
# store.
LAST_EDITS_S = 1.0
OWN_SERVICES = (KV_SERVICE, ADMIN_SERVICE)
NO_METHODS: Mapping[str, Method] = {}
READY = Readiness()
_IS_SAFEKEEPER = WrongRole(
    "this is a safekeeper, which holds logs and answers no such calls: ask a writer or a reader of "
    "the database; `shalekv safekeeper status`, its log and its metrics tell about this process"
)
_ANYTHING = StatusRequest()  # needs to be allowed anything at all

_log = structlog.get_logger(__name__)


class Transport(Protocol):
    """Carrier of calls (native or grpcio): bound to its address when it is made."""

    @property
    def listen(self) -> str:
        """The address, with the port that was bound."""
        ...

    @property
    def services(self) -> Sequence[str]:
        """The full names of services that it has itself."""
        ...

    @property
    def connection_count(self) -> int | None:
        """The connections that are open; None: it does not tell."""
        ...

    async def start(self) -> None:
        """Serve from now on."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Close the port; cancel the calls that are in progress after `grace_s`."""
        ...


class Server:
    """One listening address and the services behind it."""

    def __init__(
        self,
        settings: EndpointSettings,
        runtime: Runtime,
        *,
        limits: LimitSettings | None = None,
        door: Door | None = None,
        guard: Guard | None = None,
        open_services: bool = True,
        tls: TlsSettings | None = None,
        recorders: Recorders | None = None,
    ) -> None:
        """Bind the address, unless connections come through a door; needs a running loop.

        `guard` is asked about each call, and unless `open_services`, about health checks and
        reflection as well. Without one every call is allowed. Without
        `recorders` calls are counted, and no more.

        Raises:
            InvalidSetting: the files of `tls` cannot be used.
            OSError: the address cannot be bound; EADDRINUSE when another process has it.
        """
        self._limits = limits or LimitSettings()
        stalls = Stalls(runtime.clock, self._limits.result_stalled_ms)
        self.session_budget = MemoryBudget(self._limits.sessions_bytes_max, stalls)
        new_adapter = partial(
            Adapter,
            runtime,
            calls_max=settings.concurrent_calls_max,
            limits=self._limits,
            session_budget=self.session_budget,
        )
        self._new_adapter = partial(new_adapter, guard=guard, recorders=recorders)
        standard_guard = None if open_services else guard
        self._new_standard = partial(new_adapter, guard=standard_guard, checked_as=_ANYTHING)
        self._adapter = self._new_adapter()
        self._find_own: Find = NO_METHODS.get
        self._standard: Mapping[str, Method] = {}
        self._health = HealthService()
        self._logs_calls = settings.log_level is LogLevel.DEBUG
        self._is_started = self._is_refusing = False
        self._transport = _transport(
            settings, self._find, door, listening(tls, settings.wire), guard
        )

    @property
    def listen(self) -> str:
        """The address at which clients reach this server."""
        return self._transport.listen

    async def start(
        self,
        kv_service: KvService,
        admin_service: AdminService,
        watches: WatchService,
        readiness: Readiness = READY,
    ) -> None:
        """Serve from now on, beginning with `readiness`."""
        self._adapter = self._new_adapter()  # after `stand_by` the old one refuses all calls
        self._find_own = {
            **kv_methods(kv_service, watches, self._adapter, self._limits),
            **admin_methods(admin_service, self._adapter),
        }.get
        self._is_refusing = False
        self.report(readiness)
        await self._listen(OWN_SERVICES)

    def report(self, readiness: Readiness) -> None:
        """Report `readiness` to health checks, unless new calls are refused."""
        if self._is_refusing:
            return
        self._health.report(
            {
                WHOLE_SERVER: readiness.is_ready,
                KV_SERVICE: readiness.is_ready,
                ADMIN_SERVICE: True,
                READ: readiness.reads is None,
                WRITE: readiness.is_ready_for_writes,
            },
            _reasons(readiness),
        )

    async def start_safekeeper(self, service: SafekeeperService) -> None:
        """Serve as a safekeeper from now on; calls of the other roles are refused."""
        elsewhere = self._new_adapter()
        elsewhere.refuse(_IS_SAFEKEEPER)
        own, others = safekeeper_methods(service, self._adapter), _refusing(OWN_SERVICES, elsewhere)
        self._find_own = lambda path: own.get(path) or others(path)
        self._health.report({WHOLE_SERVER: True, SAFEKEEPER_SERVICE: True})
        await self._listen([SAFEKEEPER_SERVICE])

    async def stand_by(self, error: ShaleError) -> None:
        """Report NOT_SERVING, and refuse each call with `error` until the next `start`.

        Calls in progress are cut off, so call `refuse` and `drain` before.
        """
        self._is_refusing = True
        before, self._adapter = self._adapter, self._new_adapter()
        self._adapter.refuse(error)
        self._find_own = _refusing(OWN_SERVICES, self._adapter)
        self._health.stop(_short(error), (*OWN_SERVICES, READ, WRITE))
        await self._listen(OWN_SERVICES)
        before.refuse(error)
        before.cut_off()
        await before.wait_for_cleanups(LAST_EDITS_S)

    def fill(self, status: StatusReply) -> None:
        """Add the counts of calls, and of those that were refused, to a status."""
        self._adapter.fill(status)

    def fill_origins(self, stats: StatsReply) -> None:
        """Add what the calls of this process have cost to statistics."""
        self._adapter.fill_origins(stats)

    def fill_slow_calls(self, reply: ListSlowCallsReply) -> None:
        """Add the slow calls of this process to a list."""
        self._adapter.telemetry.fill_slow_calls(reply)

    @property
    def counts(self) -> CallCounts:
        """The counts of calls and refusals since `start`."""
        return self._adapter.counts

    @property
    def in_progress_count(self) -> int:
        """The calls that have begun and not ended."""
        return self._adapter.in_progress_count

    @property
    def connection_count(self) -> int | None:
        """The connections that are open; None: this transport does not tell."""
        return self._transport.connection_count

    def calls(self) -> Iterator[CallStatus]:
        """Return the counts of the calls that were answered, by method."""
        return self._adapter.counts.statuses()

    def problem(self, service: str) -> str | None:
        """Say why health checks of a service (full name) fail, for everybody; None: they don't."""
        return self._health.problem(service)

    def collect(self, metrics: Metrics) -> None:
        """Add the counts of calls and connections, and whether this process serves."""
        self.counts.collect(metrics)
        self._adapter.collect_costs(metrics)
        for method, calls in self._adapter.telemetry.slow_calls.counts.items():
            metrics.add("slow_calls", calls, method)
        if (tracer := self._adapter.telemetry.tracer) is not None:
            metrics.add("spans_dropped", tracer.dropped)
        metrics.add("calls_in_progress", self.in_progress_count)
        if self.connection_count is not None:
            metrics.add("connections", self.connection_count)
        metrics.add("serving", self._is_started and not self._is_refusing)

    def set_refusal(self, error: ShaleError) -> None:
        """Refuse each call with `error` from now on. REQUIRES: `stand_by`, and no `start` since."""
        self._adapter.refuse(error)
        self._health.stop(_short(error))

    def refuse(self, error: ShaleError) -> None:
        """Report NOT_SERVING, and refuse each new call with `error`; calls in progress go on."""
        self._is_refusing = True
        self._adapter.refuse(error)
        self._health.stop(_short(error))

    async def drain(self, grace_ms: float) -> bool:
        """Wait for at most `grace_ms` until no call is in progress; returns False if some are."""
        try:
            async with asyncio.timeout(grace_ms / 1000.0):
                await self._adapter.idle()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Close the port and cancel the calls that are still in progress."""
        if self._is_refusing:
            await asyncio.sleep(LAST_CALLS_S)
        await self._transport.stop(LAST_REPLIES_S)
        await self._adapter.wait_for_cleanups(LAST_EDITS_S)

    async def _listen(self, services: Sequence[str]) -> None:
        if self._is_started:
            return
        self._is_started = True
        # Calls of their adapters are neither counted nor refused.
        adapter, streams = self._new_standard(), self._new_standard()
        reflection = ReflectionService([*services, HEALTH_SERVICE, *self._transport.services])
        own, described = self._health.methods(adapter, streams), reflection.methods(streams)
        self._standard = {
            path: replace(method, keeps_place=False)
            for path, method in {**own, **described}.items()
        }
        await self._transport.start()

    def _find(self, path: str) -> Method | None:
        """Return the present method of a path; a call that has begun keeps its own."""
        method = self._find_own(path) or self._standard.get(path)
        if self._logs_calls:
            if method is not None:
                return logged(path, method)
            _log.debug("unknown method", method=path)
        return method


def _reasons(readiness: Readiness) -> Mapping[str, str]:
    """Return why services of the health checks fail. The causes name no objects and no places."""
    causes = {
        service: f"{calls} fail: {trouble.cause}"
        for service, calls, trouble in (
            (READ, "reads", readiness.reads),
            (WRITE, "writes", readiness.writes),
        )
        if trouble is not None
    }
    whole = "; ".join(causes.values())
    if not readiness.takes_writes:
        causes[WRITE] = "this process takes no writes: it is a reader"
    return {**causes, WHOLE_SERVER: whole, KV_SERVICE: whole}


def _short(refusal: ShaleError) -> str:
    """Return the reason of a refusal, without what became of the call."""
    return str(refusal).removesuffix(": nothing was applied")


def _refusing(services: Sequence[str], adapter: Adapter) -> Find:
    """Return what finds one method for all methods of `services`, known or not: it refuses."""
    prefixes, method = tuple(f"/{each}/" for each in services), adapter.refusing_method()
    return lambda path: method if path.startswith(prefixes) else None


def _transport(
    settings: EndpointSettings,
    find: Find,
    door: Door | None,
    tls: TlsContexts | None,
    guard: Guard | None,
) -> Transport:
    if settings.wire is Wire.NATIVE:
        return NativeServer(settings, find, door, tls)
    from shalekv.rpc.grpcio_server import GrpcioServer  # noqa: PLC0415 - slow, and for this alone

    return GrpcioServer(settings, find, tls, lambda: guard is not None and guard.is_enforcing)
