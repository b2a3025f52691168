"""`shalekv.v1.Admin` over gRPC: which method is answered by what."""

from __future__ import annotations

import grpc
from google.protobuf.message import Message

from shalekv.rpc.adapter import Adapter
from shalekv.server.service import AdminService, Call
from shalekv.v1 import admin_pb2 as admin

ADMIN_SERVICE = admin.DESCRIPTOR.services_by_name["Admin"].full_name


def admin_methods(service: AdminService, adapter: Adapter) -> grpc.GenericRpcHandler:
    """The methods of the operator's API."""

    async def status(request: admin.StatusRequest, call: Call) -> admin.StatusReply:
        """What the role tells, and the calls, of which only this side of it knows."""
        answer = service.status(request, call)
        reply = answer if isinstance(answer, Message) else await answer
        reply.calls.extend(adapter.counts.statuses())
        return reply

    snapshots = service.snapshots
    methods = {
        "Status": adapter.unary(status, admin.StatusRequest),
        "Stats": adapter.unary(service.stats, admin.StatsRequest),
        "CreateSnapshot": adapter.unary(snapshots.create, admin.CreateSnapshotRequest),
        "RenewSnapshot": adapter.unary(snapshots.renew, admin.RenewSnapshotRequest),
        "ListSnapshots": adapter.unary(snapshots.list, admin.ListSnapshotsRequest),
        "DeleteSnapshot": adapter.unary(snapshots.delete, admin.DeleteSnapshotRequest),
        "IngestSst": adapter.unary(service.ingest_sst, admin.IngestSstRequest),
    }
    return grpc.method_handlers_generic_handler(ADMIN_SERVICE, methods)
