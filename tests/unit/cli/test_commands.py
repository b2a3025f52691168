"""The help of all commands is complete, and commands import no more than they need."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shalekv.cli.console.exit_codes import MEANING, ExitCode
from shalekv.cli.console.lazy_commands import LazyCommands
from shalekv.cli.console.settings_flags import settings_of
from shalekv.cli.main import COMMANDS, OPTIONS, WORDS, shalekv
from shalekv.settings import WriterConfig

OF_CLIENTS = (
    "get put delete add txn scan load dump watch bench status top health completion admin".split()
)
OF_SERVERS = (
    *("pydantic", "structlog", "uvloop"),
    *(f"shalekv.{name}" for name in "rpc server jobs replica write watch read store".split()),
)


def help_of(*words: str) -> str:
    result = CliRunner().invoke(shalekv, [*words, "--help"])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    """The help of client commands has examples, exit codes, and a text for each option."""
    text = help_of(name)
    command = shalekv.get_command(click.Context(shalekv), name)
    assert command is not None
    if name in {*OF_CLIENTS, "manifest", "wal"} - {"admin"}:
        options = [each for each in command.params if isinstance(each, click.Option)]
        assert [option.name for option in options if not option.help] == []
        assert all(len(line) <= 100 for line in text.splitlines())
        examples = text.split("Examples:\n", 1)[1].split("\n\n", 1)[0].splitlines()
        assert len(examples) >= 2
        assert all(f"shalekv {name}" in line for line in examples)
        assert "Exit codes:\n" in text


def test_help_of_serve_names_every_setting_and_exit_code() -> None:
    """Each setting is listed under its component, with flag, variable, default and limits."""
    text = help_of("serve")
    assert all(f"{code.value:>3}  {meaning}" in text for code, meaning in MEANING.items())
    words = " ".join(text.split())
    for setting in settings_of(WriterConfig):
        assert setting.flag in words
        assert setting.variable in words
        assert setting.field.is_required() or f"[default: {setting.default};" in words
        assert setting.choices or setting.limits in words
    assert all(f"[{group}]" in words for group in WriterConfig.model_fields)


def loaded_by(*modules: str) -> list[str]:
    script = f"import json, sys, {', '.join(modules)}; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    return list(json.loads(run.stdout))


def test_commands_are_imported_when_they_are_called() -> None:
    """The table of commands imports only click, so that every command starts fast."""
    modules = loaded_by("shalekv.cli.main")
    assert "click" in modules
    assert not {*modules} & {*OF_SERVERS, "grpc", "asyncio"}


def test_commands_of_clients_load_none_of_the_server() -> None:
    """Client commands import only the packages of the client, and click."""
    modules = loaded_by(*(f"shalekv.cli.commands.{name}" for name in (*OF_CLIENTS, "admin_stats")))
    assert "shalekv_client" in modules
    assert [module for module in modules if module.startswith(OF_SERVERS)] == []


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("gte", "`shalekv get`"),
        ("set k v", "`shalekv put KEY VALUE`"),
        ("keys", "`shalekv scan --keys-only`"),
        ("access whomai", "`shalekv access whoami`"),
        ("put k v --nx", "--if-absent"),
    ],
)
def test_what_is_misspelt_or_called_differently_is_suggested(typed: str, meant: str) -> None:
    """An unknown command or option ends with what was meant."""
    ended = CliRunner().invoke(shalekv, typed.split(), prog_name="shalekv")
    assert ended.exit_code == ExitCode.USAGE
    assert f"Did you mean {meant}?" in ended.stderr


def test_what_is_suggested_can_be_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Words of other products are no commands here, and what is suggested for them is one."""
    assert not set(WORDS) & set(COMMANDS)
    assert isinstance(shalekv, LazyCommands)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    for name, *arguments in map(str.split, WORDS.values()):
        if name not in {"--help", "--version"}:
            command = shalekv.get_command(click.Context(shalekv), name)
            assert command is not None
            with command.make_context(name, arguments):
                pass
    commands = [command for _, command in shalekv.members()]
    names = {name for command in commands for option in command.params for name in option.opts}
    assert {meant.split()[0] for meant in OPTIONS.values()} <= names


def test_garbage_is_collected_once_the_command_is_imported() -> None:
    """A disabled garbage collector is enabled after the import, whose objects are frozen."""
    gc.disable()
    try:
        kept_count = gc.get_freeze_count()
        shalekv.get_command(click.Context(shalekv), "get")
        assert gc.isenabled()
        assert gc.get_freeze_count() > kept_count
    finally:
        gc.unfreeze()
        gc.enable()
