"""The audit log: what its lines say and never say, and what becomes of them on a real file."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs

from shalekv.clock import MachineClock
from shalekv.errors import (
    ConditionFailed,
    InvalidSetting,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    WriteTimedOut,
)
from shalekv.server.access.audit import (
    KEYS_SHOWN_MAX,
    LINE_BYTES_MAX,
    AuditLog,
)
from shalekv.server.access.audit_file import LOST_LOG_INTERVAL_MS, AuditFile
from shalekv.settings import AccessSettings, AuditKeys, AuditLevel
from shalekv.v1 import admin_pb2 as admin
from shalekv.v1 import kv_pb2 as kv
from shalekv.v1 import manifest_pb2 as manifest
from tests.style.sources import ROOT

SECRET = b"\x01" * 32
CHANGES: list[Message] = [
    kv.PutRequest(key=b"k"),
    kv.DeleteRequest(key=b"k"),
    kv.DeleteRangeRequest(),
    kv.WriteRequest(),
    kv.TxnRequest(),
    admin.IngestSstRequest(),
]
READS: list[Message] = [
    kv.GetRequest(key=b"k"),
    kv.BatchGetRequest(),
    kv.CountRequest(),
    kv.ScanRequest(),
    kv.WatchCreate(),
    admin.StatusRequest(),
    admin.WhoAmIRequest(),
]
ADMINISTRATION: list[Message] = [
    admin.StatsRequest(),
    admin.ListSlowCallsRequest(),
    admin.ProfileRequest(),
    admin.CreateSnapshotRequest(),
    admin.RenewSnapshotRequest(),
    admin.ListSnapshotsRequest(),
    admin.DeleteSnapshotRequest(),
    admin.GetAccessPolicyRequest(),
    admin.SetAccessPolicyRequest(),
]


@dataclass(frozen=True)
class AnyCall:
    peer: str = "ipv4:10.0.0.7:53124"
    principal: str = "token:alice"
    request_id: str = "a1"
    trace_id: str = ""


class Audit:
    """An audit log in a file, and its lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = MachineClock()
        self.file = AuditFile(str(path), self.clock)

    def log(
        self,
        level: AuditLevel = AuditLevel.ALL,
        keys: AuditKeys = AuditKeys.PLAIN,
        secret: bytes = SECRET,
    ) -> AuditLog:
        settings = AccessSettings(audit_log=str(self.path), audit_level=level, audit_keys=keys)
        log = AuditLog(settings, self.file, self.clock, "writer")
        log.use_secret(secret)
        return log

    def lines(self) -> list[dict[str, Any]]:
        self.file.flush()
        return parsed(self.path)

    def line_of(self, log: AuditLog, request: Message, outcome: Any = b"") -> dict[str, Any]:
        log.begin(AnyCall(), request, 64).end(outcome)
        return self.lines()[-1]


def parsed(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


@pytest.fixture
async def audit(tmp_path: Path) -> Audit:
    return Audit(tmp_path / "audit.log")


def denied() -> PermissionDenied:
    return PermissionDenied("no", verb="read")


async def test_a_line_says_who_did_what_and_how_it_ended(audit: Audit) -> None:
    """A line has all that the documentation names."""
    log = audit.log()
    log.enter_term(lambda: 3)
    reply = kv.PutReply(header=kv.ReplyHeader(seq=17, epoch=3)).SerializeToString()
    line = audit.line_of(log, kv.PutRequest(key=b"user/1", value=b"secret"), reply)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert 0 <= line.pop("duration_ms") < 1_000
    assert line == {
        "role": "writer",
        "epoch": 3,
        "principal": "token:alice",
        "peer": "ipv4:10.0.0.7:53124",
        "request_id": "a1",
        "method": "KV.Put",
        "verb": "write",
        "keys": ["user/1"],
        "key_count": 1,
        "outcome": "ok",
        "seq": 17,
        "request_bytes": 64,
        "reply_bytes": len(reply),
    }


async def test_outcomes_are_told_apart(audit: Audit) -> None:
    """Refused, failed, and unknown: an error has its reason."""
    log, request = audit.log(), kv.PutRequest(key=b"k")
    for error in (
        denied(),
        Unauthenticated("no"),
        ConditionFailed("no", condition="absent", found_seq=1),
        QuotaExceeded("no", retry_after_ms=1, quota="watches"),
        WriteTimedOut("no"),
        asyncio.CancelledError(),
        ZeroDivisionError(),
    ):
        log.begin(AnyCall(), request, 0).end(error)
    assert [(line["outcome"], line.get("reason")) for line in audit.lines()] == [
        ("denied", None),
        ("unauthenticated", None),
        ("error", "CONDITION_FAILED"),
        ("error", "QUOTA_EXCEEDED"),
        ("unknown", "WRITE_TIMED_OUT"),
        ("unknown", "CANCELLED"),
        ("unknown", "INTERNAL"),
    ]


async def test_levels_include_those_before(audit: Audit) -> None:
    """Each level notes more: administration, then writes, then all."""
    noted = {
        level: [
            request for request in (*ADMINISTRATION, *CHANGES, *READS) if log.notes(type(request))
        ]
        for level in AuditLevel
        for log in [audit.log(level)]
    }
    assert noted == {
        AuditLevel.DENIED: [],
        AuditLevel.ADMIN: ADMINISTRATION,
        AuditLevel.WRITES: [*ADMINISTRATION, *CHANGES],
        AuditLevel.ALL: [*ADMINISTRATION, *CHANGES, *READS],
    }


async def test_each_rpc_has_a_level() -> None:
    """No call of the services is forgotten by this test, which knows the level of each."""
    known = {type(request).DESCRIPTOR.name for request in (*ADMINISTRATION, *CHANGES, *READS)}
    files = (kv.DESCRIPTOR, admin.DESCRIPTOR)
    methods = [m for file in files for s in file.services_by_name.values() for m in s.methods]
    streams = {"SessionRequest", "WatchRequest"}  # whose operations are what is noted
    assert {m.input_type.name for m in methods} - streams == known - {"WatchCreate"}


async def test_keys_are_shown_wherever_a_request_names_them(audit: Audit) -> None:
    """All keys of a request have their place in its line, up to the first few."""
    span = kv.KeyRange(start=b"a", end=b"b")
    put, add = kv.PutChange(key=b"p"), kv.AddChange(key=b"+")
    changes = [
        kv.Change(put=put),
        kv.Change(delete=kv.DeleteChange(key=b"d")),
        kv.Change(delete_range=kv.DeleteRangeChange(range=span)),
        kv.Change(add=add),
        kv.Change(touch=kv.TouchChange(key=b"t")),
    ]
    shown = {"start": "a", "end": "b"}
    cases: list[tuple[Message, list[str] | None, list[dict[str, str]] | None, int]] = [
        (kv.GetRequest(key=b"g"), ["g"], None, 1),
        (kv.BatchGetRequest(keys=[b"1", b"2"]), ["1", "2"], None, 2),
        (kv.DeleteRequest(key=b"d"), ["d"], None, 1),
        (kv.DeleteRangeRequest(range=span), None, [shown], 1),
        (kv.ScanRequest(range=kv.KeyRange(prefix=b"p/")), None, [{"prefix": "p/"}], 1),
        (kv.CountRequest(range=span), None, [shown], 1),
        (kv.ScanRequest(), None, [{"start": "", "end": ""}], 1),
        (kv.WatchCreate(range=span), None, [shown], 1),
        (kv.WriteRequest(changes=changes), ["p", "d", "+", "t"], [shown], 5),
        (
            kv.TxnRequest(
                compares=[kv.Compare(key=b"c", exists=True), kv.Compare(range_empty=span)],
                then=[kv.TxnOperation(get=kv.GetRequest(key=b"t"))],
                otherwise=[kv.TxnOperation(change=kv.Change(put=put))],
            ),
            ["c", "t", "p"],
            [shown],
            4,
        ),
        (
            admin.IngestSstRequest(ssts=[manifest.SstInfo(first_key=b"a", last_key=b"b")]),
            None,
            [shown],
            1,
        ),
    ]
    log = audit.log()
    for request, keys, ranges, count in cases:
        line = audit.line_of(log, request)
        assert (line.get("keys"), line.get("ranges"), line["key_count"]) == (keys, ranges, count)


async def test_many_keys_are_counted_and_the_first_shown(audit: Audit) -> None:
    """A write of many keys has one line of bounded length."""
    changes = [kv.Change(put=kv.PutChange(key=b"%d" % number)) for number in range(10_000)]
    line = audit.line_of(audit.log(), kv.WriteRequest(changes=changes))
    assert line["key_count"] == 10_000
    assert line["keys"] == [str(number) for number in range(KEYS_SHOWN_MAX)]


async def test_keys_can_be_hashed_cut_or_plain(audit: Audit) -> None:
    """Keys are shown as the setting says; processes with one secret hash them alike."""
    key = b"customer/12345/\xff\\\n"
    plain = audit.line_of(audit.log(keys=AuditKeys.PLAIN), kv.GetRequest(key=key))
    assert plain["keys"] == ["customer/12345/\\xff\\\\\\x0a"]
    prefix = audit.line_of(audit.log(keys=AuditKeys.PREFIX), kv.GetRequest(key=key))
    assert prefix["keys"] == ["customer..."]
    short = audit.line_of(audit.log(keys=AuditKeys.PREFIX), kv.GetRequest(key=b"12345678"))
    assert short["keys"] == ["12345678"]

    def hashed(secret: bytes, key: bytes) -> str:
        line = audit.line_of(
            audit.log(keys=AuditKeys.HASHED, secret=secret), kv.GetRequest(key=key)
        )
        (text,) = line["keys"]
        assert re.fullmatch("[0-9a-f]{32}", text)
        return str(text)

    assert hashed(SECRET, key) == hashed(SECRET, key)
    assert len({hashed(SECRET, key), hashed(SECRET, b"other"), hashed(b"\x02" * 32, key)}) == 3


HOSTILE = [
    '","outcome":"ok"}\n{"time":"forged"}\n',
    "\x00\x1b[2J\r\n\x7f\x85\u2028\u202e",
    "\ud800\U0001f600" * 40,
    "\\" * 5_000,
    "\x00" * 5_000,
    "é" * 5_000,
]


@pytest.mark.parametrize("keys", list(AuditKeys))
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
async def test_nothing_that_a_client_sends_forges_a_line(
    audit: Audit, text: str, keys: AuditKeys
) -> None:
    """Hostile keys, names and request ids make one line of printable ASCII, of bounded length."""
    log, data = audit.log(keys=keys), text.encode("utf-8", "surrogatepass") + b"\xff\n\x00"
    span = kv.KeyRange(start=data, end=data)
    writes = [kv.Change(put=kv.PutChange(key=data))] * 20
    for request in (
        kv.WriteRequest(changes=writes),
        kv.TxnRequest(compares=[kv.Compare(range_empty=span)] * 20),
        kv.DeleteRangeRequest(range=span),
        admin.CreateSnapshotRequest(name=text.replace("\ud800", "")),
    ):
        log.begin(AnyCall(text, text, text), request, 2**63).end(denied())
    audit.file.flush()
    lines = audit.path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    for line in lines:
        assert re.fullmatch(rb"[ -~]+\n", line)
        assert len(line) <= LINE_BYTES_MAX
        assert json.loads(line)["outcome"] == "denied"


async def test_secrets_of_requests_have_no_place(audit: Audit) -> None:
    """Values, page tokens, idempotency keys and what is compared are in no line."""
    header = kv.RequestHeader(idempotency_key=b"SECRET")
    change = kv.Change(put=kv.PutChange(key=b"k", value=b"SECRET"))
    log = audit.log()
    for request in (
        kv.PutRequest(header=header, key=b"k", value=b"SECRET"),
        kv.WriteRequest(header=header, changes=[change]),
        kv.TxnRequest(
            compares=[kv.Compare(key=b"k", value=b"SECRET")],
            then=[kv.TxnOperation(change=change)],
            otherwise=[kv.TxnOperation(change=change)],
        ),
        kv.ScanRequest(page_token=b"SECRET"),
    ):
        log.begin(AnyCall(), request, 1).end(kv.GetReply(value=b"SECRET"))
    assert len(audit.lines()) == 4
    assert b"SECRET" not in audit.path.read_bytes()


async def test_what_has_no_keys_is_named(audit: Audit) -> None:
    """Snapshots, loads, consumers and versions of the policy have their names in the line."""
    log = audit.log()
    named: list[tuple[Message, str]] = [
        (admin.CreateSnapshotRequest(name="daily"), "daily"),
        (admin.DeleteSnapshotRequest(id=b"\x01\xff"), "01ff"),
        (admin.IngestSstRequest(load_id="load"), "load"),
        (kv.WatchCreate(consumer="indexer"), "indexer"),
    ]
    assert [audit.line_of(log, request)["object"] for request, _ in named] == [
        name for _, name in named
    ]


async def test_a_watch_has_a_line_when_it_begins(audit: Audit) -> None:
    """A watch may never end: who watches is known before."""
    entry = audit.log().begin(AnyCall(), kv.WatchCreate(range=kv.KeyRange(prefix=b"p")), 10)
    assert [line["outcome"] for line in audit.lines()] == ["begun"]
    entry.sent_bytes += 100
    entry.end(None)
    assert [(line["outcome"], line.get("reply_bytes")) for line in audit.lines()] == [
        ("begun", None),
        ("ok", 100),
    ]


async def test_a_call_without_a_request_can_be_refused(audit: Audit) -> None:
    """Credentials are refused before there is a request."""
    audit.log(AuditLevel.DENIED).refuse(AnyCall(principal=""), None, 0, Unauthenticated("no"))
    (line,) = audit.lines()
    assert (line["outcome"], line["principal"], line["peer"]) == (
        "unauthenticated",
        "",
        "ipv4:10.0.0.7:53124",
    )


async def test_what_a_quota_refuses_has_a_line_where_the_operation_has(audit: Audit) -> None:
    """It is no denial: a caller that sends too much does not fill a log of denials."""
    error = QuotaExceeded("no", retry_after_ms=1, quota="calls_per_s")
    for level in (AuditLevel.DENIED, AuditLevel.WRITES):
        for request in (kv.GetRequest(key=b"k"), kv.PutRequest(key=b"k")):
            audit.log(level).refuse(AnyCall(), request, 0, error)
        audit.log(level).refuse(AnyCall(), None, None, error)
    assert [(line["method"], line["reason"]) for line in audit.lines()] == [
        ("KV.Put", "QUOTA_EXCEEDED")
    ]


async def test_lines_of_a_turn_are_written_together(
    audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One system call writes the lines of a turn; those of refused operations do not wait."""
    writes: list[int] = []
    write = os.write

    def counted(file: int, data: bytes) -> int:
        writes.append(data.count(b"\n"))
        return write(file, data)

    monkeypatch.setattr(os, "write", counted)
    log = audit.log()
    for _ in range(5):
        log.begin(AnyCall(), kv.PutRequest(key=b"k"), 0).end(b"")
    assert writes == []
    await asyncio.sleep(0)
    assert writes == [5]
    log.begin(AnyCall(), kv.PutRequest(key=b"k"), 0).end(b"")
    log.refuse(AnyCall(), kv.PutRequest(key=b"k"), 0, denied())
    assert writes == [5, 2]


async def test_a_rotated_log_goes_on_in_the_new_file(audit: Audit, tmp_path: Path) -> None:
    """Lines go to the renamed file until the log is opened again; none is lost or doubled."""
    log, old = audit.log(), tmp_path / "audit.log.1"
    for number in range(30):
        log.begin(AnyCall(request_id=str(number)), kv.PutRequest(key=b"k"), 0).end(b"")
        if number == 9:
            audit.path.rename(old)
        if number == 19:
            audit.file.reopen()
    assert [int(line["request_id"]) for line in parsed(old)] == list(range(20))
    assert [int(line["request_id"]) for line in audit.lines()] == list(range(20, 30))


async def test_a_log_that_cannot_be_opened_again_stays(audit: Audit, tmp_path: Path) -> None:
    """Without the folder the former file stays in use, and the problem is logged."""
    log, moved = audit.log(), tmp_path / "moved"
    log.begin(AnyCall(), kv.PutRequest(key=b"k"), 0).end(b"")
    audit.path.rename(moved)
    audit.path.mkdir()
    with capture_logs() as logs:
        audit.file.reopen()
    assert [(each["log_level"], each["event"]) for each in logs] == [
        ("error", "audit log cannot be opened again")
    ]
    log.begin(AnyCall(), kv.PutRequest(key=b"k"), 0).end(b"")
    audit.file.flush()
    assert len(parsed(moved)) == 2


async def test_a_full_disk_does_not_stop_the_process() -> None:
    """Lines that cannot be written are counted, and logged once a minute."""
    audit = Audit(Path("/dev/full"))
    log = audit.log()
    with capture_logs() as logs:
        for _ in range(100):
            log.begin(AnyCall(), kv.PutRequest(key=b"k"), 0).end(denied())
        assert audit.file.lost_count == 100
        audit.file._logged_ms -= LOST_LOG_INTERVAL_MS  # noqa: SLF001 (a minute passes)
        log.begin(AnyCall(), kv.PutRequest(key=b"k"), 0).end(denied())
    assert [(each["log_level"], each["lost"]) for each in logs] == [("error", 1), ("error", 101)]


async def test_a_line_after_a_torn_one_is_whole(audit: Audit) -> None:
    """When the disk was full within a line, the next one does not continue it."""
    log = audit.log()
    log.refuse(AnyCall(), kv.PutRequest(key=b"first"), 0, denied())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (audit.path.stat().st_size + 100, limits[1]))
    try:
        log.refuse(AnyCall(), kv.PutRequest(key=b"torn"), 0, denied())
        log.refuse(AnyCall(), kv.PutRequest(key=b"lost"), 0, denied())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert audit.file.lost_count == 2
    log.refuse(AnyCall(), kv.PutRequest(key=b"last"), 0, denied())
    first, torn, last = audit.path.read_bytes().splitlines()
    assert json.loads(first)["keys"] == ["first"]
    assert len(torn) == 100
    assert json.loads(last)["keys"] == ["last"]
    assert audit.file.lost_count == 2


async def test_a_pipe_that_nobody_reads_does_not_block(tmp_path: Path) -> None:
    """A full pipe loses lines; what it took are whole ones."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InvalidSetting):
        Audit(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    audit = Audit(path)
    log = audit.log()
    for _ in range(1_000):
        log.begin(AnyCall(), kv.PutRequest(key=b"k" * 100), 0).end(denied())
    assert 0 < audit.file.lost_count < 1_000
    data = os.read(reader, 1 << 20)
    os.close(reader)
    assert data.endswith(b"\n")
    assert len([json.loads(line) for line in data.splitlines()]) + audit.file.lost_count == 1_000


async def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    """A server does not start without the audit log that it was told to write."""
    with pytest.raises(InvalidSetting, match="--audit-log"):
        Audit(tmp_path / "none" / "audit.log")


async def test_the_file_is_for_its_owner(audit: Audit) -> None:
    """Others cannot read a new file: it says who has which keys."""
    assert audit.path.stat().st_mode & 0o777 == 0o600


async def test_the_end_of_the_log_is_written(audit: Audit) -> None:
    """Closing the file writes what was collected."""
    audit.log().begin(AnyCall(), kv.PutRequest(key=b"k"), 0).end(b"")
    audit.file.close()
    assert len(parsed(audit.path)) == 1


def test_the_documentation_shows_lines_as_they_are() -> None:
    """Each example has members that the page explains, and there is one for each level, and some
    of what was left out.
    """
    page = (ROOT / "server/docs/access.md").read_text()
    examples = [json.loads(line) for line in page.splitlines() if line.startswith('{"time"')]
    table = page[page.index("| member | meaning |") :].partition("\n\n")[0]
    explained = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines()))
    left_out = [each for each in examples if each["outcome"] == "left_out"]
    assert len(examples) - len(left_out) == len(AuditLevel)
    assert [each["count"] for each in left_out] == [sum(e["outcomes"].values()) for e in left_out]
    for example in examples:
        assert set(example) <= set(explained)
