"""The methods of our services by their paths: what answers each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from shalekv.rpc.adapter import Adapter
from shalekv.rpc.calls import Method
from shalekv.server.access.admin import shown_to
from shalekv.server.service import AdminService, Call, KvService, WatchService
from shalekv.settings import LimitSettings
from shalekv.v1 import admin_pb2 as admin
from shalekv.v1 import kv_pb2 as kv
from shalekv.v1 import safekeeper_pb2 as wire

if TYPE_CHECKING:
    from shalekv.server.safekeeper.service import SafekeeperService

KV_SERVICE = kv.DESCRIPTOR.services_by_name["KV"].full_name
ADMIN_SERVICE = admin.DESCRIPTOR.services_by_name["Admin"].full_name
SAFEKEEPER_SERVICE = wire.DESCRIPTOR.services_by_name["Safekeeper"].full_name


def kv_methods(
    service: KvService, watches: WatchService, adapter: Adapter, limits: LimitSettings
) -> Mapping[str, Method]:
    """Return the methods of `shalekv.v1.KV`, the data API, by path."""
    return with_paths(
        KV_SERVICE,
        {
            "Get": adapter.unary(service.get, kv.GetRequest),
            "BatchGet": adapter.unary(service.batch_get, kv.BatchGetRequest),
            "Put": adapter.unary(service.put, kv.PutRequest),
            "Delete": adapter.unary(service.delete, kv.DeleteRequest),
            "DeleteRange": adapter.unary(service.delete_range, kv.DeleteRangeRequest),
            "Count": adapter.unary(service.count, kv.CountRequest),
            "Write": adapter.unary(service.write, kv.WriteRequest),
            "Txn": adapter.unary(service.txn, kv.TxnRequest),
            "Scan": adapter.unary_stream(service.scan, kv.ScanRequest),
            "Session": adapter.session(service, limits),
            "Watch": adapter.watch(watches),
        },
    )


def admin_methods(service: AdminService, adapter: Adapter) -> Mapping[str, Method]:
    """Return the methods of `shalekv.v1.Admin`, the operator's API, by path."""

    async def status(request: admin.StatusRequest, call: Call) -> admin.StatusReply:
        """Add the counts that the role does not have to its status.

        What the caller may not know is taken out.
        """
        answer = service.status(request, call)
        reply = answer if isinstance(answer, Message) else await answer
        adapter.fill(reply)
        return shown_to(reply, call)

    async def list_slow_calls(
        request: admin.ListSlowCallsRequest, call: Call
    ) -> admin.ListSlowCallsReply:
        """Add those of this process to those of others."""
        answer = service.list_slow_calls(request, call)
        reply = answer if isinstance(answer, Message) else await answer
        adapter.telemetry.fill_slow_calls(reply)
        return reply

    async def stats(request: admin.StatsRequest, call: Call) -> admin.StatsReply:
        """Add what calls have cost to the statistics of a role of one process."""
        answer = service.stats(request, call)
        reply = answer if isinstance(answer, Message) else await answer
        if not reply.origins:
            adapter.fill_origins(reply)
        return reply

    snapshots, access = service.snapshots, service.access
    return with_paths(
        ADMIN_SERVICE,
        {
            "Status": adapter.unary(status, admin.StatusRequest),
            "Stats": adapter.unary(stats, admin.StatsRequest),
            "ListSlowCalls": adapter.unary(list_slow_calls, admin.ListSlowCallsRequest),
            "Profile": adapter.unary(service.profile, admin.ProfileRequest),
            "CreateSnapshot": adapter.unary(snapshots.create, admin.CreateSnapshotRequest),
            "RenewSnapshot": adapter.unary(snapshots.renew, admin.RenewSnapshotRequest),
            "ListSnapshots": adapter.unary(snapshots.list, admin.ListSnapshotsRequest),
            "DeleteSnapshot": adapter.unary(snapshots.delete, admin.DeleteSnapshotRequest),
            "IngestSst": adapter.unary(service.ingest_sst, admin.IngestSstRequest),
            "WhoAmI": adapter.unary(access.who_am_i, admin.WhoAmIRequest),
            "GetAccessPolicy": adapter.unary(access.get_policy, admin.GetAccessPolicyRequest),
            "SetAccessPolicy": adapter.unary(access.set_policy, admin.SetAccessPolicyRequest),
        },
    )


def safekeeper_methods(service: SafekeeperService, adapter: Adapter) -> Mapping[str, Method]:
    """Return the methods of `shalekv.v1.Safekeeper` by path."""
    return with_paths(
        SAFEKEEPER_SERVICE,
        {
            "Admit": adapter.unary(service.admit, wire.AdmitRequest),
            "Propose": adapter.duplex(service.propose, wire.ProposeRequest),
            "Relay": adapter.duplex(service.relay, wire.RelayRequest),
            "Fetch": adapter.unary_stream(service.fetch, wire.FetchRequest),
            "Tail": adapter.unary_stream(service.tail, wire.TailRequest),
            "GetSafekeeperStatus": adapter.unary(service.status, wire.GetSafekeeperStatusRequest),
            "Retire": adapter.unary(service.retire, wire.RetireRequest),
        },
    )


def with_paths(service: str, methods: Mapping[str, Method]) -> Mapping[str, Method]:
    """Return the methods of a service, given by name, by path."""
    return {f"/{service}/{name}": method for name, method in methods.items()}
