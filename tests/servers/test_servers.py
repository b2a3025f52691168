"""Each server starts, does what it is asked, and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.servers.azurite import azurite
from tests.servers.dynamodb import dynamodb_local
from tests.servers.etcd import etcd
from tests.servers.google import google
from tests.servers.mariadb import mariadb
from tests.servers.moto import moto
from tests.servers.postgres import postgres
from tests.servers.process import Program, ServerFailed, answers_http, running
from tests.servers.s3 import S3Server
from tests.servers.s3rver import s3rver
from tests.servers.versitygw import versitygw

OBTAIN_S = 900  # the first test of a server may have to install it
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(OBTAIN_S)

Start = Callable[[], AbstractContextManager[S3Server]]


@pytest.mark.parametrize("start", [versitygw, moto, s3rver])
def test_s3(start: Start) -> None:
    """A bucket can be created, and what was written is read again."""
    with start() as s3:
        s3.create_bucket("bucket")
        s3.request("PUT", "/bucket/folder/name", b"content")
        assert s3.request("GET", "/bucket/folder/name") == b"content"
    with pytest.raises(OSError, match="refused"):
        s3.request("GET", "/bucket/folder/name")


def test_versitygw_checks_signatures() -> None:
    """Whoever does not know the secret is refused."""
    with versitygw() as s3:
        thief = S3Server(s3.endpoint, secret_key="guessed")
        with pytest.raises(HTTPError) as refusal:
            thief.create_bucket("bucket")
        refusal.value.close()
        assert refusal.value.code == 403


@pytest.mark.parametrize("start", [dynamodb_local, moto])
def test_dynamodb(start: Callable[[], AbstractContextManager[S3Server]]) -> None:
    """It tells that it has no tables."""
    with start() as server:
        dynamo = S3Server(server.endpoint, server.access_key, server.secret_key)
        headers = {
            "x-amz-target": "DynamoDB_20120810.ListTables",
            "content-type": "application/x-amz-json-1.0",
            "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
        }
        signed = dynamo.sign("POST", "/", headers, service="dynamodb")
        request = Request(server.endpoint + "/", b"{}", signed, method="POST")  # noqa: S310 - it is http://127.0.0.1
        with urlopen(request, timeout=30) as reply:  # noqa: S310 - as above
            assert json.load(reply) == {"TableNames": []}


def test_azurite() -> None:
    """A container can be created once."""
    with azurite() as azure:
        azure.create_container("container")
        with pytest.raises(HTTPError) as refusal:
            azure.create_container("container")
        refusal.value.close()
        assert refusal.value.code == 409


def test_google() -> None:
    """A name is taken once, and what was written is read again."""
    with google() as server:
        server.create_bucket("bucket")
        url = f"{server.endpoint}/bucket/folder%2Fname"
        headers = {"x-goog-if-generation-match": "0", "x-goog-meta-note": "n"}
        request = Request(url, b"content", headers, method="PUT")  # noqa: S310 - it is http://127.0.0.1
        urlopen(request, timeout=30).close()  # noqa: S310 - as above
        with pytest.raises(HTTPError) as refusal:
            urlopen(request, timeout=30)  # noqa: S310 - as above
        refusal.value.close()
        assert refusal.value.code == 412
        with urlopen(url, timeout=30) as reply:  # noqa: S310 - as above
            assert reply.read() == b"content"
            assert reply.headers["x-goog-meta-note"] == "n"


def test_ends_with_the_tests(tmp_path: Path) -> None:
    """A server does not outlive a process that is killed where it stands."""
    told = tmp_path / "endpoint"
    script = (
        "import os, pathlib, signal, sys\n"
        "from tests.servers.versitygw import versitygw\n"
        "with versitygw() as s3:\n"
        f"    pathlib.Path({str(told)!r}).write_text(s3.endpoint)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}  # it leaves its folder behind
    argv = [sys.executable, "-c", script]
    ran = subprocess.run(argv, cwd=ROOT, env=env, check=False, timeout=OBTAIN_S)
    assert ran.returncode == -signal.SIGKILL
    answers = answers_http(told.read_text())
    deadline = time.monotonic() + 10
    while answers():
        assert time.monotonic() < deadline


def test_shows_the_log(tmp_path: Path) -> None:
    """A server that does not start says why in the error."""
    program = Program(["sh", "-c", "echo no such flag; exit 3"])
    with (
        pytest.raises(ServerFailed, match=r"ended with 3(.|\n)*no such flag\n$"),
        running(program, tmp_path / "log", lambda: False),
    ):
        pass


def test_mariadb() -> None:
    """It starts, which includes that it greets."""
    with mariadb() as server:
        assert server.url().startswith("mysql+asyncmy://shalekv:shalekv@127.0.0.1:")


def test_postgres() -> None:
    """It starts, which includes that it takes connections."""
    with postgres() as server:
        assert server.url().startswith("postgresql+asyncpg://shalekv:shalekv@127.0.0.1:")


def test_etcd() -> None:
    """It starts, which includes that it has a leader."""
    with etcd() as server:
        assert server.address.startswith("127.0.0.1:")
