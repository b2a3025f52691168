"""`shalekv store verify` on real servers: what is fit passes, and what loses data does not.

It is the real command, in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from shalekv.cli.exit_codes import ExitCode
from tests.servers.azurite import azurite
from tests.servers.google import google
from tests.servers.moto import moto
from tests.servers.proxy import proxy_before
from tests.servers.s3 import S3Server
from tests.servers.s3rver import s3rver
from tests.servers.versitygw import versitygw

URL = "s3://bucket/a/database"
LITTLE = ("--rounds", "10", "--large-object-bytes", str(6 << 20))
ONE_WINNER = "one winner per slot of the log"


@dataclass(frozen=True, slots=True)
class Verified:
    """What the command said."""

    code: int
    results: Mapping[str, str]  # by check
    lost: Mapping[str, str]  # of those that failed
    errors: str

    def having(self, result: str) -> set[str]:
        """The checks that came to this."""
        return {check for check, found in self.results.items() if found == result}


async def verified(url: str, *flags: str, env: Mapping[str, str] | None = None) -> Verified:
    """Run it to its end."""
    argv = [sys.executable, "-m", "shalekv.cli.main", "store", "verify", "--url", url]
    process = await asyncio.create_subprocess_exec(
        *argv, *flags, "--format", "json", env=os.environ | (env or {}), stdout=PIPE, stderr=PIPE
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    rows = [json.loads(line) for line in output.splitlines()]
    return Verified(
        code=process.returncode or 0,
        results={row["check"]: row["result"] for row in rows},
        lost={row["check"]: row["lost"] for row in rows if row["lost"]},
        errors=errors.decode(),
    )


async def verified_on(server: S3Server, *flags: str) -> Verified:
    """Run it for a database in the bucket of a server that speaks S3."""
    return await verified(URL, "--endpoint-url", server.endpoint, *flags, env=server.environment)


def assert_fit(found: Verified) -> None:
    """Every check has passed, and said what is not asked for."""
    assert found.code == ExitCode.OK, found
    assert found.results.pop("conditional-copy") == "not needed"  # type: ignore[attr-defined]
    assert found.having("passed") == set(found.results), found
    assert len(found.results) >= 13
    assert "is fit" in found.errors


@pytest.fixture(scope="module")
def real() -> Iterator[S3Server]:
    """A real server whose conditions hold."""
    with versitygw() as server:
        server.create_bucket("bucket")
        yield server


async def test_a_real_s3_server_is_fit(real: S3Server) -> None:
    """All checks pass at their defaults, and nothing is left in the bucket."""
    assert_fit(await verified_on(real))
    listed = await asyncio.to_thread(real.request, "GET", "/bucket?list-type=2")
    assert b"<KeyCount>0</KeyCount>" in listed


async def test_a_simulated_s3_server_is_fit() -> None:
    """Where metadata is lost, as on moto, it is told, and all else passes."""
    with moto() as server:
        server.create_bucket("bucket")
        found = await verified_on(server, *LITTLE)
    assert found.code == ExitCode.OK, found
    assert found.having("told") <= {"metadata"}
    assert found.having("failed") == found.having("unanswered") == set()


async def test_azure_is_fit() -> None:
    """All checks pass on Azurite."""
    with azurite() as server:
        server.create_container("bucket")
        env = {
            "AZURE_STORAGE_ACCOUNT_NAME": server.account,
            "AZURE_STORAGE_ACCOUNT_KEY": server.key,
        }
        flags = ("--endpoint-url", server.endpoint, *LITTLE)
        assert_fit(await verified("az://bucket/a/database", *flags, env=env))


async def test_google_is_fit() -> None:
    """All checks pass on an emulator of Google's storage."""
    with google() as server:
        server.create_bucket("bucket")
        flags = ("--endpoint-url", server.endpoint, "--anonymous", *LITTLE)
        assert_fit(await verified("gs://bucket/a/database", *flags))


async def test_a_folder_is_fit(tmp_path: Path) -> None:
    """A local folder passes; that it keeps no metadata is told."""
    found = await verified(f"file://{tmp_path}/database", *LITTLE)
    assert (found.code, found.having("told")) == (ExitCode.OK, {"metadata"}), found
    assert found.having("failed") == found.having("unanswered") == set()


async def test_a_server_that_ignores_conditions_is_unfit() -> None:
    """s3rver lets all racers win: it is told, and so is what would be lost."""
    with s3rver() as server:
        server.create_bucket("bucket")
        found = await verified_on(server, *LITTLE, "--read-attempts", "1")
    assert found.code == ExitCode.STORE
    assert found.having("failed") >= {"create-races", "second-create", "large-object"}, found
    assert found.lost["create-races"].startswith(ONE_WINNER)
    assert "is unfit: it fails create-races" in found.errors


async def test_a_dropped_condition_is_noticed(real: S3Server) -> None:
    """A server is unfit by way of a proxy that drops If-None-Match, and by no other check."""
    async with proxy_before(real) as proxy:
        rule = proxy.drop_header("If-None-Match")
        found = await verified_on(proxy.server, *LITTLE)
    assert rule.spent > 0
    assert found.code == ExitCode.STORE
    assert found.having("failed") == {"create-races", "second-create", "large-object"}, found
    assert found.lost["second-create"].startswith(ONE_WINNER)


async def test_two_phases_need_no_condition(real: S3Server, tmp_path: Path) -> None:
    """The same proxy does no harm in two phases, whose records are raced for as well."""
    async with proxy_before(real) as proxy:
        proxy.drop_header("If-None-Match")
        records = {"SHALEKV_STORE__RECORDS_URL": f"sqlite://{tmp_path}/records.db"}
        env = proxy.server.environment | records
        flags = ("--cas", "two_phase", "--endpoint-url", proxy.server.endpoint, *LITTLE)
        found = await verified(URL, *flags, env=env)
    assert found.having("passed") >= {"create-races", "record-races", "put-and-copy"}, found
    assert_fit(found)


async def test_lists_out_of_order_are_noticed_and_lost_metadata_is_told(real: S3Server) -> None:
    """A server is unfit whose lists come in another order; that metadata is lost it is told."""
    async with proxy_before(real) as proxy:
        proxy.lists_reversed = proxy.metadata_hidden = True
        found = await verified_on(proxy.server, *LITTLE)
    assert found.code == ExitCode.STORE
    assert "list-order" in found.having("failed"), found
    assert found.lost["list-order"].startswith("one current manifest")
    assert found.having("told") == {"metadata"}
    assert "create-races" in found.having("passed")


async def test_a_bucket_that_is_not_there(real: S3Server) -> None:
    """What cannot be reached is an error of the store, and no verdict about it."""
    flags = ("--endpoint-url", real.endpoint, *LITTLE)
    found = await verified("s3://another-bucket/a/database", *flags, env=real.environment)
    assert (found.code, found.results) == (ExitCode.STORE, {})
    assert "another-bucket" in found.errors
    assert "Traceback" not in found.errors


async def test_no_database_is_created_on_an_unfit_store(real: S3Server) -> None:
    """`serve --create` refuses a store that ignores conditions, and leaves nothing there."""
    async with proxy_before(real) as proxy:
        proxy.drop_header("If-None-Match")
        server = proxy.server
        argv = [sys.executable, "-m", "shalekv.cli.main", "serve", "--create", "--url", URL]
        process = await asyncio.create_subprocess_exec(
            *argv,
            *("--endpoint-url", server.endpoint, "--listen", "127.0.0.1:0"),
            env=os.environ | server.environment,
            stdout=PIPE,
            stderr=PIPE,
        )
        _, errors = await process.communicate()
    assert process.returncode == ExitCode.STORE, errors
    assert b"The store is unfit, and no database was created" in errors
    listed = await asyncio.to_thread(real.request, "GET", "/bucket?list-type=2")
    assert b"<KeyCount>0</KeyCount>" in listed
