"""The command line as a user meets it, as far as no server is started."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner, Result

from shalekv.cli.catalog import settings_of
from shalekv.cli.exit_codes import MEANING, ExitCode
from shalekv.cli.main import COMMANDS, shalekv
from shalekv.settings import ServeSettings

ONLY_FOR_SERVERS = {"pydantic", "pydantic_settings", "structlog", "uvloop"}


def _run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(shalekv, list(arguments), env=dict(environment))


def test_help_of_serve_lists_every_exit_code() -> None:
    """With what it means; other commands have a table of their own."""
    output = _run("serve", "--help").output
    for code, meaning in MEANING.items():
        assert f"{code.value:>3}  {meaning}" in output


def test_every_command_exists() -> None:
    """Each row of the table leads to a command that explains itself."""
    for name in COMMANDS:
        result = _run(name, "--help")
        assert result.exit_code == 0, (name, result.output)
        assert "Usage:" in result.output


def test_garbage_is_collected_once_the_command_is_imported() -> None:
    """And what was imported is left alone: a process that begins without does not go on so."""
    gc.disable()
    try:
        kept_count = gc.get_freeze_count()
        shalekv.get_command(click.Context(shalekv), "get")
        assert gc.isenabled()
        assert gc.get_freeze_count() > kept_count
    finally:
        gc.unfreeze()
        gc.enable()


def test_help_of_serve_names_every_setting() -> None:
    """Each with flag, variable, default and limits, under its component."""
    output = " ".join(_run("serve", "--help").output.split())
    for setting in settings_of(ServeSettings):
        assert setting.flag in output
        assert setting.variable in output
        if not setting.field.is_required():
            assert f"[default: {setting.default};" in output
        if not setting.choices:
            assert setting.limits in output
    for group in ServeSettings.model_fields:
        assert f"[{group}]" in output


def _loaded_by(module: str) -> set[str]:
    script = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, timeout=60
    )
    return set(json.loads(loaded.stdout))


def test_commands_are_imported_when_they_are_called() -> None:
    """The table of commands loads nothing but click, so that every command starts fast."""
    modules = _loaded_by("shalekv.cli.main")
    assert "click" in modules
    assert not modules & {*ONLY_FOR_SERVERS, "grpc", "asyncio"}


@pytest.mark.parametrize(
    "name", "get put delete add txn scan load dump bench status completion".split()
)
def test_client_commands_need_nothing_of_the_server(name: str) -> None:
    """They run with what the light client needs, and click."""
    modules = _loaded_by(f"shalekv.cli.{name}")
    assert ("shalekv_client" in modules) == (name != "completion")
    assert not modules & {*ONLY_FOR_SERVERS, "shalekv.roles", "shalekv.engine", "shalekv.rpc"}


@pytest.mark.parametrize("listen", ["0.0.0.0:7654", "[::]:7654", "192.0.2.1:0", "example.org:7654"])
def test_an_open_address_needs_insecure(listen: str) -> None:
    """Without --insecure only loopback is served, and the message says why and what to do."""
    result = _run("serve", "--url", "memory://x", "--listen", listen)
    assert result.exit_code == ExitCode.USAGE
    for part in (f"--listen {listen}", "encrypted", "127.0.0.1", "--insecure"):
        assert part in " ".join(result.output.split())


def test_a_variable_can_be_wrong_too() -> None:
    """It is told by its own name."""
    result = _run("serve", "--url", "memory://x", SHALEKV_WRITER__FLUSH_BYTES="none")
    assert result.exit_code == ExitCode.USAGE
    assert "SHALEKV_WRITER__FLUSH_BYTES: " in result.output


def test_the_file_can_be_named_by_a_variable() -> None:
    """SHALEKV_CONFIG stands for --config."""
    result = _run("serve", "--url", "memory://x", SHALEKV_CONFIG="/nowhere.toml")
    assert result.exit_code == ExitCode.USAGE
    assert "/nowhere.toml" in result.output
