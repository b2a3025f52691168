"""grpc.health.v1, service by service, asked once and watched."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shalekv.errors import Stopping
from tests.kit.serving.rpc import Serving, failure, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SERVICES = ["", "shalekv.v1.KV", "shalekv.v1.Admin"]


def _health(it: Serving[Any]) -> Any:
    """A stub; its type stubs leave its methods out."""
    return health_pb2_grpc.HealthStub(it.channel)


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_serves_until_it_stops(service: str) -> None:
    """SERVING from the start, NOT_SERVING as soon as calls are turned away; watchers are told."""
    request = health_pb2.HealthCheckRequest(service=service)
    async with serving() as it:
        health = _health(it)
        watch = health.Watch(request)
        assert (await health.Check(request)).status == SERVING
        assert (await watch.read()).status == SERVING
        await it.server.refuse(Stopping("shutting down"))
        assert (await watch.read()).status == NOT_SERVING
        assert (await health.Check(request)).status == NOT_SERVING


async def test_an_unknown_service_is_unknown() -> None:
    """Check answers NOT_FOUND, and Watch waits for it to appear, as the protocol says."""
    request = health_pb2.HealthCheckRequest(service="shalekv.v1.Nobody")
    async with serving() as it:
        health = _health(it)
        assert (await failure(health.Check(request))).code is grpc.StatusCode.NOT_FOUND
        assert (await health.Watch(request).read()).status == UNKNOWN
