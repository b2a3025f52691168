"""`grpc.health.v1`: whether this process serves, as a whole and service by service.

Beside the gRPC services there are two names for readiness: `shalekv.read` and `shalekv.write`. The
whole server, and `shalekv.v1.KV`, are SERVING while both hold, or the first at a reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
            self._told[service] = is_serving
            status = health_pb2.HealthCheckResponse
            await self._servicer.set(service, status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, services: Iterable[str] = ()) -> None:
        """Report everything, `services` too, as NOT_SERVING."""
        await self.report(dict.fromkeys([*self._told, *services], False))
