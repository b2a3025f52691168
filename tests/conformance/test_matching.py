"""The runner itself: the meaning of the notation, and that a wrong reply is noticed."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message

from shalekv.v1 import kv_pb2
from tests.conformance.matching import Disagreement, Failure, match_failure, match_message
from tests.conformance.notation import BadCase, Json, Variables, message_of

GET, PUT, SCAN, TXN = kv_pb2.GetReply, kv_pb2.PutReply, kv_pb2.ScanReply, kv_pb2.TxnReply
DURABLE, MEMORY = kv_pb2.DURABILITY_DURABLE, kv_pb2.DURABILITY_MEMORY
HEADER = kv_pb2.ReplyHeader(seq=7, wal_id=0)
FOUND = GET(header=HEADER, found=True, value=b"v", seq=5)
COUNTED = TXN(results=[kv_pb2.TxnResult(counter=0)])
READ = TXN(results=[kv_pb2.TxnResult(get=GET())])
EMPTY = PUT(header=kv_pb2.ReplyHeader())
ENTRIES = SCAN(entries=[kv_pb2.Entry(key=b"00000"), kv_pb2.Entry(key=b"00001")])


def variables() -> Variables:
    return {"p": "pre/", "s": 5, "raw": b"\xff\0"}


WRITTEN: list[tuple[str, Json, bytes]] = [
    ("a text", "key", b"key"),
    ("a text beyond ASCII", "é", b"\xc3\xa9"),
    ("variables", "${p}a${s}b${raw}", b"pre/a5b\xff\0"),
    ("no variable", "${p", b"${p"),
    ("hex", {"$hex": "00FF"}, b"\0\xff"),
    ("a repetition", {"$repeat": ["${p}", 2]}, b"pre/pre/"),
    ("filled up", {"$pad": ["${p}", 7]}, b"pre/xxx"),
    ("parts", {"$concat": ["a", {"$hex": "00"}, "${s}"]}, b"a\x005"),
    ("a counter", {"$counter": -2}, b"\xfe" + b"\xff" * 7),
]

AGREES: list[tuple[str, Message, Json]] = [
    ("all fields", FOUND, {"found": True, "value": "v", "seq": 5}),
    ("a header in part", FOUND, {"header": {"seq": 7}, "found": True, "value": "v", "seq": 5}),
    ("a variable", FOUND, {"found": True, "value": "v", "seq": "${s}"}),
    ("a sum", FOUND, {"found": True, "value": "v", "seq": {"$plus": ["${s}", -1, 1]}}),
    ("a default that is named", GET(), {"found": False, "value": "", "expire_at_ms": 0}),
    ("any message", FOUND, {"$any": True}),
    ("a part", FOUND, {"$partly": {"found": True}}),
    ("bounds", FOUND, {"found": True, "value": {"$length": 1}, "seq": {"$gt": 4, "$le": 5}}),
    ("another value", FOUND, {"found": True, "value": {"$ne": ""}, "seq": {"$ne": 6}}),
    ("bytes in order", FOUND, {"found": True, "value": {"$lt": "w"}, "seq": {"$ge": 5}}),
    ("an enum", PUT(durability=DURABLE), {"durability": "DURABILITY_DURABLE"}),
    ("an enum by number", PUT(durability=DURABLE), {"durability": 1}),
    ("a field that is 0 and set", FOUND, {"$partly": {"header": {"wal_id": 0}}}),
    ("a field that is not set", GET(header=kv_pb2.ReplyHeader()), {"header": {"wal_id": None}}),
    ("no header", READ, {"results": [{"get": {"header": None}}]}),
    ("0 in a oneof", COUNTED, {"results": [{"counter": 0}]}),
    ("a list", ENTRIES, {"entries": [{"key": "00000"}, {"key": "00001"}]}),
    ("a list of a length", ENTRIES, {"entries": {"$length": 2}}),
    ("many elements", ENTRIES, {"entries": [{"$times": [2, {"key": "${i}"}]}]}),
]

DISAGREES: list[tuple[str, Message, Json]] = [
    ("another value", FOUND, {"found": True, "value": "w", "seq": 5}),
    ("a field too much", FOUND, {"found": True, "value": "v"}),
    ("a field too little", GET(found=True), {"found": True, "value": "v"}),
    ("another header", FOUND, {"$partly": {"header": {"seq": 8}}}),
    ("no header", GET(), {"header": {"seq": 0}}),
    ("a header", FOUND, {"$partly": {"header": None}}),
    ("a field that is not set", EMPTY, {"header": {"wal_id": 0}}),
    ("any value where none is set", EMPTY, {"header": {"wal_id": {"$any": True}}}),
    ("a field that is set", FOUND, {"$partly": {"header": {"wal_id": None}}}),
    ("a bound", FOUND, {"$partly": {"seq": {"$gt": 5}}}),
    ("one of two bounds", FOUND, {"$partly": {"seq": {"$gt": 4, "$lt": 5}}}),
    ("the other bounds", FOUND, {"$partly": {"seq": {"$ge": 6}}}),
    ("at most", FOUND, {"$partly": {"seq": {"$le": 4}}}),
    ("not that", FOUND, {"$partly": {"seq": {"$ne": 5}}}),
    ("the length", FOUND, {"$partly": {"value": {"$length": 2}}}),
    ("another variable", FOUND, {"$partly": {"seq": {"$plus": ["${s}", 1]}}}),
    ("another enum", PUT(durability=MEMORY), {"durability": "DURABILITY_DURABLE"}),
    ("another of a oneof", COUNTED, {"results": [{"get": {"found": False}}]}),
    ("nothing of a oneof", COUNTED, {"results": [{}]}),
    ("an element too much", ENTRIES, {"entries": [{"key": "00000"}]}),
    ("an element too little", ENTRIES, {"entries": [{"$times": [3, {"key": "${i}"}]}]}),
    ("another order", ENTRIES, {"entries": [{"key": "00001"}, {"key": "00000"}]}),
    ("the length of a list", ENTRIES, {"entries": {"$length": 3}}),
    ("an empty list", ENTRIES, {"entries": []}),
]

FAILED = Failure(
    code="ABORTED",
    message="it did not hold",
    domain="shalekv",
    reason="CONDITION_FAILED",
    metadata={"found_seq": "5"},
)
REFUSED = Failure(
    code="INVALID_ARGUMENT",
    message="key: empty",
    domain="shalekv",
    reason="INVALID_REQUEST",
    metadata={"field": "key"},
    bad_fields=("key",),
    request_id="a1",
    trace_id="f" * 32,
)

SAME_ERROR: list[tuple[Json, Failure]] = [
    ({}, FAILED),
    ({"code": "ABORTED", "reason": "CONDITION_FAILED"}, FAILED),
    ({"metadata": {"found_seq": "${s}"}}, FAILED),
    ({"metadata": {"found_seq": {"$ne": "0"}}}, FAILED),
    ({"code": "INVALID_ARGUMENT", "field": "key"}, REFUSED),
    ({"request_id": "a1", "trace_id": "f" * 32}, REFUSED),
    ({"retry": True}, Failure("RESOURCE_EXHAUSTED", "later", "shalekv", retry_delay_ms=0)),
]

OTHER_ERROR: list[tuple[Json, Failure]] = [
    ({"code": "INVALID_ARGUMENT"}, FAILED),
    ({"reason": "INVALID_REQUEST"}, FAILED),
    ({"metadata": {"found_seq": "6"}}, FAILED),
    ({"metadata": {"condition": "absent"}}, FAILED),
    ({"field": "key"}, FAILED),
    ({"field": "value"}, REFUSED),
    ({"request_id": ""}, REFUSED),
    ({"trace_id": "f" * 31}, REFUSED),
    ({"retry": True}, FAILED),
    ({}, Failure("RESOURCE_EXHAUSTED", "later", "shalekv", retry_delay_ms=0)),
    ({}, Failure("ABORTED", "it did not hold")),
    ({}, Failure("ABORTED", "it did not hold", "elsewhere")),
    ({}, Failure("ABORTED", "", "shalekv")),
]


@pytest.mark.parametrize(("what", "written", "meant"), WRITTEN, ids=[w for w, *_ in WRITTEN])
def test_bytes_are_written_so(what: str, written: Json, meant: bytes) -> None:
    """Each way to write bytes gives them."""
    assert what
    request: Any = message_of(kv_pb2.GetRequest.DESCRIPTOR, {"key": written}, variables())
    assert request.key == meant


def test_a_field_that_is_named_is_set() -> None:
    """An empty message, and the default of a member of a oneof, are there when they are named."""
    written = {"precondition": {"absent": False}, "header": {}}
    request: Any = message_of(kv_pb2.PutRequest.DESCRIPTOR, written, {})
    assert request.HasField("header")
    assert request.precondition.WhichOneof("condition") == "absent"


@pytest.mark.parametrize(("what", "found", "expected"), AGREES, ids=[w for w, *_ in AGREES])
def test_right_replies_agree(what: str, found: Message, expected: Json) -> None:
    """A reply that is as expected is accepted."""
    match_message(expected, found, variables(), what)


@pytest.mark.parametrize(("what", "found", "expected"), DISAGREES, ids=[w for w, *_ in DISAGREES])
def test_wrong_replies_disagree(what: str, found: Message, expected: Json) -> None:
    """A reply that differs from the expected one is refused, with the place of the difference."""
    with pytest.raises(Disagreement, match=what):
        match_message(expected, found, variables(), what)


@pytest.mark.parametrize(("expected", "found"), SAME_ERROR)
def test_right_errors_agree(expected: Json, found: Failure) -> None:
    """An error that is as expected is accepted."""
    match_failure(expected, found, variables(), "error")


@pytest.mark.parametrize(("expected", "found"), OTHER_ERROR)
def test_wrong_errors_disagree(expected: Json, found: Failure) -> None:
    """An error that is not as expected, or does not say what every error says, is not accepted."""
    with pytest.raises(Disagreement):
        match_failure(expected, found, variables(), "error")


def test_errors_of_operations_are_compared_as_others() -> None:
    """The same notation inside of a reply of a session."""
    error = kv_pb2.OperationError(
        code=3, message="key: empty", reason="INVALID_REQUEST", metadata={"field": "key"}
    )
    result = kv_pb2.SessionResult(id=1, error=error)
    right = {"code": "INVALID_ARGUMENT", "reason": "INVALID_REQUEST", "field": "key"}
    match_message({"id": 1, "error": right}, result, {}, "result")
    with pytest.raises(Disagreement):
        match_message({"id": 1, "error": {"code": "ABORTED"}}, result, {}, "result")
    with pytest.raises(Disagreement):
        match_message({"id": 1, "get": {"found": False}}, result, {}, "result")


def test_what_is_captured_can_be_used_behind() -> None:
    """A variable is set in the order in which fields are written."""
    known = variables()
    expected = {"header": {"seq": {"$gt": 0, "$as": "v"}}, "found": True, "value": {"$as": "raw"}}
    match_message(expected | {"seq": {"$lt": "${v}", "$as": "t"}}, FOUND, known, "reply")
    assert (known["v"], known["t"], known["raw"]) == (7, 5, b"v")


@pytest.mark.parametrize(
    "written",
    [{"kee": "a"}, {"key": 1}, {"key": {"$what": 1}}, {"key": "${none}"}, {"header": "a"}],
)
def test_bad_cases_are_refused(written: Json) -> None:
    """A case that breaks the rules of README.md is an error of the case, and not of the server."""
    with pytest.raises(BadCase):
        message_of(kv_pb2.GetRequest.DESCRIPTOR, written, {})
