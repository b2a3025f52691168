"""`shalekv health`: whether a server serves, for what watches over containers."""

from __future__ import annotations

import os

import click
import grpc
from grpc_health.v1 import health_pb2

from shalekv.cli.console.connection import Target, target_options
from shalekv.wording import READ, WRITE

NOT_SERVING = 1  # the one code of failure that Docker knows; 2 is reserved there
KV, ADMIN = "shalekv.v1.KV", "shalekv.v1.Admin"
_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = health_pb2.HealthCheckResponse.SERVING

# As a client connects: directly, whatever the environment says about the web.
_OPTIONS = (("grpc.enable_http_proxy", 0),)

_HELP = """Tell whether a server serves, as its gRPC health service has it.

A writer serves while reads are answered and writes become durable, a reader while reads are. A
server does not serve while it opens its database, stands by, shuts down, or was fenced; nor, after
some seconds, while its object store is unreachable, or no majority of its safekeepers answers.
With --service one of both is asked for: a writer whose disk is full still answers reads. `shalekv
status` tells the reason.

Compactor and collector have no port and no such answer: they are well as long as their process
runs.

\b
Examples:
  shalekv health
  shalekv health --addr 10.0.0.5:7654 --timeout-ms 2000 || echo down
  shalekv health --service shalekv.read
"""

_EXIT_CODES = """\b
Exit codes:
    0  it serves
    1  it does not, or nobody answers there
    2  an argument is wrong
"""


@click.command(help=_HELP, epilog=_EXIT_CODES)
@click.option(
    "--service",
    type=click.Choice([READ, WRITE, KV, ADMIN]),
    help="Ask for one of its services.  [default: all that the server is for]",
)
@target_options
def health(*, service: str | None, target: Target) -> None:
    """Ask, and print the answer."""
    # The core of gRPC writes lines of its own to stderr; what follows tells what there is to know.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        answer = _ask(target, service or "").status
    except grpc.RpcError as error:
        # Which it has, as a call that failed; the type of what is raised does not say so.
        code: grpc.StatusCode = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
        told = _told(target).get(code) or getattr(error, "details", str)() or "no answer"
        click.echo(f"Error: {target.address}: {told}", err=True)
        raise SystemExit(NOT_SERVING) from None
    click.echo(health_pb2.HealthCheckResponse.ServingStatus.Name(answer))
    if answer != _SERVING:
        raise SystemExit(NOT_SERVING)


def _told(target: Target) -> dict[grpc.StatusCode, str]:
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
