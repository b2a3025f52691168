"""`grpc.health.v1`: whether this process serves, as a whole and service by service."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WHOLE_SERVER = ""


class Health:
    """Answers Check and Watch."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._servicer = aio.HealthServicer()
        self._known: dict[str, None] = {WHOLE_SERVER: None}

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

    async def serve(self, services: Iterable[str]) -> None:
        """Report the whole server and each of `services` (full names) as SERVING."""
        await self._report(services, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, services: Iterable[str] = ()) -> None:
        """Report everything, `services` too, as NOT_SERVING, to those who watch as well."""
        await self._report(services, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _report(
        self,
        services: Iterable[str],
        status: int,
    ) -> None:
        self._known |= dict.fromkeys(services)
        for service in self._known:
            await self._servicer.set(service, status)
