"""The asynchronous Python client of ShaleKV.

>>> async with Client("127.0.0.1:7654") as client:
...     await client.put(b"greeting", b"hello")
...     found = await client.get(b"greeting")
"""

from shalekv_client.changes import Batch, Change, Delete, Put
from shalekv_client.client import Client
from shalekv_client.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    DeadlinePassed,
    ErrorDetails,
    Fenced,
    InvalidRequest,
    NotApplied,
    OutcomeUnknown,
    Overloaded,
    ReplyTooLarge,
    ServerFailed,
    ShaleKVError,
    Stopping,
    Unimplemented,
    Unreachable,
)
from shalekv_client.levels import Durability, ReadLevel, Role
from shalekv_client.results import Commit, Entry, Value, View
from shalekv_client.retry import RetryPolicy
from shalekv_client.scan import Scan
from shalekv_client.server_status import ManifestStatus, MemtableStatus, Status, WriterStatus

__all__ = [
    "Batch",
    "Cancelled",
    "Change",
    "Client",
    "Commit",
    "ConnectionLost",
    "DeadlineExceeded",
    "DeadlinePassed",
    "Delete",
    "Durability",
    "Entry",
    "ErrorDetails",
    "Fenced",
    "InvalidRequest",
    "ManifestStatus",
    "MemtableStatus",
    "NotApplied",
    "OutcomeUnknown",
    "Overloaded",
    "Put",
    "ReadLevel",
    "ReplyTooLarge",
    "RetryPolicy",
    "Role",
    "Scan",
    "ServerFailed",
    "ShaleKVError",
    "Status",
    "Stopping",
    "Unimplemented",
    "Unreachable",
    "Value",
    "View",
    "WriterStatus",
]
