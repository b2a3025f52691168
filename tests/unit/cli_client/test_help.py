"""The help of the client commands: it teaches, and it costs no server."""

from __future__ import annotations

import importlib
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

OF_CLIENTS = (
    "get put delete add txn scan load dump watch bench status top health completion".split()
)
COMMANDS = [*OF_CLIENTS, "manifest", "wal"]
OF_THE_SERVER = ("shalekv.rpc", "shalekv.roles", "shalekv.engine", "shalekv.store", "uvloop")


def command(name: str) -> click.Command:
    """The command called `name`."""
    found = getattr(importlib.import_module(f"shalekv.cli.{name}"), name)
    assert isinstance(found, click.Command)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches(name: str) -> None:
    """Every --help has examples, one on each line, and a table of exit codes."""
    result = CliRunner().invoke(command(name), ["--help"])
    assert result.exit_code == 0
    examples = result.stdout.split("Examples:\n", 1)[1].split("\n\n", 1)[0].splitlines()
    assert len(examples) >= 2
    assert all(f"shalekv {name}" in line for line in examples)
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
    assert "Exit codes:\n" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    """No option is listed without a word about it."""
    options = [p for p in command(name).params if isinstance(p, click.Option)]
    assert [option.name for option in options if not option.help] == []


@pytest.mark.parametrize("name", OF_CLIENTS)
def test_commands_for_servers_load_none_of_the_server(name: str) -> None:
    """A command that talks to a server starts fast: it imports the light client only."""
    script = f"import sys, shalekv.cli.{name}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    loaded = run.stdout.split()
    assert [module for module in loaded if module.startswith(OF_THE_SERVER)] == []
