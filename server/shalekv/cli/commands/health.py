"""`shalekv health`: check whether a server is ready, for health checks of containers."""

from __future__ import annotations

import os

import click
import grpc
from grpc_health.v1 import health_pb2

from shalekv.cli.console.connection import Target, target_options
from shalekv.wording import READ, WRITE

NOT_SERVING = 1  # the only failure code for Docker, which reserves 2
KV, ADMIN = "shalekv.v1.KV", "shalekv.v1.Admin"
_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = health_pb2.HealthCheckResponse.SERVING

# As the client does: connect directly, ignoring HTTP proxies of the environment.
_OPTIONS = (("grpc.enable_http_proxy", 0),)

_HELP = """Check whether a server is ready, by its gRPC health service.

A writer is ready while reads are answered and writes become durable, a reader while reads are
answered. A server is not ready while it opens its database, is on standby, shuts down, or was
fenced; nor, after some seconds, while its object store is unreachable or no majority of its
safekeepers answers. Use --service to check reads or writes alone: a writer whose disk is full still
answers reads. `shalekv status` prints the reason.

Compactor and collector have no port and no health service: they are healthy as long as their
process runs.

\b
Examples:
  shalekv health
  shalekv health --addr 10.0.0.5:7654 --timeout-ms 2000 || echo down
  shalekv health --service shalekv.read
"""

_EXIT_CODES = """\b
Exit codes:
    0  the server is ready
    1  it is not, or no server answers
    2  an argument is wrong
"""


@click.command(help=_HELP, epilog=_EXIT_CODES)
@click.option(
    "--service",
    type=click.Choice([READ, WRITE, KV, ADMIN]),
    help="Check this service only.  [default: all services of the server]",
)
@target_options
def health(*, service: str | None, target: Target) -> None:
    """Check, and print the status."""
    # The core of gRPC writes its own lines to stderr; the errors printed below say the same.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        answer = _ask(target, service or "").status
    except grpc.RpcError as error:
        # A failed call has code and details, but the declared type of the error has not.
        code: grpc.StatusCode = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
        problem = _problems(target).get(code) or getattr(error, "details", str)() or "no answer"
        click.echo(f"Error: {target.address}: {problem}", err=True)
        raise SystemExit(NOT_SERVING) from None
    click.echo(health_pb2.HealthCheckResponse.ServingStatus.Name(answer))
    if answer != _SERVING:
        raise SystemExit(NOT_SERVING)


def _problems(target: Target) -> dict[grpc.StatusCode, str]:
    return {
        grpc.StatusCode.UNAVAILABLE: "no connection to the server",
        grpc.StatusCode.DEADLINE_EXCEEDED: (
            f"no answer within {target.timeout_ms:,} ms: it may still be opening its database"
        ),
        grpc.StatusCode.NOT_FOUND: "the server has no such service",
    }


def _ask(target: Target, service: str) -> health_pb2.HealthCheckResponse:
    with grpc.insecure_channel(target.address, options=_OPTIONS) as channel:
        check = channel.unary_unary(
            _CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        reply: health_pb2.HealthCheckResponse = check(
            health_pb2.HealthCheckRequest(service=service), timeout=target.timeout_ms / 1_000
        )
    return reply
