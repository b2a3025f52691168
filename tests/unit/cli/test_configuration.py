"""Settings from flags, the environment and a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shalekv.cli.console.configuration import client_settings, load_settings
from shalekv.cli.console.exit_codes import ExitCode, exit_code_of
from shalekv.cli.console.settings_flags import flag_of, settings_of, variable_of
from shalekv.cli.console.variables import CLIENT_VARIABLES
from shalekv.cli.main import shalekv
from shalekv.errors import InvalidSetting
from shalekv.settings import AnyConfig, WriterConfig
from shalekv.settings.retired import REMOVED, RENAMED

URL = {"url": "memory://trial"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SHALEKV_"):
            monkeypatch.delenv(name)


def _file(folder: Path, text: str) -> Path:
    path = folder / "shalekv.toml"
    path.write_text(text, encoding="utf-8")
    return path


def _problem(flags: dict[str, Any], file: Path | None = None) -> str:
    with pytest.raises(InvalidSetting) as raised:
        load_settings(flags, file, WriterConfig)
    return str(raised.value)


def test_flag_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each source takes precedence over the following ones, for each setting separately."""
    file = _file(
        tmp_path,
        """
        [database]
        url = "memory://file"
        [writer]
        max_parallel_writes = 2
        flush_interval_ms = 22
        flush_bytes = 22222
        """,
    )
    monkeypatch.setenv("SHALEKV_WRITER__MAX_PARALLEL_WRITES", "3")
    monkeypatch.setenv("SHALEKV_WRITER__FLUSH_INTERVAL_MS", "33")
    settings = load_settings({"max_parallel_writes": "4", "flush_bytes": None}, file, WriterConfig)
    assert settings.database.url == "memory://file"
    assert settings.writer.max_parallel_writes == 4
    assert settings.writer.flush_interval_ms == 33
    assert settings.writer.flush_bytes == 22_222
    assert settings.writer.admission_timeout_ms == 1_000


# Settings that others are needed for.
TOGETHER = {
    "tls_cert": ("tls_key",),
    "tls_key": ("tls_cert",),
    "tls_client_ca": ("tls_cert", "tls_key"),
    "oidc_issuer": ("oidc_audience",),
    "oidc_audience": ("oidc_issuer",),
}


# Values of settings that are texts of a form.
TEXTS = {"otlp_endpoint": "http://127.0.0.1:1", "usd_per_1000": "writes=0.005"}


@pytest.mark.parametrize("setting", list(settings_of(WriterConfig)), ids=lambda s: s.toml_key)
def test_every_setting_has_three_names(
    setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value given by flag, by variable or by key sets the same field."""
    if setting.is_switch:
        text, toml = "true", "true"
    elif setting.choices:
        text, toml = setting.choices[-1], f'"{setting.choices[-1]}"'
    elif setting.field.annotation is str:
        text = TEXTS.get(setting.name, "127.0.0.1:1")
        toml = f'"{text}"'
    else:
        most = next(rule.le for rule in setting.field.metadata if hasattr(rule, "le"))
        text = toml = str(setting.field.annotation(most) if setting.name == "trace_ratio" else most)
    flags = {} if setting.name == "url" else dict(URL)
    if setting.name == "safekeepers":
        flags["wal"] = "quorum"  # which they belong to
    for name in TOGETHER.get(setting.name, ()):
        flags[name] = text
    if setting.name == "fence_poll_ms":
        flags["open_timeout_ms"] = text  # which bounds it
    by_flag = load_settings(flags | {setting.name: text}, None, WriterConfig)
    file = _file(tmp_path, f"[{setting.group}]\n{setting.name} = {toml}")
    by_file = load_settings(flags, file, WriterConfig)
    monkeypatch.setenv(setting.variable, text)
    by_variable = load_settings(flags, None, WriterConfig)
    assert by_flag == by_variable == by_file
    assert str(getattr(getattr(by_flag, setting.group), setting.name)).lower() == text


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable, as container tools leave it, does not set anything."""
    monkeypatch.setenv("SHALEKV_WRITER__MAX_PARALLEL_WRITES", "")
    assert load_settings(URL, None, WriterConfig).writer.max_parallel_writes == 1


def test_a_rule_of_a_group_names_the_setting_concerned() -> None:
    """A failed check of HOST:PORT names --listen."""
    for listen in ("localhost", ":7654", "127.0.0.1:http", "127.0.0.1:65536"):
        assert _problem(URL | {"listen": listen}).startswith("--listen: listen must be HOST:PORT")


def test_what_is_for_clients_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables and keys of commands that call a server are not refused as unknown settings."""
    for variable in CLIENT_VARIABLES:
        monkeypatch.setenv(variable, "x")
    file = tmp_path / "shalekv.toml"
    file.write_text('[client]\ntls_ca = "ca.crt"\n')
    assert load_settings(URL, file, WriterConfig).database.url == URL["url"]
    assert client_settings(file) == {"tls_ca": "ca.crt"}
    file.write_text('[client]\ntls_cax = "ca.crt"\n')
    for load in (client_settings, lambda file: load_settings(URL, file, WriterConfig)):
        with pytest.raises(InvalidSetting, match=r"client.tls_cax \(did you mean client.tls_ca"):
            load(file)


def test_retired_settings_are_no_settings_and_new_names_are() -> None:
    """No setting has a retired name, not in another group either, since names are flags."""
    names = {setting.name for setting in settings_of(AnyConfig)}
    keys = {setting.toml_key for setting in settings_of(AnyConfig)}
    retired = [key.partition(".")[2] for key in (*RENAMED, *REMOVED)]
    assert len(set(retired)) == len(retired)
    assert names & set(retired) == set()
    assert set(RENAMED.values()) <= keys


@pytest.mark.parametrize("key", [*RENAMED, *REMOVED])
def test_a_retired_setting_is_refused_with_what_became_of_it(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the successor, or what decides now, for a flag, a variable and a key."""

    def advice(form: Callable[[str], str]) -> str:
        if key in RENAMED:
            return f"{form(key)} was renamed to {form(RENAMED[key])}"
        return f"{form(key)} was removed: {REMOVED[key]}"

    command = ["serve", "--url", URL["url"], flag_of(key), "1"]
    by_flag = CliRunner().invoke(shalekv, command)
    assert by_flag.exit_code == ExitCode.USAGE == exit_code_of(InvalidSetting(""))
    assert f"Error: {advice(flag_of)}\n" in by_flag.output
    group, _, name = key.partition(".")
    file = _file(tmp_path, f"[{group}]\n{name} = 1")
    assert _problem(URL, file) == f"{file}: {advice(str)}"
    monkeypatch.setenv(variable_of(key), "1")
    assert _problem(URL) == advice(variable_of)
