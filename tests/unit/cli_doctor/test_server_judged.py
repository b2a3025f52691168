"""A server: its certificate, access, version, clock, readiness, lag and database."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from shalekv.cli.doctor.diagnosis import Diagnosis
from shalekv.cli.doctor.server import (
    Certificate,
    TimedStatus,
    area_of,
    judge_certificate,
    judge_database,
    judge_exposure,
    judge_lag,
    judge_server_clock,
    judge_state,
    judge_version,
)
from shalekv.v1 import admin_pb2, kv_pb2
from shalekv_client import AccessQuota, CallerAccess, Status
from shalekv_client.status import MemtableStatus, WatchStatus, status_of

AREA = area_of("10.0.0.5:7654")
DAY_MS = 86_400_000
NOW_MS = 1_700_000_000_000


def severities(found: Iterable[Diagnosis]) -> dict[str, str]:
    return {each.check: each.severity.value for each in found}


def status(**fields: object) -> Status:
    header = kv_pb2.ReplyHeader(
        database_id=b"d" * 16,
        role=fields.pop("role", kv_pb2.ROLE_WRITER),  # type: ignore[arg-type] # a number
        staleness_ms=fields.pop("staleness_ms", 0),  # type: ignore[arg-type] # as above
    )
    reply = admin_pb2.StatusReply(header=header, version="1.2.3", url="file:///db")
    for name, value in fields.items():
        setattr(reply, name, value)
    return status_of(reply)


@pytest.mark.parametrize(
    ("begins_days", "ends_days", "expected"),
    [(-9, 90, "ok"), (-9, 3, "warning"), (-9, -1, "problem"), (1, 90, "problem")],
)
def test_a_certificate_is_judged_by_its_time(
    begins_days: int, ends_days: int, expected: str
) -> None:
    """A certificate that ends within two weeks is warned of; outside of its time it is useless."""
    times = (NOW_MS + begins_days * DAY_MS, NOW_MS + ends_days * DAY_MS)
    certificate = Certificate("client", *times, [])
    found = judge_certificate(AREA, certificate, now_ms=NOW_MS, host="db.example.com")
    assert severities(found) == {"client certificate": expected}


@pytest.mark.parametrize(
    ("names", "host", "fits"),
    [
        (["db.example.com"], "DB.example.com", True),
        (["*.example.com"], "db.example.com", True),
        (["*.example.com"], "a.db.example.com", False),
        (["10.0.0.5"], "10.0.0.5", True),
        (["localhost"], "10.0.0.5", False),
        ([], "10.0.0.5", False),
    ],
)
def test_a_certificate_must_have_the_name_of_the_server(
    names: list[str], host: str, *, fits: bool
) -> None:
    """A name that is missing is a problem, and the fix names one that is there."""
    certificate = Certificate("server", NOW_MS - 1, NOW_MS + 90 * DAY_MS, names)
    found = [*judge_certificate(AREA, certificate, now_ms=NOW_MS, host=host)]
    assert ("server name" not in severities(found)) == fits
    if names and not fits:
        assert found[-1].fix == f"--tls-server-name {names[0]}"


@pytest.mark.parametrize(
    ("host", "is_enforced", "has_tls", "access", "tls"),
    [
        ("127.0.0.1", False, False, "ok", None),
        ("unix", False, False, "ok", None),
        ("::1", False, False, "ok", None),
        ("10.0.0.5", False, True, "warning", None),
        ("db.example.com", True, False, "ok", "warning"),
        ("db.example.com", True, True, "ok", None),
    ],
)
def test_what_is_open_to_the_network_is_warned_of(
    host: str, *, is_enforced: bool, has_tls: bool, access: str, tls: str | None
) -> None:
    """Open access and missing TLS matter where others reach the server, and only there."""
    caller = CallerAccess("", (), (), AccessQuota(), is_enforced, 0)
    found = severities(judge_exposure(AREA, host, caller, has_tls=has_tls))
    assert (found["access"], found.get("tls")) == (access, tls)


def test_versions_of_one_release_go_together() -> None:
    """A patch makes no difference; another release is warned of."""
    assert judge_version(AREA, status(), "1.2.9").severity.value == "ok"
    assert judge_version(AREA, status(), "1.3.0").severity.value == "warning"


@pytest.mark.parametrize(
    ("ahead_ms", "expected"), [(0, "ok"), (-9_000, "ok"), (20_000, "warning"), (400_000, "problem")]
)
def test_the_clock_of_a_server_is_compared(ahead_ms: int, expected: str) -> None:
    """The offset is measured from the middle of the call; an older server tells no time."""
    timed = TimedStatus(status(wall_ms=NOW_MS + ahead_ms), NOW_MS - 50, NOW_MS + 50)
    assert judge_server_clock(AREA, timed).severity.value == expected
    assert judge_server_clock(AREA, TimedStatus(status(), 0, 1)).severity.value == "not checked"


def test_url_and_address_must_be_of_one_database() -> None:
    """Another database than that at the URL is a problem."""
    url = "file:///db"
    assert judge_database(AREA, status(), b"d" * 16, url).severity.value == "ok"
    assert judge_database(AREA, status(), b"e" * 16, url).severity.value == "problem"


def test_the_lag_of_a_reader() -> None:
    """A reader that is seconds behind is well, one that is minutes behind is not."""
    reader = kv_pb2.ROLE_READER
    assert severities(judge_lag(AREA, status(staleness_ms=60_000))) == {}
    assert severities(judge_lag(AREA, status(role=reader, staleness_ms=900))) == {"lag": "ok"}
    late = judge_lag(AREA, status(role=reader, staleness_ms=60_000))
    assert severities(late) == {"lag": "warning"}


def test_problems_of_a_status_are_problems_and_remarks_are_warnings() -> None:
    """What `shalekv status` calls a problem is one; what it remarks on is a warning."""
    assert severities(judge_state(AREA, status())) == {"state": "ok"}
    full = replace(status(), memtable=MemtableStatus(1, 90, 100, 1))
    (problem,) = judge_state(AREA, full)
    assert (problem.severity.value, problem.fix.partition("    #")[0]) == (
        "problem",
        "shalekv status -v --addr 10.0.0.5:7654",
    )
    cut = replace(status(), watches=WatchStatus(1, 1, 0, 1, 0, 0, cut=3))
    assert [each.severity.value for each in judge_state(AREA, cut)] == ["warning", "ok"]
