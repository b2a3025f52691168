"""Methods of a server that may change while it listens: grpc itself takes them once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class CurrentMethods(grpc.GenericRpcHandler):
    """Those of whatever is served now; a call that has begun keeps its own."""

    def __init__(self) -> None:
        """None yet."""
        self._current: Sequence[grpc.GenericRpcHandler] = ()

    def become(self, *methods: grpc.GenericRpcHandler) -> None:
        """Calls that begin from now on are answered by these."""
        self._current = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """What answers this call; None for a method that nobody has."""
        found = (each.service(handler_call_details) for each in self._current)
        return next((handler for handler in found if handler is not None), None)


class MethodsOf(grpc.GenericRpcHandler):
    """All methods of some services, answered by one handler."""

    def __init__(self, services: Sequence[str], handler: Handler) -> None:
        """`services` are full names."""
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._handler = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """The handler, for a call of one of the services."""
        is_ours = handler_call_details.method.startswith(self._prefixes)
        return self._handler if is_ours else None
