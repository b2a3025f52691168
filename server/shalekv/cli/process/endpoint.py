"""The HTTP endpoint of a process, from its settings: metrics, and probes.

It is bound before the gRPC port and before the database is opened, and answers from then on: a
process that opens its database, stands by or shuts down is live, and not ready.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import TYPE_CHECKING

import click
import structlog

from shalekv.cli.process.access import ProcessAccess, running_beside
from shalekv.errors import InvalidSetting
from shalekv.rpc.native_server import Door
from shalekv.rpc.server import Server
from shalekv.rpc.standard_services import NO_SUCH_CALLS, WHOLE_SERVER
from shalekv.settings import (
    CollectorConfig,
    CompactorConfig,
    JobTelemetrySettings,
    LogFormat,
    ProcessSettings,
    ReaderConfig,
    SafekeeperConfig,
    TlsSettings,
    WriterConfig,
)
from shalekv.store.url import is_loopback
from shalekv.telemetry.certificate_expiry import CertificateExpiry
from shalekv.telemetry.loop_lag import LoopLag
from shalekv.telemetry.metrics import Metrics
from shalekv.telemetry.process_use import add_process_use
from shalekv.telemetry.sources import MetricSources, Source
from shalekv.version import VERSION

if TYPE_CHECKING:
    from shalekv.rpc.http_endpoint import Collects, HttpEndpoint

_log = structlog.get_logger(__name__)


def sources_of(role: str, *others: Source) -> MetricSources:
    """Return the sources of a process: its version, its role, what it uses, and `others`."""
    sources = MetricSources()

    def process(metrics: Metrics) -> None:
        metrics.add("build", 1, VERSION, role)
        add_process_use(metrics, role)

    for source in (process, *others):
        sources.add(source)
    return sources


@asynccontextmanager
async def bound(
    settings: WriterConfig | ReaderConfig | SafekeeperConfig,
    sources: MetricSources,
    bind: Callable[[], Server],
    access: ProcessAccess | None = None,
    shared: tuple[Door, Collects] | None = None,
) -> AsyncIterator[Server]:
    """The server that `bind` makes, with the endpoint beside it while entered, if there is one.

    With `shared` its connections come through a door, and it shows what is collected there.

    Raises as `bind`, and the same for the address of the endpoint.
    """
    if not settings.telemetry.metrics:
        yield bind()
        return
    is_open = not isinstance(settings, SafekeeperConfig) and settings.access.open_services
    with closing(
        _bind(
            *(shared or (settings.telemetry.metrics, sources)),
            tls=settings.tls,
            access=access,
            open_services=is_open or access is None,
        )
    ) as endpoint:
        server = bind()
        sources.add(server.collect)
        sources.add(endpoint.collect)
        if access is not None:
            sources.add(access.guard.collect)
        sources.add(CertificateExpiry(settings.tls).collect)
        if shared is None:
            announce_metrics(endpoint.url, settings.server)
        with LoopLag().measuring() as lag:
            sources.add(lag.collect)
            async with running_beside(endpoint.run(server.problem)):
                yield server


@asynccontextmanager
async def serving_alone(
    settings: CompactorConfig | CollectorConfig, sources: MetricSources
) -> AsyncIterator[None]:
    """The endpoint of a process without a gRPC port, which is ready while entered.

    Raises `InvalidSetting`, and OSError: EADDRINUSE, when another process has the address.
    """
    if not settings.telemetry.metrics:
        yield
        return
    with closing(_bind(settings.telemetry.metrics, sources, tls=settings.tls)) as endpoint:
        announce_metrics(endpoint.url, settings.server)
        sources.add(endpoint.collect)
        sources.add(CertificateExpiry(settings.tls).collect)
        with LoopLag().measuring() as lag:
            sources.add(lag.collect)
            async with running_beside(endpoint.run(_problem_without_calls)):
                yield


def _problem_without_calls(service: str) -> str | None:
    return None if service == WHOLE_SERVER else NO_SUCH_CALLS


def refuse_exposed_metrics(
    telemetry: JobTelemetrySettings, process: ProcessSettings, tls: TlsSettings
) -> None:
    """Raise `InvalidSetting` when metrics are open to the network without TLS or `insecure`."""
    host = telemetry.metrics.rpartition(":")[0].strip("[]")
    is_allowed = tls.has_certificate or process.insecure or is_loopback(host)
    if not telemetry.metrics or is_allowed:
        return
    raise InvalidSetting(
        f"--metrics {telemetry.metrics} is open to the network, and connections are neither "
        "encrypted nor authenticated: anyone who reaches the port can read the metrics. Give "
        "--tls-cert and --tls-key, or accept this with --insecure."
    )


@contextmanager
def binding_metrics() -> Iterator[None]:
    """Name the flag in any `OSError`, while entered; all but EADDRINUSE become `InvalidSetting`."""
    try:
        yield
    except OSError as error:
        problem = f"--metrics {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            raise OSError(error.errno, problem) from None
        raise InvalidSetting(problem) from error


def announce_metrics(url: str, process: ProcessSettings) -> None:
    """Tell people where the metrics are."""
    _log.info("serving metrics", url=url)
    if process.log_format is LogFormat.CONSOLE:
        click.echo(f"Metrics: curl {url}", err=True)


def _bind(
    listen: str | Door,
    sources: Collects,
    *,
    tls: TlsSettings | None = None,
    access: ProcessAccess | None = None,
    open_services: bool = True,
) -> HttpEndpoint:
    from shalekv.rpc.http_endpoint import HttpEndpoint  # noqa: PLC0415 - slow, and for this alone

    guard = None if access is None else access.guard
    with binding_metrics():
        return HttpEndpoint(listen, sources, tls=tls, guard=guard, open_services=open_services)
