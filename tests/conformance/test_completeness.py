"""Nothing of the data API is forgotten: each field, enum value, limit and error is in some case."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor

from shalekv.settings import LimitSettings
from shalekv.v1 import kv_pb2
from tests.conformance.calls import method_of
from tests.conformance.cases import topics
from tests.conformance.notation import Json, is_map, is_message, operation

ROOT = Path(__file__).parents[2]
KV = kv_pb2.DESCRIPTOR.services_by_name["KV"]
ERROR = kv_pb2.OperationError.DESCRIPTOR  # is compared as other errors are
TOPICS = topics()

FAULT = "the server or its store is at fault"
OPERATOR = "told to who starts a server, or edits a manifest"
OF_QUORUMS = "takes safekeepers: tests/e2e/quorum"
OF_WATCHES = "tests/unit/roles/watching: cases have no watches"
GUARDED = "takes a server that enforces an access policy: tests/unit/server/access"
REASONS_WITHOUT_CASE: Mapping[str, str] = {
    "DEADLINE_PASSED": "a client of gRPC sends no call whose deadline has passed",
    "FENCED": "takes a second writer: tests/e2e/test_writers.py",
    "STOPPING": "takes a server that is being stopped: tests/e2e/test_writers.py",
    "STANDING_BY": "takes a server that is not elected: tests/e2e/test_elect.py",
    "NOT_THE_WRITER": "takes a reader: tests/e2e/test_reader_process.py",
    "TOO_STALE": "takes a reader that is behind: tests/unit/server/test_reader_kv.py",
    "SEQ_NOT_REACHED": "is the end of a wait: tests/unit/server/test_reader_kv.py",
    "WAL_COLLECTED": OF_WATCHES,
    "WATCH_TOO_SLOW": OF_WATCHES,
    "STREAM_TOO_SLOW": "takes clients that take no results: tests/e2e/test_unread_scans.py",
    "WAL_UNPROTECTED": OPERATOR,
    "BACKUP_NOT_FOUND": OPERATOR,
    "BACKUP_BUSY": OPERATOR,
    "ORIGIN_LOST": FAULT,
    "UNAUTHENTICATED": GUARDED,
    "PERMISSION_DENIED": GUARDED,
    "WRONG_ROLE": "is of safekeepers: tests/unit/rpc/test_safekeeper.py",
    "PROFILE_REFUSED": "is of the API of operators: tests/unit/rpc/test_profile.py",
    "QUOTA_EXCEEDED": GUARDED,
    "POLICY_UNKNOWN": GUARDED,
    "ISSUER_UNAVAILABLE": GUARDED,
    "INVALID_SETTING": OPERATOR,
    "INVALID_URL": OPERATOR,
    "DATABASE_NOT_FOUND": OPERATOR,
    "DATABASE_EXISTS": OPERATOR,
    "DATABASE_MISMATCH": OPERATOR,
    "MANIFEST_CONFLICT": OPERATOR,
    "MANIFEST_VERSION_EXISTS": OPERATOR,
    "LEASE_LOST": OPERATOR,
    "LOAD_UNKNOWN": OPERATOR,
    "IMPLAUSIBLE_TIME": OPERATOR,
    "LOG_BEHIND_ARCHIVE": OPERATOR,
    "LOG_DAMAGED": OPERATOR,
    "LOG_FULL": OF_QUORUMS,
    "NOT_A_MEMBER": OPERATOR,
    "QUORUM_UNAVAILABLE": OF_QUORUMS,
    "RECORD_TRIMMED": OPERATOR,
    "PART_FAILED": "is logged by a compactor, which goes on",
    "SUPERSEDED": OPERATOR,
    "OUTCOME_UNKNOWN": FAULT,
    "STORE": FAULT,
    "STORE_BROKEN": FAULT,
    "STORE_REFUSED": FAULT,
    "STORE_UNAVAILABLE": FAULT,
    "STORE_UNFIT": OPERATOR,
    "OBJECT_NOT_FOUND": FAULT,
    "DATABASE": FAULT,
    "ILLEGAL_STATE": FAULT,
    "INTERNAL": FAULT,
    "UNSUPPORTED_VERSION": FAULT,
    "BAD_CHECKSUM": FAULT,
    "BAD_MAGIC": FAULT,
    "BAD_STRUCTURE": FAULT,
    "CORRUPT_OBJECT": FAULT,
    "TRUNCATED": FAULT,
    "WRONG_OBJECT": FAULT,
}
VALUES_WITHOUT_CASE: Mapping[str, str] = {
    "ROLE_UNSPECIFIED": "never sent",
    "ROLE_READER": "takes a reader: tests/e2e/test_reader_process.py",
}
LIMITS_WITHOUT_CASE: Mapping[str, str] = {
    "scan_message_bytes": "where a stream is cut is the server's affair, within 3.5 MiB",
    "snapshot_view_bytes_max": "what is kept ready is the server's affair",
    "result_stalled_ms": "takes clients that take no results: tests/e2e/test_unread_scans.py",
}


class Call(NamedTuple):
    """A call of some step: what is sent, what is expected, and the errors."""

    method: MethodDescriptor
    requests: list[Json]
    replies: list[Json]
    errors: list[Json]


def calls() -> Iterator[Call]:
    for topic in TOPICS:
        for case in topic.cases:
            for step in case.steps:
                yield from calls_of(step)


def calls_of(step: Json) -> Iterator[Call]:
    """The calls of a step, and of the steps inside of it."""
    for inner in [step["wait_until"]] if "wait_until" in step else step.get("together", []):
        yield from calls_of(inner)
    if "call" in step:
        acts = step.get("exchange", [])
        results = [result for act in acts for result in unfolded(act.get("receive", []))]
        yield Call(
            method=method_of(step["call"]),
            requests=[*named(step, "request"), *(r for act in acts for r in named(act, "send"))],
            replies=[*named(step, "reply", "each"), *([{"results": results}] if results else [])],
            errors=[*named(step, "error"), *(e for r in results for e in named(r, "error"))],
        )


def named(written: Json, *names: str) -> list[Json]:
    return [written[name] for name in names if name in written]


def unfolded(written: Json) -> list[Json]:
    """Return the elements of a list, those of `$times` once; none if it is not a list."""
    if not isinstance(written, list):
        return []
    return [operation(e)[1][1] if operation(e)[0] == "$times" else e for e in written]


def uses(kind: Descriptor, written: Json) -> Iterator[tuple[FieldDescriptor, Json]]:
    """The fields that a message names, with what is written there, at any depth."""
    if operation(written)[0] == "$partly":
        written = written["$partly"]
    if not isinstance(written, dict) or operation(written)[0] or kind is ERROR:
        return
    for name, value in written.items():
        field: FieldDescriptor = kind.fields_by_name[name]
        for element in unfolded(value) if field.is_repeated else [value]:
            yield field, element
            if is_message(field) and not is_map(field) and field.message_type is not None:
                yield from uses(field.message_type, element)


def fields_of(kind: Descriptor, known: set[Descriptor]) -> Iterator[FieldDescriptor]:
    """The fields of a message and of all messages inside of it; `known` ones are left out."""
    if kind in known:
        return
    known.add(kind)
    for field in kind.fields:
        yield field
        if field.message_type is not None and not is_map(field):
            yield from fields_of(field.message_type, known)


def methods() -> list[MethodDescriptor]:
    """Return the methods that cases call, but for watches, whose events depend on other writes."""
    return [method for method in KV.methods if method.name != "Watch"]


def test_every_method_is_called() -> None:
    """Each method that cases call has one in which it succeeds."""
    succeeds = {call.method.name for call in calls() if not call.errors}
    assert [method.name for method in methods() if method.name not in succeeds] == []


def test_every_field_of_a_request_is_sent() -> None:
    """Each field of each request, at any depth, is set in a case."""
    used = {field for c in calls() for r in c.requests for field, _ in uses(c.method.input_type, r)}
    known: set[Descriptor] = set()
    wanted = {field for method in methods() for field in fields_of(method.input_type, known)}
    assert sorted(field.full_name for field in wanted - used) == []


def test_every_field_of_a_reply_is_compared() -> None:
    """Each field of each reply, at any depth, is named in what a case expects."""
    used = {field for c in calls() for r in c.replies for field, _ in uses(c.method.output_type, r)}
    known: set[Descriptor] = {ERROR}
    wanted = {field for method in methods() for field in fields_of(method.output_type, known)}
    assert sorted(field.full_name for field in wanted - used) == []


def test_every_value_of_an_enum_is_used() -> None:
    """Each value of each enum is in a request or in a reply, and so is an unknown one."""
    used: dict[str, set[Json]] = {}
    for call in calls():
        for kind, messages in (
            (call.method.input_type, call.requests),
            (call.method.output_type, call.replies),
        ):
            for field, value in (use for message in messages for use in uses(kind, message)):
                if field.enum_type is not None:
                    values = value.values() if isinstance(value, dict) else [value]
                    used.setdefault(field.enum_type.full_name, set()).update(map(str, values))
    for enum in (kv_pb2.ReadLevel, kv_pb2.Durability, kv_pb2.Role, kv_pb2.Compare.Operator):
        names = used[enum.DESCRIPTOR.full_name]
        missing = set(enum.keys()) - names - VALUES_WITHOUT_CASE.keys()
        assert sorted(missing) == []
        if enum is not kv_pb2.Role:
            assert any(name.lstrip("-").isdigit() for name in names), enum.DESCRIPTOR.full_name


def test_every_error_is_provoked() -> None:
    """Each reason that a client can provoke is, with code and advice as the page says."""
    page = (ROOT / "server/docs/errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \|[^|]*\|([^|]*)\|", page, re.MULTILINE)
    table = {reason: (code, "Retry" in metadata) for reason, code, metadata in rows}
    provoked = {e["reason"]: e for c in calls() for e in c.errors if "reason" in e}
    assert sorted(table.keys() - provoked.keys() - REASONS_WITHOUT_CASE.keys()) == []
    assert sorted(REASONS_WITHOUT_CASE.keys() - table.keys()) == []
    assert sorted(REASONS_WITHOUT_CASE.keys() & provoked.keys()) == []
    for call in calls():
        for error in call.errors:
            assert (error["code"], error.get("retry", False)) == table[error["reason"]], error


def test_every_limit_is_reached() -> None:
    """For each setting that limits requests there is a server on which cases reach it."""
    small = {key.partition(".")[2] for topic in TOPICS for key in topic.settings}
    unknown = set(LimitSettings.model_fields) - small - LIMITS_WITHOUT_CASE.keys()
    assert sorted(unknown) == []


def test_cases_are_named_once() -> None:
    """No two cases of a file have one name, and each name is a sentence about what is so."""
    for topic in TOPICS:
        names = [case.name for case in topic.cases]
        assert len(set(names)) == len(names), topic.name
        assert all(name[0].isupper() or name[0].isdigit() for name in names), topic.name
        assert all(case.steps for case in topic.cases), topic.name
