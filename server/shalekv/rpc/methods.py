"""`shalekv.v1.KV` over gRPC: which method is answered by what."""

from __future__ import annotations

import grpc

from shalekv.rpc.adapter import Adapter
from shalekv.server.service import KvService, WatchService
from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2 as kv

KV_SERVICE = kv.DESCRIPTOR.services_by_name["KV"].full_name


def kv_methods(
    service: KvService, watches: WatchService, adapter: Adapter, limits: LimitSettings
) -> grpc.GenericRpcHandler:
    """The methods of the data API."""
    methods = {
        "Get": adapter.unary(service.get, kv.GetRequest),
        "BatchGet": adapter.unary(service.batch_get, kv.BatchGetRequest),
        "Put": adapter.unary(service.put, kv.PutRequest),
        "Delete": adapter.unary(service.delete, kv.DeleteRequest),
        "DeleteRange": adapter.unary(service.delete_range, kv.DeleteRangeRequest),
        "Write": adapter.unary(service.write, kv.WriteRequest),
        "Txn": adapter.unary(service.txn, kv.TxnRequest),
        "Scan": adapter.unary_stream(service.scan, kv.ScanRequest),
        "Session": adapter.session(service, limits),
        "Watch": adapter.watch(watches),
    }
    return grpc.method_handlers_generic_handler(KV_SERVICE, methods)
