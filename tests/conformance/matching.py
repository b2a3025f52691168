"""Comparison of a reply with what a case expects: see "What is expected" in README.md."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from shalekv.v1 import kv_pb2
from tests.conformance.notation import (
    BadCase,
    Json,
    Variables,
    elements_of,
    field_of,
    is_message,
    operation,
    scalar_of,
)

SHOWN_CHARS_MAX = 300
_HEADER = kv_pb2.ReplyHeader.DESCRIPTOR
_ERROR = kv_pb2.OperationError.DESCRIPTOR
_TEXT = _ERROR.fields_by_name["message"]  # any field that holds a text
_NAMES_OF_CALL = ("request_id", "trace_id")
_NAMES_OF_ERROR = {"code", "reason", "field", "metadata", "retry", *_NAMES_OF_CALL}
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "$gt": operator.gt,
    "$ge": operator.ge,
    "$lt": operator.lt,
    "$le": operator.le,
    "$ne": operator.ne,
}
_MATCHERS = frozenset([*_COMPARISONS, "$any", "$as", "$length"])


class Disagreement(AssertionError):
    """The server answered otherwise than the case says."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of a call, or of an operation of a session."""

    code: str  # the name of a gRPC code
    message: str = ""
    domain: str | None = None  # of its ErrorInfo; None: it has none
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    bad_fields: tuple[str, ...] = ()
    retry_delay_ms: int | None = None  # None: no advice
    request_id: str = ""  # of an operation; empty: none
    trace_id: str = ""

    @classmethod
    def of_operation(cls, error: kv_pb2.OperationError) -> Failure:
        return cls(
            code=code_name(error.code),
            message=error.message,
            domain="shalekv",  # of whom else, inside a reply
            reason=error.reason,
            metadata=dict(error.metadata),
            bad_fields=tuple(v for k, v in error.metadata.items() if k == "field"),
            retry_delay_ms=error.retry_delay_ms or None,
            request_id=error.request_id,
            trace_id=error.trace_id,
        )


def code_name(number: int) -> str:
    """The name of a gRPC code by its number."""
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    return names.get(number, f"code {number}")


def match_failure(expected: Json, found: Failure, variables: Variables, path: str) -> None:
    """Raise `Disagreement` unless the error is the expected one."""
    if others := set(expected) - _NAMES_OF_ERROR:
        raise BadCase(f"{path}: an error has no {', '.join(sorted(others))}")
    wanted = {"code": found.code, "reason": found.reason, "retry": False, **expected}
    metadata = wanted.get("metadata", {})
    problems = {
        "no ErrorInfo of shalekv": found.domain != "shalekv",
        "no message": not found.message,
        f"not {wanted['code']}": found.code != wanted["code"],
        f"not {wanted['reason']}": found.reason != wanted["reason"],
        f"retry is not {wanted['retry']}": (found.retry_delay_ms is not None) != wanted["retry"],
    }
    if "field" in wanted:
        named = (found.metadata.get("field"), found.bad_fields)
        problems[f"not field {wanted['field']}"] = named != (wanted["field"], (wanted["field"],))
    for name in _NAMES_OF_CALL:
        if name in wanted:
            problems[f"not {name} {wanted[name]}"] = wanted[name] != getattr(found, name)
    for name in metadata:
        problems[f"no {name} in the metadata"] = name not in found.metadata
    for problem, is_so in problems.items():
        if is_so:
            raise Disagreement(path, f"{problem}: {found}")
    for name, value in metadata.items():
        _match_scalar(_TEXT, value, found.metadata[name], variables, f"{path}.metadata.{name}")


def match_message(expected: Json, found: Message, variables: Variables, path: str) -> None:
    """Raise `Disagreement` unless `found` is as expected; what is captured goes to `variables`."""
    kind = found.DESCRIPTOR
    if kind is _ERROR:
        assert isinstance(found, kv_pb2.OperationError)
        match_failure(expected, Failure.of_operation(found), variables, path)
        return
    if operation(expected)[0] == "$any":
        return
    is_partial = kind is _HEADER
    if operation(expected)[0] == "$partly":
        is_partial, expected = True, expected["$partly"]
    if not isinstance(expected, dict):
        raise BadCase(f"{path}: this is no {kind.full_name}: {expected!r}")
    for name, value in expected.items():
        _match_field(field_of(found, name), value, found, variables, f"{path}.{name}")
    if not is_partial:
        for set_field, value in found.ListFields():
            if set_field.name not in expected and set_field.message_type is not _HEADER:
                raise Disagreement(f"{path}.{set_field.name}", f"not expected: {shown(value)}")


def shown(value: object) -> str:
    text = str(value).strip() if isinstance(value, Message) else repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."


def _match_field(
    wanted: FieldDescriptor, expected: Json, found: Message, variables: Variables, path: str
) -> None:
    value = getattr(found, wanted.name)
    if expected is None:
        is_set = wanted in dict(found.ListFields())
        if is_set:
            raise Disagreement(path, f"must not be set, and is {shown(value)}")
        return
    if wanted.has_presence and not found.HasField(wanted.name):
        raise Disagreement(path, "is not set")
    if wanted.is_repeated:
        _match_list(wanted, expected, value, variables, path)
    elif is_message(wanted):
        match_message(expected, value, variables, path)
    else:
        _match_scalar(wanted, expected, value, variables, path)


def _match_list(
    wanted: FieldDescriptor, expected: Json, found: Any, variables: Variables, path: str
) -> None:
    match operation(expected):
        case "$any", _:
            return
        case "$length", length:
            if len(found) != length:
                raise Disagreement(path, f"{len(found)} elements, and not {length}")
            return
    elements = list(elements_of(expected, variables))
    for index, ((element, known), value) in enumerate(zip(elements, found, strict=False)):
        place = f"{path}[{index}]"
        # Variables of `$times` are known to the element alone; what it captures, to all.
        scope = variables if known is variables else known
        if is_message(wanted):
            match_message(element, value, scope, place)
        else:
            _match_scalar(wanted, element, value, scope, place)
    if len(elements) != len(found):
        problem = f"{len(found)} elements, and not {len(elements)}: {shown(list(found))}"
        raise Disagreement(path, problem)


def _match_scalar(
    wanted: FieldDescriptor, expected: Json, found: Any, variables: Variables, path: str
) -> None:
    is_matcher = isinstance(expected, dict) and expected and _MATCHERS.issuperset(expected)
    if not is_matcher:
        value = scalar_of(wanted, expected, variables)
        if found != value:
            raise Disagreement(path, f"{shown(found)}, and not {shown(value)}")
        return
    for name, argument in expected.items():
        if name in _COMPARISONS:
            value = scalar_of(wanted, argument, variables)
            if not _COMPARISONS[name](found, value):
                raise Disagreement(path, f"{shown(found)} is not {name} {shown(value)}")
        elif name == "$length" and len(found) != argument:
            raise Disagreement(path, f"{len(found)} bytes, and not {argument}")
        elif name == "$as":
            variables[argument] = found
