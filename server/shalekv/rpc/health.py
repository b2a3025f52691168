"""`grpc.health.v1`: whether this process serves, as a whole and service by service.

Beside the gRPC services there are two names for readiness: `shalekv.read` and `shalekv.write`. The
whole server, and `shalekv.v1.KV`, are SERVING while both hold, or the first at a reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WHOLE_SERVER = ""
WATCHERS_S = 1.0  # for those who watch, to be told


class Health:
    """Answers Check and Watch."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._servicer = health_aio.HealthServicer()
        self._told: dict[str, bool | None] = {WHOLE_SERVER: None}  # None: not yet

    def methods(self) -> grpc.GenericRpcHandler:
        """The methods of the health service.

        `List` is left out: the packaged servicer has no answer to it.
        """
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(
                self._servicer.Check,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self._servicer.Watch,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def report(self, serves: Mapping[str, bool]) -> None:
        """Report each of these (full names) as SERVING or NOT_SERVING, also to those who watch."""
        for service, is_serving in serves.items():
            if self._told.get(service) is is_serving:
                continue
            await self._set(service, is_serving=is_serving)
            self._told[service] = is_serving

    async def stop(self, services: Iterable[str] = ()) -> None:
        """Report everything, `services` too, as NOT_SERVING, whatever was reported before."""
        self._told |= dict.fromkeys(services)
        for service in self._told:
            await self._set(service, is_serving=False)
            self._told[service] = False

    async def _set(self, service: str, *, is_serving: bool) -> None:
        """Tell all who watch; one who takes nothing holds up the others of its service, not us."""
        status = health_pb2.HealthCheckResponse
        with suppress(TimeoutError):
            async with asyncio.timeout(WATCHERS_S):
                await self._servicer.set(
                    service, status.SERVING if is_serving else status.NOT_SERVING
                )
