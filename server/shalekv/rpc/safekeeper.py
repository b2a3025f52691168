"""`shalekv.v1.Safekeeper` over gRPC: which method is answered by what."""

from __future__ import annotations

import grpc

from shalekv.rpc.adapter import Adapter
from shalekv.server.safekeeper.service import SafekeeperService
from shalekv.v1 import safekeeper_pb2 as wire

SAFEKEEPER_SERVICE = wire.DESCRIPTOR.services_by_name["Safekeeper"].full_name


def safekeeper_methods(service: SafekeeperService, adapter: Adapter) -> grpc.GenericRpcHandler:
    """The methods of a safekeeper."""
    methods = {
        "Admit": adapter.unary(service.admit, wire.AdmitRequest),
        "Propose": adapter.duplex(service.propose, wire.ProposeRequest),
        "Relay": adapter.duplex(service.relay, wire.RelayRequest),
        "Fetch": adapter.unary_stream(service.fetch, wire.FetchRequest),
        "Tail": adapter.unary_stream(service.tail, wire.TailRequest),
        "GetSafekeeperStatus": adapter.unary(service.status, wire.GetSafekeeperStatusRequest),
        "Retire": adapter.unary(service.retire, wire.RetireRequest),
    }
    return grpc.method_handlers_generic_handler(SAFEKEEPER_SERVICE, methods)
