"""A collector that spares nothing by its age, beside a server and clients of the manifest."""

from __future__ import annotations

from pathlib import Path

from shalekv.cli.exit_codes import ExitCode
from tests.e2e.cli import output
from tests.kit.processes.processes import Processes

RESTLESS = (
    *("--collect-interval-ms", "10", "--collect-age-s", "0", "--wal-retention-s", "0"),
    *("--log-format", "json"),
)


async def test_writers_come_and_go_while_everything_inactive_is_deleted(
    processes: Processes, tmp_path: Path
) -> None:
    """What was acknowledged is read after every take-over; old manifests are gone."""
    url = f"file://{tmp_path}/db"
    flags = ("--no-with-collector", "--no-with-compactor")
    collector = None
    for number in range(3):
        server = await processes.serve(url, *flags)
        if collector is None:
            collector = processes.start("collector", "--url", url, *RESTLESS)
        for written in range(2):
            await output(processes, server, "put", f"k{number}{written}", "v")
        found = await output(processes, server, "scan")
        assert len(found.splitlines()) == 2 * (number + 1)
        await (server.kill() if number % 2 else server.stop())
    assert collector is not None
    await collector.line(lambda line: line.get("event") == "collected" and line["manifest_id"] >= 6)
    assert await collector.stop() == ExitCode.OK
    assert not [line for line in collector.lines() if line["event"] == "collection failed"]
    assert not (tmp_path / "db" / "manifest" / f"{0:020d}.manifest").exists()


async def test_snapshot_that_was_dropped_cannot_be_renewed(
    processes: Processes, tmp_path: Path
) -> None:
    """Whoever renews a snapshot after its expiry is told, by the exit code as well (F3)."""
    url = f"file://{tmp_path}/db"
    server = await processes.serve(url, "--no-with-collector", "--no-with-compactor")
    assert await server.stop() == ExitCode.OK
    created = await processes.run(
        "snapshot", "create", "--url", url, "--name", "short", "--ttl", "1s"
    )
    assert await created.exited() == ExitCode.OK
    collector = processes.start("collector", "--url", url, *RESTLESS)
    await collector.line(lambda line: line.get("dropped_snapshots", 0) > 0)
    renewed = await processes.run("snapshot", "renew", "short", "--url", url, "--ttl", "1h")
    assert await renewed.exited() == ExitCode.USAGE
    assert "there is no snapshot called 'short'" in renewed.stderr()
    assert await collector.stop() == ExitCode.OK
