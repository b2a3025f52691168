"""The command line as a user meets it, as far as no server is started."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import click
from click.testing import CliRunner, Result

from shalekv.cli.catalog import settings_of
from shalekv.cli.main import shalekv
from shalekv.settings import ServeSettings

ONLY_FOR_SERVERS = {"pydantic", "pydantic_settings", "structlog", "uvloop"}


def _run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(shalekv, list(arguments), env=dict(environment))


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
