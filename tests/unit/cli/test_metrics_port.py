"""The port of metrics: who may reach it, and what a process answers there that has no other."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from aiohttp import ClientSession
from click.testing import CliRunner
from structlog.testing import capture_logs

from shalekv.cli.commands.serve import serve
from shalekv.cli.console.exit_codes import ExitCode
from shalekv.cli.main import shalekv
from shalekv.cli.process.endpoint import serving_alone, sources_of
from shalekv.settings import CollectorConfig

ROLES = ("serve", "reader", "safekeeper", "compactor", "collector")


@pytest.mark.parametrize("role", ROLES)
def test_no_role_tells_strangers_by_accident(role: str) -> None:
    """Metrics that the network could read need TLS, or a word of the operator, for every role."""
    flags = ["--url", "file:///nowhere", "--metrics", "0.0.0.0:0"]
    result = CliRunner().invoke(shalekv, [role, *flags])
    assert result.exit_code == ExitCode.USAGE
    text = " ".join(result.stderr.split())
    assert "--metrics 0.0.0.0:0 is open to the network" in text
    assert "accept this with --insecure" in text


@pytest.mark.parametrize("role", ROLES[:3])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::]"])
def test_the_port_of_metrics_is_not_that_of_calls(role: str, host: str, tmp_path: Path) -> None:
    """The message names both settings, before anything is started or created."""
    flags = ["--url", f"file://{tmp_path}/db", "--listen", f"{host}:7655", "--insecure"]
    flags += ["--data", f"{tmp_path}/data"] if role == "safekeeper" else []
    result = CliRunner().invoke(shalekv, [role, *flags, "--metrics", "127.0.0.1:7655"])
    assert result.exit_code == ExitCode.USAGE
    text = " ".join(result.stderr.split())
    assert f"--metrics 127.0.0.1:7655 and --listen {host}:7655 are one port" in text
    assert not [*tmp_path.iterdir()]


def test_taken_port_is_told_before_the_database_is_opened(tmp_path: Path) -> None:
    """The message names flag and address, and no database is created."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--create", "--url", f"file://{tmp_path}/db", "--listen", "127.0.0.1:0"]
        result = CliRunner().invoke(serve, [*flags, "--metrics", address])
    assert result.exit_code == ExitCode.ADDRESS_IN_USE
    assert f"--metrics {address}: Address already in use: stop what listens there" in result.stderr
    assert not (tmp_path / "db").exists()


async def test_a_process_without_calls_is_ready_for_its_own_work_alone() -> None:
    """A balancer that asks a collector for a writer, or a reader, is told that it is none."""
    config = {"telemetry": {"metrics": "127.0.0.1:0"}, "server": {"log_format": "json"}}
    settings = CollectorConfig.model_validate(config)
    with capture_logs() as logs:
        async with serving_alone(settings, sources_of("collector")), ClientSession() as session:
            url = logs[0]["url"].replace("metrics", "readyz")
            answers = [
                await session.get(url + role) for role in ("", "?role=writer", "?role=reader")
            ]
            assert [answer.status for answer in answers] == [200, 503, 503]
            assert await answers[1].text() == "this process answers no such calls\n"
