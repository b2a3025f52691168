"""`shalekv store verify` on real stores: what is fit passes, and what loses data does not.

It is the real command, in a process of its own. That other servers are fit, the contract says.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from shalekv.cli.exit_codes import ExitCode
from tests.servers.fixtures import BUCKET
from tests.servers.proxy import proxy_before
from tests.servers.s3 import S3Server

LITTLE = ("--rounds", "4", "--large-object-bytes", str(6 << 20))
ONE_WINNER = "one winner per slot of the log"


@dataclass(frozen=True, slots=True)
class Verified:
    """What the command said."""

    code: int
    results: Mapping[str, str]  # by check
    lost: Mapping[str, str]  # of those that failed
    errors: str

    def having(self, result: str) -> set[str]:
        return {check for check, found in self.results.items() if found == result}


async def run(*argv: str, env: Mapping[str, str]) -> tuple[int, bytes, str]:
    """The exit code and the output of a command, run to its end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shalekv.cli.main", *argv),
        env=os.environ | env,
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output, errors.decode()


async def verified(url: str, *flags: str, env: Mapping[str, str]) -> Verified:
    argv = ["store", "verify", "--url", url, "--format", "json", *LITTLE]
    code, output, errors = await run(*argv, *flags, env=env)
    rows = [json.loads(line) for line in output.splitlines()]
    results = {row["check"]: row["result"] for row in rows}
    return Verified(code, results, {row["check"]: row["lost"] for row in rows}, errors)


async def verified_on(server: S3Server, url: str, *flags: str) -> Verified:
    """Verify a database in a bucket of a server that speaks S3."""
    return await verified(url, "--endpoint-url", server.endpoint, *flags, env=server.environment)


@pytest.fixture
def folder() -> str:
    """Of a new database in the bucket."""
    return str(uuid4())


@pytest.fixture
def url(folder: str) -> str:
    """Of this database."""
    return f"s3://{BUCKET}/{folder}"


async def left_in(server: S3Server, folder: str) -> bytes:
    target = f"/{BUCKET}?list-type=2&prefix={folder}"
    return await asyncio.to_thread(server.request, "GET", target)


async def test_a_bucket_that_is_not_there(s3_server: S3Server) -> None:
    """What cannot be reached is an error of the store, and no verdict about it."""
    found = await verified_on(s3_server, "s3://another-bucket/a/database")
    assert (found.code, found.results) == (ExitCode.STORE, {})
    assert "another-bucket" in found.errors
    assert "Traceback" not in found.errors


async def test_a_folder_is_fit(tmp_path: Path) -> None:
    """A local folder passes; that it keeps no metadata is told."""
    found = await verified(f"file://{tmp_path}/database", env={})
    assert (found.code, found.having("told")) == (ExitCode.OK, {"metadata"}), found
    assert found.having("failed") == found.having("unanswered") == set()
    assert len(found.results) >= 14
    assert "is fit" in found.errors


async def test_broken_promises_are_noticed(s3_server: S3Server, url: str, folder: str) -> None:
    """A server that ignores conditions and lists out of order is unfit for just these reasons;
    lost metadata is told, and no reason. No database is created there.
    """
    async with proxy_before(s3_server) as proxy:
        rule = proxy.drop_header("If-None-Match")
        proxy.lists_reversed = proxy.metadata_hidden = True
        server = proxy.server
        found = await verified_on(server, url)
        argv = ["serve", "--create", "--url", url, "--endpoint-url", server.endpoint]
        code, _, errors = await run(*argv, "--listen", "127.0.0.1:0", env=server.environment)
    assert code == ExitCode.STORE, errors
    assert "The store is unfit, and no database was created" in errors
    assert b"<KeyCount>0</KeyCount>" in await left_in(s3_server, folder)
    assert rule.spent > 0
    assert found.code == ExitCode.STORE
    one_winner, lists = {"create-races", "second-create", "large-object"}, found.having("failed")
    assert one_winner < lists <= one_winner | {c for c in found.results if c.startswith("list-")}
    assert found.lost["create-races"].startswith(ONE_WINNER)
    assert found.lost["list-order"].startswith("one current manifest")
    assert found.having("told") == {"metadata"}
    assert "is unfit: it fails " in found.errors
