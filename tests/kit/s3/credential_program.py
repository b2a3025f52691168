"""A program that is the source of credentials, and ways in which it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

KEYS = "[default]\naws_access_key_id = K\naws_secret_access_key = S\n"
SECRET = "SENTINELofThePrograms/Own+Words"
STALE = {"AccessKeyId": "K", "SecretAccessKey": SECRET, "Expiration": "2020-01-01T00:00:00Z"}
GOOD = {**STALE, "Expiration": "2100-01-01T00:00:00Z"}

Program = Callable[[str], None]


def program_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A function that sets the shell script which AWS's files name as the source."""
    script = folder / "program"
    config = folder / "config"
    config.write_text(f"[default]\ncredential_process = /bin/sh {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    return lambda text: (script.write_text(text), None)[1]


def saying(told: object) -> str:
    return f"echo '{json.dumps({'Version': 1, **told} if isinstance(told, dict) else told)}'"


FAILING = [
    saying(STALE),
    saying({**STALE, "Expiration": "soon"}),
    saying({}),
    saying([1]),
    "echo no JSON",
    f"echo {SECRET} >&2; exit 1",
]
