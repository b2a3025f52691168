"""`shalekv admin repair-time` and `leases` after a wrong clock, and the clock of processes."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shalekv.cli.console.exit_codes import ExitCode, exit_code_of
from shalekv.cli.main import shalekv
from shalekv.cli.process.lifecycle import open_runtime
from shalekv.clock import LAPSED_CLOCK
from shalekv.protocol.lease import new_lease_id
from shalekv.protocol.manifest import Lease
from shalekv.settings import ReaderConfig
from tests.kit.engine.collection import CollectedDatabase, save

DAY_S = 86_400


def lease(number: int, made_s: int, lives_s: int = DAY_S) -> Lease:
    return Lease(new_lease_id(1_000 * made_s, bytes([number] * 10)), made_s + lives_s, "a job")


async def _damaged(now_s: int) -> CollectedDatabase:
    """A manifest written ten days ahead: logical time, a lease, and the renewal of another."""
    database = await CollectedDatabase.created()
    found = (lease(1, now_s + 10 * DAY_S), lease(2, now_s, 11 * DAY_S), lease(3, now_s - 2 * DAY_S))
    await database.consumers(ttl_s=1).hold("mirror", 0)
    await database.edit(
        lambda m: replace(
            m, logical_time_ms=1_000 * (now_s + 10 * DAY_S), leases=(*found, *m.leases)
        )
    )
    return database


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The database as files."""
    save(asyncio.run(_damaged(int(time.time()))), tmp_path / "db")
    return f"file://{tmp_path}/db"


def run(*args: str) -> Result:
    return CliRunner().invoke(shalekv, ["admin", *args])


def reported(url: str, *args: str) -> str:
    result = run(*args, "--url", url, "--format", "json")
    assert result.exit_code == 0, result.output
    return result.stdout


def listed(url: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in reported(url, "leases", "list").splitlines()]


def test_time_is_inspected_and_set_back(url: str) -> None:
    """Logical time is changed only with the flag, and needs no second repair."""
    for args, is_set_back in (((), False), (("--set-back",), True)):
        found = json.loads(reported(url, "repair-time", *args))
        assert (found["ahead_s"] // 3_600, found["is_set_back"]) == (239, is_set_back)
    assert json.loads(reported(url, "repair-time"))["ahead_s"] == 0
    again = run("repair-time", "--set-back", "--url", url)
    assert (again.exit_code, "nothing was done" in again.stderr) == (ExitCode.USAGE, True)


def test_leases_of_a_wrong_clock_are_removed(url: str) -> None:
    """A lease of a possibly running job needs --force, and one of a consumer stays."""
    found = listed(url)
    states = [(each["state"], each["made_at_ms"] is None) for each in found]
    assert states == [
        ("from the future", False),
        ("current", False),
        ("expired", False),
        ("expired", True),
    ]
    future, current, expired, consumers = (each["id"] for each in found)
    reasons = {current: "use --force", consumers: "consumers delete", "f" * 32: "there is no"}
    for refused, why in reasons.items():
        error = run("leases", "delete", future, refused, "--url", url).exception
        assert isinstance(error, Exception)
        assert (exit_code_of(error), why in str(error)) == (ExitCode.USAGE, True)
    assert run("leases", "delete", "short", "--url", url).exit_code == ExitCode.USAGE
    assert listed(url) == found
    assert run("leases", "delete", future, expired, "--url", url).stdout.split() == [
        future,
        expired,
    ]
    assert run("leases", "delete", current, "--force", "--url", url).exit_code == 0
    assert [each["id"] for each in listed(url)] == [consumers]


async def test_time_lapses_while_a_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock includes suspension, and so do staleness, expiry of snapshots, logical time."""
    real, hour_ms = time.clock_gettime_ns, 3_600_000
    async with open_runtime(ReaderConfig.model_validate({"database": {"url": "file:///db"}})) as on:
        before_ms = on.clock.monotonic_ms()
        suspended_ns = {LAPSED_CLOCK: hour_ms * 1_000_000}
        monkeypatch.setattr(
            time, "clock_gettime_ns", lambda clock: real(clock) + suspended_ns.get(clock, 0)
        )
        assert on.clock.monotonic_ms() - before_ms >= hour_ms
