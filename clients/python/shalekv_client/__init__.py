"""The Python client of ShaleKV: `Client` for asyncio, `SyncClient` for programs without it.

>>> async with Client("127.0.0.1:7654") as client:
...     await client.put(b"greeting", b"hello")
...     found = await client.get(b"greeting")
"""

from shalekv_client.changes import Add, Batch, Change, Delete, DeleteRange, Put
from shalekv_client.client import Client
from shalekv_client.conditions import (
    Absent,
    Compare,
    Condition,
    Exists,
    Missing,
    Operator,
    Present,
    RangeEmpty,
    SeqEquals,
    SeqIs,
    ValueIs,
)
from shalekv_client.errors import (
    Abandoned,
    Cancelled,
    ClientClosed,
    ConditionFailed,
    ConnectionLost,
    CounterOverflow,
    DeadlineExceeded,
    DeadlinePassed,
    ErrorDetails,
    Fenced,
    InvalidRequest,
    KeyExpired,
    KeyReused,
    NotACounter,
    NotApplied,
    NotSent,
    OutcomeUnknown,
    Overloaded,
    PageExpired,
    RangeTooCostly,
    ReplyTooLarge,
    ServerFailed,
    ShaleKVError,
    Stopping,
    Unimplemented,
    Unreachable,
)
from shalekv_client.idempotency import IdempotencyKeys
from shalekv_client.levels import Durability, ReadLevel, Role
from shalekv_client.levels_status import (
    CacheStatus,
    LevelsStatus,
    LevelStatus,
    ReadStatus,
    SnapshotStatus,
    StoreRequestStatus,
)
from shalekv_client.operations import Get, TxnOperation
from shalekv_client.process_status import CallStatus, ReaderState, ReaderStatus, WatchStatus
from shalekv_client.results import Commit, Entry, TxnResult, Value, View
from shalekv_client.retry import RetryPolicy
from shalekv_client.scan import Scan
from shalekv_client.server_stats import ProcessRequests, RequestKind, Stats
from shalekv_client.server_status import (
    ManifestStatus,
    MemoryPart,
    MemoryStatus,
    MemtableStatus,
    Status,
    WriterStatus,
)
from shalekv_client.session import Session
from shalekv_client.sync_client import SyncClient
from shalekv_client.sync_scan import SyncScan
from shalekv_client.sync_session import SyncSession

__all__ = [
    "Abandoned",
    "Absent",
    "Add",
    "Batch",
    "CacheStatus",
    "CallStatus",
    "Cancelled",
    "Change",
    "Client",
    "ClientClosed",
    "Commit",
    "Compare",
    "Condition",
    "ConditionFailed",
    "ConnectionLost",
    "CounterOverflow",
    "DeadlineExceeded",
    "DeadlinePassed",
    "Delete",
    "DeleteRange",
    "Durability",
    "Entry",
    "ErrorDetails",
    "Exists",
    "Fenced",
    "Get",
    "IdempotencyKeys",
    "InvalidRequest",
    "KeyExpired",
    "KeyReused",
    "LevelStatus",
    "LevelsStatus",
    "ManifestStatus",
    "MemoryPart",
    "MemoryStatus",
    "MemtableStatus",
    "Missing",
    "NotACounter",
    "NotApplied",
    "NotSent",
    "Operator",
    "OutcomeUnknown",
    "Overloaded",
    "PageExpired",
    "Present",
    "ProcessRequests",
    "Put",
    "RangeEmpty",
    "RangeTooCostly",
    "ReadLevel",
    "ReadStatus",
    "ReaderState",
    "ReaderStatus",
    "ReplyTooLarge",
    "RequestKind",
    "RetryPolicy",
    "Role",
    "Scan",
    "SeqEquals",
    "SeqIs",
    "ServerFailed",
    "Session",
    "ShaleKVError",
    "SnapshotStatus",
    "Stats",
    "Status",
    "Stopping",
    "StoreRequestStatus",
    "SyncClient",
    "SyncScan",
    "SyncSession",
    "TxnOperation",
    "TxnResult",
    "Unimplemented",
    "Unreachable",
    "Value",
    "ValueIs",
    "View",
    "WatchStatus",
    "WriterStatus",
]
