"""Stores for tests, on a server that is given, and a program that is a source of credentials."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shalekv.clock import LoopClock
from shalekv.runtime import Runtime
from shalekv.settings import StoreSettings
from shalekv.store.s3.store import S3Store
from shalekv.store.url import BucketUrl, Provider
from tests.kit.inline_runtime import InlineWorkers

BUCKET = "bucket"
FOLDER = "folder"
URL = f"s3://{BUCKET}/{FOLDER}"
MIB = 1024 * 1024


def real_runtime() -> Runtime:
    """Real time, since real sockets are waited for; no threads."""
    return Runtime(LoopClock(), Random(0), InlineWorkers())


def new_store(endpoint: str, **settings: Any) -> S3Store:
    """A store at `endpoint`; the credentials are those of the environment."""
    place = BucketUrl(Provider.S3, BUCKET, FOLDER)
    return S3Store(place, real_runtime(), StoreSettings(endpoint_url=endpoint, **settings))


@asynccontextmanager
async def opened(endpoint: str, **settings: Any) -> AsyncIterator[S3Store]:
    store = new_store(endpoint, **settings)
    try:
        yield store
    finally:
        await store.close()


KEYS = "[default]\naws_access_key_id = K\naws_secret_access_key = S\n"
SECRET = "SENTINELofThePrograms/Own+Words"
STALE = {"AccessKeyId": "K", "SecretAccessKey": SECRET, "Expiration": "2020-01-01T00:00:00Z"}
GOOD = {**STALE, "Expiration": "2100-01-01T00:00:00Z"}

Program = Callable[[str], None]


def forget_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has nothing of the machine's own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent/config")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent/credentials")


def program_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A function that sets the shell script which AWS's files name as the source."""
    script = folder / "program"
    config = folder / "config"
    config.write_text(f"[default]\ncredential_process = /bin/sh {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    return lambda text: (script.write_text(text), None)[1]


def saying(value: object) -> str:
    return f"echo '{json.dumps({'Version': 1, **value} if isinstance(value, dict) else value)}'"


FAILING = [
    saying(STALE),
    saying({**STALE, "Expiration": "soon"}),
    saying({}),
    saying([1]),
    "echo no JSON",
    f"echo {SECRET} >&2; exit 1",
]
