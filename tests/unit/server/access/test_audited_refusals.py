"""Lines of refusals: a bounded number for each origin, and a count of what was left out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from shalekv.errors import PermissionDenied, QuotaExceeded, ShaleError, Unauthenticated
from shalekv.protocol.access import Verb
from shalekv.server.access.audit import (
    ADDRESSES_MAX,
    OTHERS,
    PRINCIPALS_MAX,
    REFUSALS_SHOWN,
    REFUSALS_TIME_MS,
    AuditLog,
)
from shalekv.server.access.audit_file import AuditFile
from shalekv.server.access.guard import Guard
from shalekv.server.service import Call
from shalekv.settings import AccessSettings, AuditLevel
from shalekv.v1 import admin_pb2 as admin
from shalekv.v1 import kv_pb2 as kv
from tests.kit.constants import constants
from tests.kit.engine.hand_clock import HandClock
from tests.kit.serving.guarded import HeldPolicy, KnownTokens, policy_of, prefix
from tests.kit.timeouts import until
from tests.unit.server.access.test_audit import AnyCall, parsed

GET, PUT = kv.GetRequest(key=b"k"), kv.PutRequest(key=b"k")
MANY = 1_000


class Refusals:
    """An audit log whose clock the test moves."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.clock = HandClock()
        self.file = AuditFile(str(path), self.clock)
        settings = AccessSettings(audit_log=str(path), audit_level=AuditLevel.WRITES)
        self.log = AuditLog(settings, self.file, self.clock, "writer")

    def refuse(
        self,
        count: int,
        principal: str = "",
        peer: str = "ipv4:10.0.0.7:53124",
        request: Message | None = GET,
        error: ShaleError | None = None,
    ) -> None:
        call = AnyCall(peer, principal)
        denied = PermissionDenied("no", verb="read") if principal else Unauthenticated("no")
        for _ in range(count):
            self.log.refuse(call, request, None, error or denied)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines since the last look."""
        self.file.flush()
        found = parsed(self._path)
        self._path.write_bytes(b"")
        return found

    def left_out(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["outcome"] == "left_out"]


@pytest.fixture
async def it(tmp_path: Path) -> Refusals:
    return Refusals(tmp_path / "audit.log")


def counts_of(lines: list[dict[str, Any]]) -> int:
    """Return how many refusals the lines stand for."""
    return sum(line.get("count", 1) for line in lines)


async def test_the_first_have_lines_and_the_others_one(it: Refusals) -> None:
    """Refusals that were left out have one line at the end: count, times, outcomes, verbs."""
    it.refuse(REFUSALS_SHOWN, "token:bob")
    assert [line["outcome"] for line in it.lines()] == ["denied"] * REFUSALS_SHOWN
    it.refuse(3, "token:bob")
    it.clock.advance(REFUSALS_TIME_MS - 1)
    it.refuse(2, "token:bob", request=admin.SetAccessPolicyRequest())
    it.refuse(1, "token:bob", request=None, error=Unauthenticated("expired"))
    it.log.sum_up()
    assert it.lines() == []
    it.clock.advance(1)
    it.log.sum_up()
    (line,) = it.lines()
    assert line["first"] <= line["last"] <= line["time"]
    assert {name: line[name] for name in line if name not in ("time", "first", "last")} == {
        "role": "writer",
        "epoch": 0,
        "principal": "token:bob",
        "outcome": "left_out",
        "count": 6,
        "outcomes": {"denied": 5, "unauthenticated": 1},
        "verbs": {"read": 3, "admin": 2},
    }
    it.log.sum_up()
    it.refuse(1, "token:bob")
    assert [line["outcome"] for line in it.lines()] == ["denied"]  # a new time has begun


async def test_an_origin_that_leaves_nothing_out_has_no_line_more(it: Refusals) -> None:
    """Few refusals are written as before."""
    it.refuse(REFUSALS_SHOWN)
    it.log.close()
    assert [line["outcome"] for line in it.lines()] == ["unauthenticated"] * REFUSALS_SHOWN


async def test_a_stranger_takes_no_lines_of_others(it: Refusals) -> None:
    """Principals are apart from addresses and from each other, and what is allowed is complete."""
    it.refuse(MANY, peer="ipv4:10.0.0.8:1")
    it.refuse(REFUSALS_SHOWN)
    it.refuse(REFUSALS_SHOWN, "token:bob", "ipv4:10.0.0.8:1")
    it.refuse(REFUSALS_SHOWN, "token:carol", "ipv4:10.0.0.8:2")
    for _ in range(MANY):
        it.log.begin(AnyCall(), admin.SetAccessPolicyRequest(), 0).end(b"")
    lines = it.lines()
    shown = [line["principal"] for line in lines if line["outcome"] != "ok"]
    assert shown.count("") == 2 * REFUSALS_SHOWN
    assert shown.count("token:bob") == shown.count("token:carol") == REFUSALS_SHOWN
    assert len(lines) - len(shown) == MANY
    it.log.close()
    (line,) = it.lines()
    assert (line["principal"], line["peer"]) == ("", "10.0.0.8")
    assert line["count"] == MANY - REFUSALS_SHOWN


async def test_ports_and_addresses_of_a_network_are_one_origin(it: Refusals) -> None:
    """Another connection brings no further lines, nor does another address of an IPv6 network."""
    for number in range(MANY):
        it.refuse(1, peer=f"ipv4:10.0.0.7:{number}")
        it.refuse(1, peer=f"ipv6:[2001:db8::{number:x}]:1")
    it.log.close()
    lines = it.lines()
    assert len(lines) == 2 * (REFUSALS_SHOWN + 1)
    assert counts_of(lines) == 2 * MANY
    assert [line["peer"] for line in lines[-2:]] == ["10.0.0.7", "2001:db8::/64"]


@pytest.mark.parametrize("are_known", [False, True], ids=["addresses", "principals"])
async def test_origins_are_bounded(it: Refusals, *, are_known: bool) -> None:
    """Beyond their number all share the lines of one, and each refusal is still counted."""
    shown, places = REFUSALS_SHOWN + 1, PRINCIPALS_MAX if are_known else ADDRESSES_MAX
    for number in range(places + 100):
        principal = f"token:{number}" if are_known else ""
        it.refuse(shown, principal, f"ipv4:10.0.{number >> 8}.{number & 255}:1")
    it.log.close()
    lines = it.lines()
    assert len(lines) == (places + 1) * shown
    assert counts_of(lines) == (places + 100) * shown
    last = lines[-1]
    assert (last["principal"], last.get("peer")) == ((OTHERS, None) if are_known else ("", OTHERS))
    assert last["count"] == 100 * shown - REFUSALS_SHOWN


async def test_what_a_quota_refuses_is_bounded_as_well(it: Refusals) -> None:
    """A caller may send requests beyond its quota as often as it likes."""
    error = QuotaExceeded("no", retry_after_ms=1, quota="calls_per_s")
    it.refuse(MANY, "token:bob", request=PUT, error=error)
    it.refuse(MANY, "token:bob", request=GET, error=error)  # no lines at this level
    it.log.close()
    lines = it.lines()
    assert len(lines) == REFUSALS_SHOWN + 1
    assert lines[-1]["outcomes"] == {"error": MANY - REFUSALS_SHOWN}


@pytest.fixture
def short_time() -> Iterator[None]:
    """Origins whose time is over at once."""
    with constants({"shalekv.server.access.audit:REFUSALS_TIME_MS": 0.0}):
        yield


@pytest.mark.usefixtures("short_time")
async def test_a_running_guard_sums_up(it: Refusals) -> None:
    """The line comes without another refusal."""
    policy = HeldPolicy(policy_of(alice=prefix(b"a/", Verb.READ)))
    guard = Guard(KnownTokens("alice"), policy, audit=it.log)
    for _ in range(MANY):
        with pytest.raises(Unauthenticated):
            guard.begin(Call(peer="ipv4:10.0.0.7:1"), GET, 1)
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found.extend(it.left_out())
        return bool(found)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(guard.run())
        await until(is_there, "the line of what was left out")
        running.cancel()
    assert [line["count"] for line in found] == [MANY - REFUSALS_SHOWN]
    assert guard.status().unauthenticated == MANY


async def test_nothing_is_lost_at_the_end(tmp_path: Path) -> None:
    """A log that is closed within the time has all counts in its file."""
    it = Refusals(tmp_path / "audit.log")
    with closing(it.file), closing(it.log):
        it.refuse(MANY)
        it.refuse(MANY, "token:bob")
    assert counts_of(parsed(tmp_path / "audit.log")) == 2 * MANY
