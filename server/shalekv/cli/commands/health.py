"""`shalekv health`: check whether a server is ready, for health checks of containers."""

from __future__ import annotations

import asyncio

import click
from grpc_health.v1 import health_pb2

from shalekv.cli.console.connection import Target, target_options
from shalekv.cli.console.output import (
    Format,
    brief_format_option,
    print_line,
    print_record,
    printing,
)
from shalekv.cli.console.units import duration
from shalekv.wording import READ, WRITE
from shalekv_client.policies import MESSAGE_BYTES_MAX
from shalekv_client.routing.addresses import chosen_wire
from shalekv_client.routing.servers import ConnectionOptions, open_channel
from shalekv_wire.status import CallFailed, StatusCode

NOT_SERVING = 1  # the only failure code for Docker, which reserves 2
KV, ADMIN = "shalekv.v1.KV", "shalekv.v1.Admin"
_CHECK = "/grpc.health.v1.Health/Check"
_PASSING = frozenset({StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED})  # while it starts
_PAUSE_S = 0.1
_SERVING = health_pb2.HealthCheckResponse.SERVING

_HELP = """Check whether a server is ready, by its gRPC health service.

A writer is ready while reads are answered and writes become durable, a reader while reads are
answered. A server is not ready while it opens its database, is on standby, shuts down, or was
fenced; nor, after some seconds, while its object store is unreachable or no majority of its
safekeepers answers. Use --service to check reads or writes alone: a writer whose disk is full still
answers reads. `shalekv status` prints the reason. In a script that starts a server, use --wait.

Compactor and collector have no port and no health service: they are healthy as long as their
process runs.

\b
Examples:
  shalekv health
  shalekv health --wait 30s && shalekv put greeting hello
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
@click.option(
    "--wait",
    "wait_ms",
    callback=duration,
    metavar="TIME",
    help="Wait until the server is ready, for this time at most: 500ms, 10s, 5m.",
)
@brief_format_option("one word")
@target_options
def health(
    *, service: str | None, wait_ms: int | None, output_format: Format | None, target: Target
) -> None:
    """Check, and print the status."""
    try:
        answer = asyncio.run(_wait_for(target, service or "", wait_ms or 0)).status
    except CallFailed as failed:
        problem = (
            _problems(wait_ms or target.timeout_ms).get(failed.code)
            or failed.message
            or failed.code.name
        )
        click.echo(f"Error: {target.address}: {problem}", err=True)
        raise SystemExit(NOT_SERVING) from None
    word = health_pb2.HealthCheckResponse.ServingStatus.Name(answer)
    with printing():
        if output_format is None:
            print_line(word)
        else:
            print_record(output_format, {"service": service, "status": word})
    if answer != _SERVING:
        raise SystemExit(NOT_SERVING)


def _problems(within_ms: int) -> dict[StatusCode, str]:
    return {
        StatusCode.DEADLINE_EXCEEDED: (
            f"no answer within {within_ms:,} ms: it may still be opening its database"
        ),
        StatusCode.NOT_FOUND: "the server has no such service",
    }


async def _wait_for(target: Target, service: str, wait_ms: int) -> health_pb2.HealthCheckResponse:
    """Return the first answer that is SERVING; the last one at the end of `wait_ms`, or its error.

    0: the first answer, whatever it is.
    """
    now_s = asyncio.get_running_loop().time
    end_s = now_s() + wait_ms / 1_000
    while True:
        timeout_s = target.timeout_ms / 1_000
        if wait_ms:
            timeout_s = min(timeout_s, max(end_s - now_s(), _PAUSE_S))
        try:
            answer = await _ask(target, service, timeout_s)
            if answer.status == _SERVING or now_s() >= end_s:
                return answer
        except CallFailed as failed:
            if failed.code not in _PASSING or now_s() >= end_s:
                raise
        await asyncio.sleep(_PAUSE_S)


async def _ask(target: Target, service: str, timeout_s: float) -> health_pb2.HealthCheckResponse:
    security = target.security()
    how = ConnectionOptions(MESSAGE_BYTES_MAX, wire=chosen_wire(None), security=security)
    channel = open_channel(target.address, how, security.metadata())
    request = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    try:
        reply = await channel.unary(_CHECK, request, timeout_s=timeout_s)
    finally:
        await channel.close()
    return health_pb2.HealthCheckResponse.FromString(reply)
