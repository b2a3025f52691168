"""The settings that `shalekv doctor` examines, and the flags of a store: of shalekv[server]."""

from __future__ import annotations

from pathlib import Path

import click

from shalekv.cli.console.bucket import remembered_config, remembered_settings
from shalekv.cli.console.configuration import client_settings
from shalekv.errors import InvalidSetting
from shalekv.settings import AnyConfig, DatabaseSettings


class _AnyDatabase(AnyConfig):
    """All settings; a database need not be named."""

    database: DatabaseSettings = DatabaseSettings(url="memory://doctor")


def configuration() -> tuple[AnyConfig | None, Path | None, list[str]]:
    """Return the settings of the running command, the file of --config, and what is wrong."""
    file = remembered_config()
    try:
        return remembered_settings(_AnyDatabase), file, []
    except click.UsageError as error:
        return None, file, error.message.splitlines()


def problem_of_file(file: Path) -> str:
    """Return what is wrong with a file of settings; empty: nothing."""
    try:
        client_settings(file)
    except InvalidSetting as error:
        return str(error)
    return ""
