"""The places of requests that name keys, found in the protos, and what each has to need.

A new RPC, operation, bytes field or range without a rule here makes `sites` or its test fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from shalekv.protocol.access import Verb
from shalekv.v1 import admin_pb2, kv_pb2

READ, WRITE, DELETE_RANGE = Verb.READ, Verb.WRITE, Verb.DELETE_RANGE
WATCH, INGEST, ADMIN = Verb.WATCH, Verb.INGEST, Verb.ADMIN
Needed = frozenset[Verb]

SERVICES = (
    kv_pb2.DESCRIPTOR.services_by_name["KV"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
)
KEYS = {"key", "keys", "first_key", "last_key"}
# Bytes that are no keys, by message and field.
NO_KEYS = {
    "RequestHeader.snapshot_id": "an id",
    "RequestHeader.idempotency_key": "chosen by the client for a repeat; belongs to its principal",
    "PutRequest.value": "a value",
    "PutChange.value": "a value",
    "Compare.value": "a value",
    "ScanRequest.page_token": "made by the server; belongs to its principal, and needs the range",
    "RenewSnapshotRequest.id": "an id",
    "DeleteSnapshotRequest.id": "an id",
    "SstInfo.id": "an id",
}
# What a request needs that has a field; keys and ranges of the same operation alike.
CHANGE = {
    "put.key": {WRITE},
    "delete.key": {WRITE},
    "delete_range.range": {DELETE_RANGE},
    "add.key": {WRITE, READ},
    "touch.key": {WRITE, READ},
}
BRANCH = {"get.key": {READ}} | {f"change.{path}": verbs for path, verbs in CHANGE.items()}
OPERATIONS: Mapping[str, Mapping[str, set[Verb]]] = {
    "Get": {"key": {READ}},
    "BatchGet": {"keys": {READ}},
    "Put": {"key": {WRITE}, "key, precondition": {WRITE, READ}},
    "Delete": {
        "key": {WRITE},
        "key, precondition": {WRITE, READ},
        "key, count_deleted": {WRITE, READ},
    },
    "DeleteRange": {"range": {DELETE_RANGE}, "range, count_deleted": {DELETE_RANGE, READ}},
    "Write": {f"changes.{path}": verbs for path, verbs in CHANGE.items()},
    "Txn": {"compares.key": {READ}, "compares.range_empty": {READ}}
    | {f"then.{path}": verbs for path, verbs in BRANCH.items()}
    | {f"otherwise.{path}": verbs for path, verbs in BRANCH.items()},
}
SESSION = {  # as the call of the same name
    "get": "Get",
    "batch_get": "BatchGet",
    "put": "Put",
    "delete": "Delete",
    "delete_range": "DeleteRange",
    "write": "Write",
    "txn": "Txn",
}
RULES: Mapping[str, set[Verb] | None] = {  # no verb: whoever may do anything; None: everybody
    **{
        f"{rpc} {path}": verbs for rpc, paths in OPERATIONS.items() for path, verbs in paths.items()
    },
    **{
        f"Session operations.{name}.{path}": verbs
        for name, rpc in SESSION.items()
        for path, verbs in OPERATIONS[rpc].items()
    },
    "Count range": {READ},
    "Scan range": {READ},
    "Watch create.range": {WATCH},
    "Watch create.range, previous_value": {WATCH, READ},
    "IngestSst ssts.first_key": {INGEST},
    "IngestSst ssts.last_key": {INGEST},
    "SetAccessPolicy policy.roles.rules.range": {ADMIN},
    "Status": set(),
    "Stats": {ADMIN},
    "ListSlowCalls": {ADMIN},
    "Profile": {ADMIN},
    "CreateSnapshot": {ADMIN},
    "RenewSnapshot": {ADMIN},
    "ListSnapshots": {ADMIN},
    "DeleteSnapshot": {ADMIN},
    "GetAccessPolicy": {ADMIN},
    "WhoAmI": None,
}
# Flags that add to what an operation needs: the field beside the key, and how it is set.
FLAGS: Mapping[str, Callable[[Any], object]] = {
    "precondition": lambda message: message.precondition.MergeFrom(
        kv_pb2.Precondition(absent=True)
    ),
    "count_deleted": lambda message: setattr(message, "count_deleted", True),
    "previous_value": lambda message: setattr(message, "previous_value", True),
}
ADMIN_RANGES = {"SetAccessPolicy policy.roles.rules.range"}  # of a rule: no range of keys itself


@dataclass(frozen=True)
class Site:
    """One place of a request at which keys are named; or a request that names none."""

    method: MethodDescriptor
    path: tuple[FieldDescriptor, ...]  # from the request to the field
    flag: str = ""  # a field beside it

    @property
    def label(self) -> str:
        """Such as `Txn then.change.put.key`."""
        path = ".".join(field.name for field in self.path)
        return f"{self.method.name} {path}".strip() + (f", {self.flag}" if self.flag else "")

    @property
    def needed(self) -> Needed | None:
        """The verbs that the rule names; None: nobody is refused."""
        verbs = RULES[self.label]
        return None if verbs is None else frozenset(verbs)

    @property
    def names_keys(self) -> bool:
        return bool(self.path) and self.label not in ADMIN_RANGES

    @property
    def rpc(self) -> str:
        return f"/{self.method.containing_service.full_name}/{self.method.name}"

    def request(self, key: bytes) -> Message:
        """A request that names this key, or the range of this prefix, here, and no key else."""
        message: Any = GetMessageClass(self.method.input_type)()
        inner: Any = message
        for field in self.path[:-1]:
            child = getattr(inner, field.name)
            inner = child.add() if field.is_repeated else child
        if self.path:
            self._name(inner, self.path[-1], key)
        if self.flag:
            FLAGS[self.flag](inner)
        return complete(message)

    @staticmethod
    def _name(inner: Any, field: FieldDescriptor, key: bytes) -> None:
        if field.message_type is not None:
            getattr(inner, field.name).prefix = key
        elif field.is_repeated:
            getattr(inner, field.name).append(key)
        else:
            setattr(inner, field.name, key)


def complete(message: Any) -> Message:
    """Add what a request lacks to be done, so that one that is not refused has an effect."""
    if isinstance(message, kv_pb2.TxnRequest):
        for compare in message.compares:
            if compare.WhichOneof("test") is None:
                compare.exists = True
    if isinstance(message, kv_pb2.SessionRequest):
        for operation in message.operations:
            complete(operation.txn) if operation.HasField("txn") else None
    if isinstance(message, admin_pb2.ProfileRequest):
        message.duration_ms = 1  # refused by the service, at once
    if isinstance(message, admin_pb2.IngestSstRequest):
        for sst in message.ssts:  # a file of one key
            sst.first_key = sst.first_key or sst.last_key
            sst.last_key = sst.last_key or sst.first_key
    return message  # type: ignore[no-any-return]


def sites() -> Iterator[Site]:
    """Yield all sites of all services."""
    for service in SERVICES:
        for method in service.methods:
            found = [*_paths(method.input_type)]
            yield from (Site(method, path) for path in found)
            for path in found:
                message = path[-1].containing_type
                beside = {field.name for field in message.fields} if message is not None else ()
                yield from (Site(method, path, flag) for flag in FLAGS if flag in beside)
            if not found:
                yield Site(method, ())


def _paths(message: Descriptor) -> Iterator[tuple[FieldDescriptor, ...]]:
    for field in message.fields:
        if field.message_type is kv_pb2.KeyRange.DESCRIPTOR:
            yield (field,)
        elif field.message_type is not None:
            yield from ((field, *rest) for rest in _paths(field.message_type))
        elif field.type == FieldDescriptor.TYPE_BYTES:
            if field.name in KEYS:
                yield (field,)
            elif f"{message.name}.{field.name}" not in NO_KEYS:
                raise AssertionError(f"{message.name}.{field.name}: is it a key?")
