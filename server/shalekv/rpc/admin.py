"""`shalekv.v1.Admin` over gRPC: which method is answered by what."""

from __future__ import annotations

import grpc

from shalekv.roles.service import AdminService
from shalekv.rpc.adapter import Adapter
from shalekv.v1 import admin_pb2 as admin

SERVICE = admin.DESCRIPTOR.services_by_name["Admin"].full_name


def admin_methods(service: AdminService, adapter: Adapter) -> grpc.GenericRpcHandler:
    """The methods of the operator's API."""
    methods = {
        "Status": adapter.unary(service.status, admin.StatusRequest),
        "Stats": adapter.unary(service.stats, admin.StatsRequest),
        "CreateSnapshot": adapter.absent("Admin.CreateSnapshot"),
        "RenewSnapshot": adapter.absent("Admin.RenewSnapshot"),
        "ListSnapshots": adapter.absent("Admin.ListSnapshots"),
        "DeleteSnapshot": adapter.absent("Admin.DeleteSnapshot"),
        "IngestSst": adapter.unary(service.ingest_sst, admin.IngestSstRequest),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)
